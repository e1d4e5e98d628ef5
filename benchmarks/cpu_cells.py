"""Cells on the CPU and their peers, each as its best user would write it, with the same numbers.

A cell's step is written once, for arrays of torch and of JAX alike: the eager loop, the compiled step and the jitted
`lax.scan` run the same equations. All of them compute the input's products before the loop, take the inputs of each
step from one `unbind`, and add a product to what it is added to in one call where the library has one. The truth is
the loop in float64.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from deeprnn.bench.cells import Paced
from deeprnn.bench.peers import JAX, Peer, Results, Work, backward
from deeprnn.model.drop_in import GRU, LSTM
from deeprnn.model.layers import DeepRNN
from deeprnn.model.recurrent import Recurrent

OURS, STEP, EAGER, COMPILED = "ours", "ours, .step", "eager loop", "torch.compile"
LIBRARY = {"RNN": nn.RNN, "GRU": nn.GRU, "LSTM": nn.LSTM}
"""cells that torch.nn has too"""
TWO_LAYERS = "nn.RNN x2"
"""another function, of about the same cost as a DT(S)-RNN of depth 2"""


def torch_nn(cell: str) -> str:
    """What is nearest to a cell in torch.nn."""
    return f"nn.{cell}" if cell in LIBRARY else TWO_LAYERS if cell == "DT(S)" else "nn.RNN"


def layer(cell: str, work: Work) -> nn.Module:
    """Our layer."""
    I, H = work.inputs, work.hidden
    if cell == "RNN":
        return DeepRNN(I, H)
    if cell == "DT(S)":
        inner = (H,) * (work.depth - 1)
        return DeepRNN(I, H, intermediate_sizes=inner, shortcut="all" if inner else "none", input_to="all")
    return {"GRU": GRU, "LSTM": LSTM}[cell](I, H) if cell in LIBRARY else Recurrent(Paced(I, H))


# ---- the steps; `f` is torch's functions or JAX's, W are (columns, rows), states come and go as tuples


def rnn(f: Any, a: Sequence[Any], h: Any, W: Any) -> tuple[Any, ...]:
    return (f.tanh(f.add_product(a[0], h, W)),)


def deep_transition(f: Any, a: Sequence[Any], h: Any, *W: Any) -> tuple[Any, ...]:
    depth = len(a)
    z = f.tanh(f.add_product(a[0], h, W[0]))
    for l in range(1, depth):
        z = f.tanh(f.add_product(f.add_product(a[l], z, W[l]), h, W[depth + l - 1]))
    return (z,)


def gru(f: Any, a: Sequence[Any], h: Any, W: Any, b: Any) -> tuple[Any, ...]:
    r_x, z_x, n_x = f.thirds(a[0])
    r_h, z_h, n_h = f.thirds(f.add_product(b, h, W))
    r, z = f.sigmoid(r_x + r_h), f.sigmoid(z_x + z_h)
    n = f.tanh(n_x + r * n_h)
    return (n + z * (h - n),)


def lstm(f: Any, a: Sequence[Any], h: Any, c: Any, W: Any) -> tuple[Any, ...]:
    i, forget, g, o = f.quarters(f.add_product(a[0], h, W))
    c = f.sigmoid(forget) * c + f.sigmoid(i) * f.tanh(g)
    return f.sigmoid(o) * f.tanh(c), c


def paced(f: Any, a: Sequence[Any], h: Any, W: Any, pace: Any) -> tuple[Any, ...]:
    return (f.lerp(h, f.tanh(f.add_product(a[0], h, W)), pace),)


STEPS: dict[str, Callable[..., tuple[Any, ...]]] = {
    "RNN": rnn, "DT(S)": deep_transition, "GRU": gru, "LSTM": lstm, "own step": paced,
}  # fmt: skip
CELLS = tuple(STEPS)
TORCH = SimpleNamespace(
    tanh=torch.tanh, sigmoid=torch.sigmoid, add_product=torch.addmm, lerp=torch.lerp,
    thirds=lambda x: x.chunk(3, -1), quarters=lambda x: x.chunk(4, -1),
)  # fmt: skip


def _jax() -> SimpleNamespace:
    import jax
    import jax.numpy as jnp

    return SimpleNamespace(
        tanh=jnp.tanh,
        sigmoid=jax.nn.sigmoid,
        add_product=lambda a, x, W: a + x @ W,
        lerp=lambda h, new, pace: h + pace * (new - h),
        thirds=lambda x: jnp.split(x, 3, -1),
        quarters=lambda x: jnp.split(x, 4, -1),
    )


def arranged(cell: str, p: Sequence[Any], sigmoid: Callable[[Any], Any]) -> tuple[list[tuple], list[Any]]:
    """From a layer's parameters: matrix and bias of each input product, and what a step takes beside its states."""
    if cell == "own step":
        pace, U, b, W = p
        return [(U, b)], [W.T, sigmoid(pace)]
    if cell == "DT(S)":
        U, W, b, c, *deeper = p
        layers = [deeper[i : i + 4] for i in range(0, len(deeper), 4)]  # U, W, S, b each
        entering = [(U, b + c), *((x[0], x[3]) for x in layers)]
        return entering, [W.T, *(x[1].T for x in layers), *(x[2].T for x in layers)]
    U, W, b, c = p
    return ([(U, b)], [W.T, c]) if cell == "GRU" else ([(U, b + c)], [W.T])


class CpuBench:
    """One cell and shape: data, and weights that all peers share; `make` for `deeprnn.bench.measure`."""

    def __init__(self, cell: str, work: Work, seed: int = 0, sample: float = 0.02):
        torch.manual_seed(seed)
        self.cell, self.work, self.sample = cell, work, sample
        self.calls: dict[str, int] = {}
        self.layer = layer(cell, work)
        self.parameters = list(self.layer.parameters())
        self.x = torch.randn(work.steps, work.batch, work.inputs)
        self.g = torch.randn(work.steps, work.batch, work.hidden)
        self.states = 2 if cell == "LSTM" else 1

    def eager(self, x: Tensor, parameters: Sequence[Tensor], step: Callable | None = None) -> Tensor:
        """The loop as one writes it in PyTorch."""
        entering, rest = arranged(self.cell, parameters, torch.sigmoid)
        step = step or partial(STEPS[self.cell], TORCH)
        states = (x.new_zeros(x.shape[1], self.work.hidden),) * self.states
        outputs = []
        for a in zip(*(nn.functional.linear(x, U, b).unbind(0) for U, b in entering), strict=True):
            states = step(a, *states, *rest)
            outputs.append(states[0])
        return torch.stack(outputs)

    @lru_cache(maxsize=2)  # noqa: B019  # one for each object, which lives as long as its row
    def truth(self) -> Results:
        """Outputs and gradients in float64."""
        double = [p.detach().double().requires_grad_() for p in self.parameters]
        h = self.eager(self.x.double(), double)
        return h.detach(), torch.autograd.grad(h, double, self.g.double())

    def peer(self, name: str) -> Peer:
        """The peer of that name; a short call is repeated in each sample."""
        peer = self._peer(name)
        if name == OURS:  # ways of sharing work are tried in the first calls
            for _ in range(6):
                backward(peer.run(), peer.parameters, self.g)
        peer.calls = self.calls[name] = self._repetitions(peer)
        return peer

    def _repetitions(self, peer: Peer) -> int:
        run = peer.train or (lambda: backward(peer.run(), peer.parameters, self.g))
        run()
        began = time.perf_counter()
        run()
        return max(1, min(200, int(self.sample / (time.perf_counter() - began))))

    def _peer(self, name: str) -> Peer:
        if name == JAX:
            return self._jax_peer()
        if name == f"nn.{self.cell}":
            theirs = LIBRARY[self.cell](self.work.inputs, self.work.hidden)
            theirs.load_state_dict(self.layer.state_dict())
            return Peer(name, lambda: theirs(self.x)[0], list(theirs.parameters()), self.truth)
        if name.startswith("nn."):
            return self._another(name)
        runs = {
            OURS: lambda: self.layer(self.x)[0],
            STEP: lambda: self.layer.step(self.x[0])[0].unsqueeze(0),
            EAGER: lambda: self.eager(self.x, self.parameters),
        }
        return Peer(name, self._compiled() if name == COMPILED else runs[name], self.parameters, self.truth)

    def _compiled(self) -> Callable[[], Tensor]:
        torch._dynamo.reset()  # else a second shape would be compiled for all shapes, and run slower
        step = torch.compile(partial(STEPS[self.cell], TORCH))
        return lambda: self.eager(self.x, self.parameters, step)

    def _another(self, name: str) -> Peer:
        """An `nn.RNN`, another function of about the same cost, checked against its own float64."""
        layers = self.work.depth if name == TWO_LAYERS else 1
        module, twin = (nn.RNN(self.work.inputs, self.work.hidden, layers) for _ in range(2))
        twin.load_state_dict(module.state_dict())
        twin.double()

        def truth() -> Results:
            h = twin(self.x.double())[0]
            return h.detach(), torch.autograd.grad(h, list(twin.parameters()), self.g.double())

        note = f"another function, {layers} layer(s), for scale"
        return Peer(name, lambda: module(self.x)[0], list(module.parameters()), truth, note=note)

    def _jax_peer(self) -> Peer:
        import jax
        import jax.numpy as jnp
        import numpy as np

        p, x, g = (
            [jnp.asarray(t.detach().numpy()) for t in ts] for ts in (self.parameters, [self.x], [self.g])
        )
        forward, train = _jitted(self.cell, self.states, self.work.hidden)

        def results() -> Results:
            h, slopes = forward(p, *x), train(p, *x, *g)
            return torch.from_numpy(np.array(h)), [torch.from_numpy(np.array(d)) for d in slopes]

        return Peer(
            JAX,
            lambda: results()[0],
            self.parameters,
            self.truth,
            lambda: jax.block_until_ready(forward(p, *x)),
            lambda: jax.block_until_ready(train(p, *x, *g)),
            results,
            by_host=True,
        )


@lru_cache(maxsize=32)
def _jitted(cell: str, states: int, hidden: int) -> tuple[Any, Any]:
    """All outputs, and the gradients of their product with g by the parameters, which leaves out what it needs not."""
    import jax
    import jax.numpy as jnp

    step = partial(STEPS[cell], _jax())

    def outputs(p: list[Any], x: Any) -> Any:
        entering, rest = arranged(cell, p, jax.nn.sigmoid)

        def advance(state: tuple, a: Any) -> tuple[tuple, Any]:
            new = step(a, *state, *rest)
            return new, new[0]

        first = (jnp.zeros((x.shape[1], hidden)),) * states
        return jax.lax.scan(advance, first, [x @ U.T + b for U, b in entering])[1]

    return jax.jit(outputs), jax.jit(jax.grad(lambda p, x, g: (outputs(p, x) * g).sum()))
