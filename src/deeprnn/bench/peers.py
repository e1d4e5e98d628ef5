"""The peers of the benchmark: one function written in several ways, and PyTorch's own layers for scale."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from deeprnn.backends import TransitionSpec, choose, load, unroll_input

Results = tuple[Tensor, Sequence[Tensor]]


@dataclass(frozen=True)
class Work:
    """The shape of one measurement."""

    steps: int
    batch: int
    hidden: int
    depth: int = 2
    inputs: int = 88
    device: str = "cpu"

    @property
    def spec(self) -> TransitionSpec:
        shortcuts = (False,) + (True,) * (self.depth - 1)
        return TransitionSpec((self.hidden,) * self.depth, ("sigmoid",) * self.depth, shortcuts)


@dataclass
class Peer:
    """Something that can be timed: `run()` gives all outputs h, `parameters` take part in the backward."""

    name: str
    run: Callable[[], Tensor]
    parameters: list[Tensor]
    truth: Callable[[], Results]  # the same outputs and gradients in float64
    forward: Callable[[], Any] | None = None  # what is timed, where it is not run() without gradients
    train: Callable[[], Any] | None = None  # forward and backward, where it is not run() and then backward
    results: Callable[[], Results] | None = None  # to check, where run() is not timed
    by_host: bool = False  # timed by the host's clock: its work is not on torch's stream
    calls: int = 1  # in one sample: a short call would measure its own launch
    note: str = ""


class Loop(nn.Module):
    """The ⊕ as one writes it in PyTorch: linear layers, and a loop that indexes the inputs."""

    def __init__(self, work: Work):
        super().__init__()
        n, H = work.depth, work.hidden
        self.U = nn.ModuleList(nn.Linear(work.inputs, H) for _ in range(n))
        self.W = nn.ModuleList(nn.Linear(H, H, bias=False) for _ in range(n))
        self.S = nn.ModuleList(nn.Linear(H, H, bias=False) for _ in range(n - 1))
        self.to(work.device)

    def step(self, entered: list[Tensor], h: Tensor) -> Tensor:
        z = torch.sigmoid(self.W[0](h) + entered[0])
        for l in range(1, len(self.W)):
            z = torch.sigmoid(self.W[l](z) + self.S[l - 1](h) + entered[l])
        return z

    def forward(self, x: Tensor) -> Tensor:
        entered = [U(x) for U in self.U]
        h = x.new_zeros(x.shape[1], self.W[0].in_features)  # type: ignore[call-overload]
        states = []
        for t in range(x.shape[0]):
            h = self.step([a[t] for a in entered], h)
            states.append(h)
        return torch.stack(states)

    def by_backend(self, x: Tensor, spec: TransitionSpec, backend: str) -> Tensor:
        """The same function through a backend."""
        U, b = [U.weight for U in self.U], [U.bias for U in self.U]
        h0 = x.new_zeros(x.shape[1], spec.hidden_size)
        W, S = [W.weight for W in self.W], [S.weight for S in self.S]
        return unroll_input(x, U, b, h0, W, S, spec, backend=backend)[0]  # type: ignore[arg-type]


class Bench:
    """One piece of work: its weights and data, shared by all peers that compute the same function."""

    def __init__(self, work: Work, seed: int = 0):
        torch.manual_seed(seed)
        self.work = work
        self.model = Loop(work)
        self.x = torch.randn(work.steps, work.batch, work.inputs, device=work.device)
        self.g = torch.randn(work.steps, work.batch, work.hidden, device=work.device)
        self._truth: Results | None = None

    def truth(self) -> Results:
        """Outputs and gradients by the reference in float64, computed once."""
        if self._truth is None:
            self._truth = _in_double(
                self.model, lambda m, x: m.by_backend(x, self.work.spec, "reference"), self.x, self.g
            )
        return self._truth

    def peer(self, name: str) -> Peer:
        """The peer of that name."""
        if name in LIBRARY:
            return self._library(name)
        if name == JAX:
            from deeprnn.bench.jax_scan import jax_peer

            return jax_peer(self)
        kind = name.removesuffix(GRAPH) if name != "CUDA graph" else "eager loop"
        runs: dict[str, Callable[[], Tensor]] = {
            "ours": lambda: self.model.by_backend(self.x, self.work.spec, "auto"),
            "ours, called": lambda: self.model.by_backend(self.x, self.work.spec, "auto"),
            "reference": lambda: self.model.by_backend(self.x, self.work.spec, "reference"),
            "plain calls": lambda: self.model.by_backend(self.x, self.work.spec, "cpu"),
            "eager loop": lambda: self.model(self.x),
        }
        run = self._compiled() if kind == "torch.compile" else runs[kind]
        peer = Peer(name, run, list(self.model.parameters()), self.truth, note=NOTES.get(name, ""))
        if name == "ours":
            peer.note = describe_ours(self.work)
        if name == "plain calls":
            peer.run, peer.train = _on_plain_path(peer, self.g)
        elif self.work.device == "cuda" and (name in ("ours", "CUDA graph") or name.endswith(GRAPH)):
            graphs = Captured(peer, self.g)
            peer.train = peer.results = graphs.train
            peer.forward, peer.calls = graphs.forward, 4
        return peer

    def _compiled(self) -> Callable[[], Tensor]:
        torch._dynamo.reset()  # else a second shape would be compiled for all shapes, and run slower
        step = torch.compile(self.model.step)

        def run() -> Tensor:
            entered = [U(self.x) for U in self.model.U]
            h, states = self.x.new_zeros(self.work.batch, self.work.hidden), []
            for t in range(self.work.steps):
                h = step([a[t] for a in entered], h)
                states.append(h)
            return torch.stack(states)

        return run

    def _library(self, name: str) -> Peer:
        """PyTorch's own layers, another function of about the same cost; checked against their float64."""
        kind = nn.LSTM if name == "nn.LSTM" else nn.RNN
        layers = 2 if name.endswith("x2") else 1
        module = kind(self.work.inputs, self.work.hidden, layers).to(self.work.device)
        return Peer(
            name,
            lambda: module(self.x)[0],
            list(module.parameters()),
            lambda: _in_double(module, lambda m, x: m(x)[0], self.x, self.g),
            note="another function, for scale",
        )


LIBRARY = ("nn.RNN", "nn.RNN x2", "nn.LSTM")
JAX = "JAX lax.scan"
GRAPH = ", CUDA graph"
NOTES = {
    "CUDA graph": "the eager loop in a CUDA graph",
    "ours, called": "from Python, without a graph",
    "torch.compile": "the step compiled, the loop in Python",
}


def peers_for(device: str, compiled: bool = False) -> tuple[str, ...]:
    """The peers measured by default on a device; on a GPU ours is replayed as a CUDA graph, as it trains."""
    if device == "cpu":
        names = ("ours", "eager loop", "reference", *LIBRARY, "plain calls")
        return (*names, "torch.compile") if compiled else names
    names = ("ours", "ours, called", "eager loop", "CUDA graph", *LIBRARY)
    if find_spec("jax") is not None:
        names = (*names, JAX)
    return (*names, "torch.compile", "torch.compile" + GRAPH) if compiled else names


def describe_ours(work: Work) -> str:
    """Which backend "auto" takes here, in its own words where it has some."""
    name = choose(work.spec, work.device, torch.float32)
    module = load(name)
    if name == "cuda":
        text = module.plan(work.spec, work.batch, device=torch.device("cuda"))["forward"]["text"]
        return f"cuda: {text}"
    return f"{name}: {module.describe_choice()}" if hasattr(module, "describe_choice") else name


def _on_plain_path(peer: Peer, g: Tensor) -> tuple[Callable[[], Tensor], Callable[[], None]]:
    from deeprnn.backends import cpu

    run = peer.run

    def plainly(work: Callable[[], Any]) -> Any:
        before, cpu.PATH = cpu.PATH, "plain"
        try:
            return work()
        finally:
            cpu.PATH = before

    return lambda: plainly(run), lambda: plainly(lambda: backward(run(), peer.parameters, g))


class Captured:
    """A peer's passes as CUDA graphs, each captured at its first call."""

    def __init__(self, peer: Peer, g: Tensor):
        self.run, self.parameters, self.g = peer.run, peer.parameters, g
        self.graphs: dict[str, tuple[torch.cuda.CUDAGraph, Any]] = {}

    def forward(self) -> Tensor:
        """The forward pass alone, without gradients."""
        return self._replay("forward", self._forward)

    def train(self) -> Results:
        """Forward and backward; the graph's own results."""
        return self._replay("train", self._train)

    def _forward(self) -> Tensor:
        with torch.no_grad():
            return self.run()

    def _train(self) -> Results:
        h = self.run()
        return h.detach(), backward(h, self.parameters, self.g)

    def _replay(self, name: str, work: Callable[[], Any]) -> Any:
        if name not in self.graphs:
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(2):
                    work()
            torch.cuda.current_stream().wait_stream(side)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                results = work()
            self.graphs[name] = graph, results
        graph, results = self.graphs[name]
        graph.replay()
        return results


def _in_double(module: nn.Module, run: Callable[[Any, Tensor], Tensor], x: Tensor, g: Tensor) -> Results:
    """Outputs and parameter gradients of a copy of the module in float64, on its device; the results on the CPU."""
    twin = copy.deepcopy(module).double()
    h = run(twin, x.double())
    gradients = torch.autograd.grad(h, list(twin.parameters()), g.double())
    return h.detach().cpu(), [d.cpu() for d in gradients]


def backward(h: Tensor, parameters: Sequence[Tensor], g: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(h, list(parameters), g)
