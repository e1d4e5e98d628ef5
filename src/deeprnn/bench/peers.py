"""The peers of the benchmark: one function written in several ways, and PyTorch's own layers for scale."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from deeprnn.backends.call import Case, InputProjection, Inputs
from deeprnn.backends.choose import describe, fastest_backend
from deeprnn.backends.unrolling import project_and_unroll
from deeprnn.cells.deep_transition import DeepTransition
from deeprnn.cells.description import CellDescription
from deeprnn.training.cuda_graph import capture

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
    def cell(self) -> CellDescription:
        shortcuts = (False,) + (True,) * (self.depth - 1)
        return DeepTransition((self.hidden,) * self.depth, ("sigmoid",) * self.depth, shortcuts).cell


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
    """The ⊕ as one writes it in PyTorch: linear layers, and a loop over the steps of their outputs."""

    def __init__(self, work: Work):
        super().__init__()
        n, H = work.depth, work.hidden
        self.U = nn.ModuleList(nn.Linear(work.inputs, H) for _ in range(n))
        self.W = nn.ModuleList(nn.Linear(H, H, bias=False) for _ in range(n))
        self.S = nn.ModuleList(nn.Linear(H, H, bias=False) for _ in range(n - 1))
        self.to(work.device)

    def step(self, entered: Sequence[Tensor], h: Tensor) -> Tensor:
        z = torch.sigmoid(self.W[0](h) + entered[0])
        for l in range(1, len(self.W)):
            z = torch.sigmoid(self.W[l](z) + self.S[l - 1](h) + entered[l])
        return z

    def forward(self, x: Tensor) -> Tensor:
        h = x.new_zeros(x.shape[1], self.W[0].in_features)  # type: ignore[call-overload]
        states = []
        for entered in zip(*(U(x).unbind(0) for U in self.U), strict=True):
            h = self.step(entered, h)
            states.append(h)
        return torch.stack(states)

    def by_backend(self, x: Tensor, cell: CellDescription, backend: str) -> Tensor:
        """The benchmarked ⊕ through a backend."""
        projection = InputProjection(x, [U.weight for U in self.U], [U.bias for U in self.U])  # type: ignore[misc]
        h0 = x.new_zeros(x.shape[1], cell.states[0])
        matrices = [layer.weight for layer in (*self.W, *self.S)]
        inputs = Inputs(None, [h0], matrices, [], [])  # type: ignore[arg-type]
        return project_and_unroll(cell, projection, inputs, backend)[-1]


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
                self.model, lambda m, x: m.by_backend(x, self.work.cell, "reference"), self.x, self.g
            )
        return self._truth

    def peer(self, name: str) -> Peer:
        """The peer of that name."""
        if name.removesuffix(GRAPH) in LIBRARY:
            return self._captured(self._library(name.removesuffix(GRAPH)), name)
        if name == JAX:
            from deeprnn.bench.jax_scan import jax_peer

            return jax_peer(self)
        kind = name.removesuffix(GRAPH) if name != "CUDA graph" else "eager loop"
        runs: dict[str, Callable[[], Tensor]] = {
            "ours": lambda: self.model.by_backend(self.x, self.work.cell, "auto"),
            "ours, called": lambda: self.model.by_backend(self.x, self.work.cell, "auto"),
            "reference": lambda: self.model.by_backend(self.x, self.work.cell, "reference"),
            "eager loop": lambda: self.model(self.x),
        }
        run = self._compiled() if kind == "torch.compile" else runs[kind]
        peer = Peer(name, run, list(self.model.parameters()), self.truth, note=NOTES.get(name, ""))
        if name == "ours":
            peer.note = describe_ours(self.work)
        return self._captured(peer, name)

    def _captured(self, peer: Peer, name: str) -> Peer:
        """The peer under its name, replayed as a graph where the name says so."""
        peer.name = name
        if self.work.device == "cuda" and in_graph(name):
            graphs = Captured(peer, self.g)
            peer.train = peer.results = graphs.train
            peer.forward, peer.calls = graphs.forward, 4
        return peer

    def _compiled(self) -> Callable[[], Tensor]:
        torch._dynamo.reset()  # else a second shape would be compiled for all shapes, and run slower
        step = torch.compile(self.model.step)

        def run() -> Tensor:
            h, states = self.x.new_zeros(self.work.batch, self.work.hidden), []
            for entered in zip(*(U(self.x).unbind(0) for U in self.model.U), strict=True):
                h = step(entered, h)
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


def in_graph(name: str) -> bool:
    """Whether a peer is replayed as a CUDA graph on a GPU, where ours is."""
    return name in ("ours", "CUDA graph") or name.endswith(GRAPH)


def peers_for(device: str, compiled: bool = False) -> tuple[str, ...]:
    """The peers measured by default on a device; on a GPU ours is replayed as a CUDA graph, as it trains."""
    if device == "cpu":
        names = ("ours", "eager loop", "reference", *LIBRARY)
        return (*names, "torch.compile") if compiled else names
    names = (
        "ours",
        "ours, called",
        "eager loop",
        "CUDA graph",
        *LIBRARY,
        *(name + GRAPH for name in LIBRARY),
    )
    if find_spec("jax") is not None:
        names = (*names, JAX)
    return (*names, "torch.compile", "torch.compile" + GRAPH) if compiled else names


def describe_ours(work: Work) -> str:
    """Which backend "auto" takes here, in its own words where it has some."""
    name = fastest_backend(work.cell.text, work.device, torch.float32)
    text = describe(name, Case(work.cell, torch.device(work.device), torch.float32), work.batch)
    return f"{name}: {text}" if text else name


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
            self.graphs[name] = capture(work)
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
