"""One shape computed by ours or by a peer, each as its best user would write it, with the same numbers on any device.

A cell's step is written once, for arrays of torch and of JAX alike: the eager loop, the compiled step and the jitted
`lax.scan` run the same equations. All of them compute the input's products before the loop, take the inputs of each
step from one `unbind`, and add a product to what it is added to in one call where the library has one.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import lru_cache, partial
from types import SimpleNamespace
from typing import Any

import torch
from benchmarks.shapes import COMPILED, JAX, LOOP, OURS, STEP, TF32, TORCH, Shape
from torch import Tensor, nn

from deeprnn.backends.cuda import describe_plan
from deeprnn.backends.cuda.device import Device
from deeprnn.bench.cells import Paced
from deeprnn.cells.cell import Cell
from deeprnn.cells.deep_transition import DeepTransition
from deeprnn.cells.description import CellDescription
from deeprnn.cells.gru import GRU as GRUCell
from deeprnn.cells.highway import RHN as RHNCell
from deeprnn.cells.lstm import LSTM as LSTMCell
from deeprnn.cells.plans import PlanRequest, plan_of
from deeprnn.model.drop_in import GRU, LSTM
from deeprnn.model.layers import DeepRNN
from deeprnn.model.recurrent import RHN, Recurrent

LONGEST_TRUTH = 1000
"""steps over which a layer is compared with float64 at most"""
LARGEST_TRUTH = 3e11
"""multiplications of a float64 loop worth waiting for"""


def our_layer(shape: Shape, backend: str = "auto") -> nn.Module:
    """Our layer, always with the same weights."""
    torch.manual_seed(0)
    sizes = shape.inputs, shape.hidden
    if shape.kind == "dts":
        return DeepRNN(*sizes, nonlinearity="sigmoid", intermediate_sizes=[shape.hidden] * (shape.depth - 1),
                       shortcut="last" if shape.depth > 1 else "none", input_to="all", backend=backend)  # fmt: skip
    if shape.kind == "rhn":
        return RHN(*sizes, depth=shape.depth, backend=backend)
    if shape.kind == "paced":
        return Recurrent(Paced(*sizes), backend=backend)
    return {"rnn": DeepRNN, "gru": GRU, "lstm": LSTM}[shape.kind](*sizes, backend=backend)


def torch_layer(shape: Shape) -> nn.Module:
    """torch.nn's layer with our weights, or an `nn.RNN` of as many layers as the transition has."""
    if not shape.in_torch:
        torch.manual_seed(0)
        return nn.RNN(shape.inputs, shape.hidden, shape.depth)
    theirs = {"rnn": nn.RNN, "gru": nn.GRU, "lstm": nn.LSTM}[shape.kind](shape.inputs, shape.hidden)
    theirs.load_state_dict(our_layer(shape).state_dict())
    return theirs


def description_of(shape: Shape) -> CellDescription:
    """What our kernels unroll."""
    if shape.kind in ("rnn", "dts"):
        unit, deep = "tanh" if shape.kind == "rnn" else "sigmoid", shape.depth > 1
        shortcuts = (False,) * (shape.depth - 1) + (deep,)
        return DeepTransition((shape.hidden,) * shape.depth, (unit,) * shape.depth, shortcuts).cell
    sizes = shape.inputs, shape.hidden
    kinds: dict[str, Callable[..., Cell]] = {"gru": GRUCell, "lstm": LSTMCell, "paced": Paced}
    cell = RHNCell(*sizes, depth=shape.depth) if shape.kind == "rhn" else kinds[shape.kind](*sizes)
    traced = plan_of(cell, PlanRequest(torch.float32, torch.float32, "cpu")).traced
    assert traced is not None  # all of these are shipped, or the guide's example
    return traced.cell


def kernels_of(shape: Shape, device: Device | None = None) -> dict[str, str]:
    """Which kernels serve our layer; without a device, on an H200."""
    return describe_plan(description_of(shape), shape.batch, device=device)


# ---- the steps; `f` is torch's functions or JAX's, W are (columns, rows), states come and go as tuples


def rnn(f: Any, a: Sequence[Any], h: Any, W: Any) -> tuple[Any, ...]:
    return (f.tanh(f.add_product(a[0], h, W)),)


def deep_transition(f: Any, a: Sequence[Any], h: Any, *W: Any) -> tuple[Any, ...]:
    depth = len(a)
    z = f.sigmoid(f.add_product(a[0], h, W[0]))
    for l in range(1, depth):
        below = f.add_product(a[l], z, W[l])
        z = f.sigmoid(f.add_product(below, h, W[depth]) if l == depth - 1 else below)
    return (z,)


def gru(f: Any, a: Sequence[Any], h: Any, W: Any, b: Any) -> tuple[Any, ...]:
    r_x, z_x, n_x = f.split(a[0], 3)
    r_h, z_h, n_h = f.split(f.add_product(b, h, W), 3)
    r, z = f.sigmoid(r_x + r_h), f.sigmoid(z_x + z_h)
    return (f.lerp(f.tanh(n_x + r * n_h), h, z),)


def lstm(f: Any, a: Sequence[Any], h: Any, c: Any, W: Any) -> tuple[Any, ...]:
    i, forget, g, o = f.split(f.add_product(a[0], h, W), 4)
    c = f.sigmoid(forget) * c + f.sigmoid(i) * f.tanh(g)
    return f.sigmoid(o) * f.tanh(c), c


def highway(f: Any, a: Sequence[Any], h: Any, *Wb: Any) -> tuple[Any, ...]:
    depth, s = (len(Wb) + 1) // 2, h
    for l in range(depth):
        n, t = f.split(f.add_product(a[0] if l == 0 else Wb[depth + l - 1], s, Wb[l]), 2)
        s = f.lerp(s, f.tanh(n), f.sigmoid(t))
    return (s,)


def paced(f: Any, a: Sequence[Any], h: Any, W: Any, pace: Any) -> tuple[Any, ...]:
    return (f.lerp(h, f.tanh(f.add_product(a[0], h, W)), pace),)


STEPS: dict[str, Callable[..., tuple[Any, ...]]] = {
    "rnn": rnn, "dts": deep_transition, "gru": gru, "lstm": lstm, "rhn": highway, "paced": paced,
}  # fmt: skip
FUNCTIONS = SimpleNamespace(
    tanh=torch.tanh, sigmoid=torch.sigmoid, add_product=torch.addmm, lerp=torch.lerp,
    split=lambda x, parts: x.chunk(parts, -1),
)  # fmt: skip


def arranged(kind: str, p: Sequence[Any], sigmoid: Callable[[Any], Any]) -> tuple[list[tuple], list[Any]]:
    """From a layer's parameters: matrix and bias of each input product, and what a step takes beside its states."""
    if kind == "paced":
        pace, U, b, W = p
        return [(U, b)], [W.T, sigmoid(pace)]
    if kind == "rhn":
        U, *deeper = p
        W, b = deeper[0::2], deeper[1::2]
        return [(U, b[0])], [*(x.T for x in W), *b[1:]]
    if kind == "dts":
        U, W, b, c, *deeper = p
        entering, matrices = [(U, b + c)], [W.T]
        while deeper:  # U, W and b of each layer; the last has the shortcut S before its b
            own, deeper = (deeper[:3], deeper[3:]) if len(deeper) > 4 else (deeper, [])
            entering.append((own[0], own[-1]))
            matrices += [x.T for x in own[1:-1]]
        return entering, matrices
    U, W, b, c = p
    return ([(U, b)], [W.T, c]) if kind == "gru" else ([(U, b + c)], [W.T])


def eager(shape: Shape, x: Tensor, parameters: Sequence[Tensor], step: Callable[..., Any]) -> Tensor:
    """The loop as one writes it in PyTorch."""
    entering, rest = arranged(shape.kind, parameters, torch.sigmoid)
    states = (x.new_zeros(x.shape[1], shape.hidden),) * (2 if shape.kind == "lstm" else 1)
    outputs = []
    for a in zip(*(nn.functional.linear(x, U, b).unbind(0) for U, b in entering), strict=True):
        states = step(a, *states, *rest)
        outputs.append(states[0])
    return torch.stack(outputs)


@lru_cache(maxsize=1)
def compiled_step(kind: str, hidden: int, batch: int) -> Callable[..., Any]:
    """The step by torch.compile, for one shape: a second one would be compiled for all shapes, and run slower."""
    torch._dynamo.reset()
    return torch.compile(partial(STEPS[kind], FUNCTIONS))


# ---- calls


@contextmanager
def tf32() -> Iterator[None]:
    """torch's products of fp32 numbers by ten bits of mantissa."""
    places = torch.backends.cuda.matmul, torch.backends.cudnn
    before = [place.allow_tf32 for place in places]
    try:
        for place in places:
            place.allow_tf32 = True
        yield
    finally:
        for place, value in zip(places, before, strict=True):
            place.allow_tf32 = value


class Calls:
    """One peer on one input: a forward call without gradients, and one with its backward pass."""

    def __init__(self, shape: Shape, peer: str, device: str, dtype: torch.dtype = torch.float32) -> None:
        self.shape, self.precision = shape, tf32 if peer == TF32 else nullcontext
        self.layer = torch_layer(shape) if peer in (TORCH, TF32) else our_layer(shape)
        self.layer.to(device, dtype)
        self.parameters = list(self.layer.parameters())
        generator = torch.Generator().manual_seed(1)
        sizes = shape.steps, shape.batch
        self.x = torch.randn(*sizes, shape.inputs, generator=generator).to(device, dtype)
        self.g = torch.randn(*sizes, shape.hidden, generator=generator).to(device, dtype)
        marks = torch.rand(*sizes, generator=generator).lt(shape.reset).to(device) if shape.reset else None
        self.run = self._runs(peer, marks)

    def _runs(self, peer: str, marks: Tensor | None) -> Callable[[], Tensor]:
        layer: Any = self.layer
        if peer in (LOOP, COMPILED):
            kind, hidden, batch = self.shape.kind, self.shape.hidden, self.shape.batch
            step = compiled_step(kind, hidden, batch) if peer == COMPILED else partial(STEPS[kind], FUNCTIONS)
            return lambda: eager(self.shape, self.x, self.parameters, step)
        if peer == STEP:
            return lambda: layer.step(self.x[0])[0].unsqueeze(0)
        if marks is not None:
            return lambda: layer(self.x, reset=marks)[0]
        return lambda: layer(self.x)[0]

    def forward(self) -> Tensor:
        with torch.no_grad(), self.precision():
            return self.run()

    def train(self) -> Tensor:
        with self.precision():
            y = self.run()
            y.backward(self.g)
        return y.detach()

    def gradients(self) -> list[Tensor]:
        """As `train`, outputs first; for a capture, which must not touch `.grad`."""
        with self.precision():
            y = self.run()
            return [y.detach(), *torch.autograd.grad(y, self.parameters, self.g)]

    def clear(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None


class JaxCalls:
    """The same by a jitted `lax.scan`, in true fp32, on JAX's default device; every call waits for its result."""

    def __init__(self, shape: Shape, device: str) -> None:
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # a card is shared with torch
        import jax

        if (found := jax.default_backend()) != ("gpu" if device == "cuda" else "cpu"):
            raise RuntimeError(f"JAX runs on {found}, not on {device}: install its build for {device}")
        calls = Calls(shape, OURS, "cpu")
        self.p = [_as_jax(p) for p in calls.parameters]
        self.x, self.g = _as_jax(calls.x), _as_jax(calls.g)
        self._forward, self._train = _jitted(shape.kind, shape.hidden)

    def forward(self) -> Any:
        return self._wait(self._forward, self.p, self.x)

    def train(self) -> Any:
        return self._wait(self._train, self.p, self.x, self.g)

    def gradients(self) -> list[Tensor]:
        """Outputs and gradients as torch's tensors."""
        import numpy as np

        return [torch.from_numpy(np.array(x)) for x in (self.forward(), *self.train())]

    def clear(self) -> None:
        """Nothing is kept between calls."""

    def _wait(self, function: Callable[..., Any], *given: Any) -> Any:
        import jax

        with jax.default_matmul_precision("highest"):
            return jax.block_until_ready(function(*given))


def _as_jax(x: Tensor) -> Any:
    import jax.numpy as jnp

    return jnp.asarray(x.detach().numpy())


@lru_cache(maxsize=32)
def _jitted(kind: str, hidden: int) -> tuple[Any, Any]:
    """All outputs, and the gradients of their product with g by the parameters, which leaves out what it needs not."""
    import jax
    import jax.numpy as jnp

    functions = SimpleNamespace(
        tanh=jnp.tanh, sigmoid=jax.nn.sigmoid, add_product=lambda a, x, W: a + x @ W,
        lerp=lambda a, b, w: a + w * (b - a), split=lambda x, parts: jnp.split(x, parts, -1),
    )  # fmt: skip
    step = partial(STEPS[kind], functions)

    def outputs(p: list[Any], x: Any) -> Any:
        entering, rest = arranged(kind, p, jax.nn.sigmoid)

        def advance(state: tuple, a: Any) -> tuple[tuple, Any]:
            new = step(a, *state, *rest)
            return new, new[0]

        first = (jnp.zeros((x.shape[1], hidden)),) * (2 if kind == "lstm" else 1)
        return jax.lax.scan(advance, first, [x @ U.T + b for U, b in entering])[1]

    return jax.jit(outputs), jax.jit(jax.grad(lambda p, x, g: (outputs(p, x) * g).sum()))


def calls_of(shape: Shape, peer: str, device: str) -> Calls | JaxCalls:
    """The calls of a peer."""
    return JaxCalls(shape, device) if peer == JAX else Calls(shape, peer, device)


# ---- the truth


def checked(shape: Shape) -> Shape:
    """The shape at which a layer is compared: over fewer steps where float64 would take long."""
    products = {"gru": 3, "lstm": 4, "dts": 2 * shape.depth - 1, "rhn": 2 * shape.depth}.get(shape.kind, 1)
    cost = shape.batch * shape.hidden * (shape.hidden * products + shape.inputs)
    steps = min(shape.steps, LONGEST_TRUTH, max(4, int(LARGEST_TRUTH / cost)))
    return Shape(**{**shape.__dict__, "steps": steps})


def another_function(shape: Shape, peer: str) -> bool:
    """Whether a peer computes something else of about the same cost."""
    return peer in (TORCH, TF32) and not shape.in_torch


def truth_of(shape: Shape, peer: str, device: str) -> list[Tensor]:
    """What a peer should compute, in float64: by torch's own layer where there is one, else by the loop."""
    theirs = another_function(shape, peer) or (shape.in_torch and not shape.reset)
    if shape.reset:
        return _by_plain_operations(shape, device)
    return Calls(shape, TORCH if theirs else LOOP, device, torch.float64).gradients()


def _by_plain_operations(shape: Shape, device: str) -> list[Tensor]:
    """Marks are what the loop above does not know: the reference backend does."""
    calls = Calls(shape, OURS, device, torch.float64)
    layer: Any = calls.layer
    layer.backend = "reference"
    return calls.gradients()


def error_of(found: Sequence[Tensor], truth: Sequence[Tensor]) -> float:
    """The largest relative error of outputs and gradients."""
    pairs = zip(found, truth, strict=True)
    return max(float((a.to(b.device).double() - b).norm() / b.norm()) for a, b in pairs)
