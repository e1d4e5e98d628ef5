"""The input's product and the unrolled loop as one operation, for plain tensors on a GPU.

A = x Uᵀ + b before the loop and, after it, the gradients of U, b and every matrix of the transition are sums over the
same rows of dA. With many rows on Hopper's tensor cores dA is cut into parts once for all of them (tall.cu), and the
product before the loop is bound by writing A (entry.cu), as accurate as fp32 products; else torch's own products serve.
Either way autograd sees one operation instead of seven, which is time of the host's. Where something looks on (a
compiler, vmap, autocast, a second derivative), the operations are apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from deeprnn.backends import TransitionSpec, autocasts, cuda, one_bias, one_matrix
from deeprnn.backends.cuda import launch, planning, products, rows, stretches
from deeprnn.backends.cuda.driver import driver_version, index_of
from deeprnn.backends.cuda.largest import Look
from deeprnn.backends.gradients import runs_of, sorted_gradients, weight_gradients

FEWEST_ROWS = 2048  # below, torch's product of the input is as fast
FEWEST_LONG_ROWS = 6144  # the same for the gradient of the input
LOADS_IN_CAPTURE = 12030  # CUDA 12.3: its drivers load kernels while a graph is captured
DEVICE = "cuda"  # tests without a GPU name another


def unroll(
    x: Tensor,
    U: Sequence[Tensor],
    b: Sequence[Tensor],
    h0: Tensor,
    W: Sequence[Tensor],
    S: Sequence[Tensor],
    spec: TransitionSpec,
    reset: Tensor | None,
    precision: str,
) -> tuple[Tensor, Tensor]:
    """As `cuda.unroll` of what `backends.unroll_input` describes; ask `serves` first."""
    return Entering.apply(x, h0, reset, spec, precision, len(b), *U, *b, *W, *S)


def serves(
    x: Tensor, U: Sequence[Tensor], b: Sequence[Tensor], others: Sequence[Tensor], spec: TransitionSpec
) -> bool:
    """Whether this operation should serve: plain fp32 tensors. Where U and b do not fit x, torch's product says so."""
    if torch.compiler.is_compiling() or x.device.type != DEVICE or x.dim() != 3 or autocasts(DEVICE):
        return False
    given = (x, *U, *b, *others)
    if not cuda._plain(*given) or not all(t.dtype == torch.float32 for t in given):
        return False
    sizes, inner = spec.sizes, x.shape[-1]
    if any(u.shape != (n, inner) for u, n in zip(U, sizes, strict=True)):
        return False
    return all(v.shape == (n,) for v, n in zip(b, (*sizes, sizes[0]), strict=False))


def splits(x: Tensor, spec: TransitionSpec) -> bool:
    """Whether the products are taken on Hopper's tensor cores: many rows, and shapes that the kernels can read."""
    steps, batch, inner = x.shape
    if steps * batch < FEWEST_ROWS or inner % 4 or not 8 <= inner <= rows.SHORT or spec.total % 4:
        return False
    if min(spec.sizes) < products.FEWEST_COLUMNS or not products.tall_fits(steps * batch, spec.sizes):
        return False
    return x.is_contiguous() and x.data_ptr() % 16 == 0 and products.hopper(x.device)


class Entering(torch.autograd.Function):
    """Forward: A, then the loop. Backward: the loop, then all sums over its rows."""

    @staticmethod
    def forward(ctx: Any, x, h0, reset, spec, precision, biases, *tensors):
        (U, b, W, S), ctx.splits = _apart(tensors, spec, biases), splits(x, spec)
        weight, bias, looked = one_matrix(U), one_bias(b, spec.depth), None
        if ctx.splits and _captures(x):  # without a graph two streams would cost the host more than they save
            looked = launch.look_ahead(x, W, S, spec, precision == "bf16", reset is not None)
        A = _enter(x, weight, bias, looked) if ctx.splits else F.linear(x, weight, bias)
        units, shortcuts = spec.text
        h, z = cuda._forward(A, h0, W, S, reset, units, shortcuts, precision, looked)
        entered = weight if ctx.needs_input_grad[0] else None
        ctx.save_for_backward(x, h0, reset, h, z, entered, *tensors)
        ctx.spec, ctx.precision, ctx.biases = spec, precision, biases
        ctx.set_materialize_grads(False)
        return h, z

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        (dh, dz), needs, spec = grads, ctx.needs_input_grad, ctx.spec
        x, h0, reset, h, z, weight, *tensors = ctx.saved_tensors
        if torch.is_grad_enabled() or not cuda._plain(dh, dz):
            return _again(ctx, x, h0, reset, tensors, dh, dz)
        _, _, W, S = _apart(tensors, spec, ctx.biases)
        dh = torch.zeros_like(h) if dh is None else dh
        units, shortcuts = spec.text
        loop = dh, dz, h, z, h0, W, S, reset, units, shortcuts, ctx.precision
        if ctx.splits and any(needs[6:]):
            with cuda._on(x):
                dA, dh0, found = _all_sums(loop, x, spec, ctx.biases > 0)
        else:
            dA, dh0 = cuda._backward(*loop)
            found = _products(dA, x, h, z, h0, reset, spec, ctx.biases, needs[6:])
        dx = None if weight is None else _times(dA.flatten(0, 1), weight, ctx.splits).view_as(x)
        dU, db, dW, dS = found
        again = db[:1] if ctx.biases > spec.depth else ()
        return dx, dh0, None, None, None, None, *dU, *db, *again, *dW, *dS


Found = tuple[Sequence[Any], Sequence[Any], Sequence[Any], Sequence[Any]]  # gradients of U, b, W and S


def _apart(tensors: Sequence[Tensor], spec: TransitionSpec, biases: int) -> tuple[list[Tensor], ...]:
    """U, b, W and S."""
    ends = [0, spec.depth, spec.depth + biases, 2 * spec.depth + biases, len(tensors)]
    return tuple(list(tensors[start:end]) for start, end in pairwise(ends))


def _enter(x: Tensor, weight: Tensor, bias: Tensor | None, looked: Look | None) -> Tensor:
    """A, and what the loop will look at is looked at beside it."""
    beside = None
    if looked is not None:
        beside = Beside(x.device)
        looked.begin(beside.begin())
    try:
        return rows.rows_times(x.flatten(0, 1), weight, bias).view(*x.shape[:-1], -1)
    finally:  # what began in a capture must end in it
        if beside is not None:
            beside.end()


class _Part(NamedTuple):
    """A stretch of the sequence: what its loop is given, what is looked at before it, and the sums over its rows."""

    given: list[Any]  # to `launch.backward`
    after: Tensor | None
    dA: Tensor
    look: Look | None
    sums: products.AllSums


def _parts(
    loop: tuple, x: Tensor, spec: TransitionSpec, with_bias: bool, dA: Tensor, dh0: Tensor
) -> list[_Part]:
    """The stretches, the last one first, as the loop goes. All memory is taken here."""
    dh, dz, h, z, h0, W, S, reset, *_, precision = loop
    dh, h, z = dh.contiguous(), h.contiguous(), z.contiguous()
    dz, marks = (None if t is None else t.contiguous() for t in (dz, reset))
    bf16, cutting, parts = precision == "bf16", _cutting(x, spec, precision), []

    def part(t: Any, a: int, b: int) -> Any:
        return t if t is None or len(cutting.stretches) == 1 else t[a:b]

    for a, b in reversed(cutting.stretches):
        dh_, dz_, h_, z_, marks_, x_, dA_ = (part(t, a, b) for t in (dh, dz, h, z, marks, x, dA))
        before, free, onto = h[a - 1] if a else h0, cutting.free if a else 0, parts[0].sums if parts else None
        runs = runs_of(spec.shortcuts)
        sums = products.AllSums(h_, z_, before, marks_, spec.sizes, runs, x_, with_bias, free, onto)
        look = launch.look(dh_, dz_, W, S, spec, bf16, marks is not None)
        given = [dh_, dz_, h_, z_, W, S, marks_, spec, bf16, dA_, None if a else dh0]
        parts.append(_Part(given, dA[b] if b < len(dA) else None, dA_, look, sums))
    return parts


def _all_sums(loop: tuple, x: Tensor, spec: TransitionSpec, with_bias: bool) -> tuple[Tensor, Tensor, Found]:
    """dA, dh0, and all sums over the rows of dA together, those of one stretch beside the loop over the next."""
    dA, dh0 = cuda._gradients(*loop[2:5])
    parts, beside = _parts(loop, x, spec, with_bias, dA, dh0), None
    if parts[0].look is not None:
        parts[0].look.begin()  # before anything goes beside the loop: it would take the loop's processors
    try:
        for i, part in enumerate(parts):
            if beside is not None and i == 1:
                beside.wait()
            beside = Beside(dA.device)
            launch.backward(*part.given, after=part.after, looked=part.look)
            stream = beside.begin()  # the loop leaves processors idle, and nothing here waits for it
            if i > 0:
                parts[i - 1].sums.finish(parts[i - 1].dA, stream)
                continue
            for later in parts[1:]:
                if later.look is not None:
                    later.look.begin(stream)
            beside.mark()
            for each in parts:
                each.sums.begin(stream)
    finally:  # where a launch failed, too: the second stream may still read these tensors
        if beside is not None:
            beside.end()
    found, entered = parts[-1].sums.finish(parts[-1].dA)
    dU, db = (t.split(spec.sizes) for t in entered) if with_bias else (entered[0].split(spec.sizes), ())
    return dA, dh0, (dU, db, *sorted_gradients(lambda runs: found, spec.sizes, spec.shortcuts))


def _cutting(x: Tensor, spec: TransitionSpec, precision: str) -> stretches.Cutting:
    """The stretches in which to go backward; in company no processor is idle."""
    steps, batch, inner = x.shape
    if x.device.type != "cuda" or planning._company.size > 1:
        return stretches.Cutting(((0, steps),), 0)
    device = launch.device_of(index_of(x.device))
    # A capture that follows a plain call needs kernels of its own then, and older drivers load none meanwhile.
    captured = _captures(x) and driver_version() >= LOADS_IN_CAPTURE
    return stretches.cutting(spec, steps, batch, inner, precision == "bf16", device, captured)


def _captures(x: Tensor) -> bool:
    """Whether what is launched for x becomes part of a CUDA graph."""
    return x.device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _products(
    dA: Tensor,
    x: Tensor,
    h: Tensor,
    z: Tensor,
    h0: Tensor,
    reset: Tensor | None,
    spec: TransitionSpec,
    biases: int,
    needs: Sequence[bool],
) -> Found:
    """The same by torch's products, each where it is wanted."""
    depth, flat = spec.depth, dA.flatten(0, 1)
    dU, db = [None] * depth, [None] * min(biases, depth)
    dW, dS = [None] * depth, [None] * (len(needs) - 2 * depth - biases)
    if any(needs[:depth]):
        dU = (flat.mT @ x.flatten(0, 1)).split(spec.sizes)
    if any(needs[depth : depth + biases]):
        db = flat.sum(0).split(spec.sizes)
    if any(needs[depth + biases :]):
        dW, dS = weight_gradients(dA, h, z, h0, reset, spec.sizes, spec.shortcuts)
    return dU, db, dW, dS


class _Second(NamedTuple):
    """A second stream, and what marks a place in the first and two in the second."""

    stream: torch.cuda.Stream
    start: torch.cuda.Event
    place: torch.cuda.Event
    stop: torch.cuda.Event


@lru_cache(maxsize=64)
def _second(device: int, beside: int) -> _Second:
    """One for each first stream: that of another thread may be in the middle of a capture."""
    return _Second(torch.cuda.Stream(device), *(torch.cuda.Event() for _ in range(3)))


class Beside:
    """Work that may begin where this is made although it is written later; what follows it waits for it.

    So the loop is launched first and takes the processors it needs. Tensors must outlive the work.
    """

    def __init__(self, device: torch.device):
        self.second = None
        if device.type == "cuda":
            self.first = torch.cuda.current_stream(device)
            self.second = _second(self.first.device_index, self.first.cuda_stream)
            self.second.start.record(self.first)

    def begin(self) -> int | None:
        """The address of the stream on which to launch; None without a GPU."""
        if self.second is None:
            return None
        self.second.stream.wait_event(self.second.start)
        return self.second.stream.cuda_stream

    def mark(self) -> None:
        """Remember how far the second stream is."""
        if self.second is not None:
            self.second.place.record(self.second.stream)

    def wait(self) -> None:
        """What is launched on the first stream from here on waits for what was launched before the mark."""
        if self.second is not None:
            self.first.wait_event(self.second.place)

    def end(self) -> None:
        """What is launched on the first stream from here on waits."""
        if self.second is not None:
            self.second.stop.record(self.second.stream)
            self.first.wait_event(self.second.stop)


def _times(dA: Tensor, weight: Tensor, splits: bool) -> Tensor:
    """dA (rows, ΣM) times weight (ΣM, I): the gradient of the input."""
    if not splits or len(dA) < FEWEST_LONG_ROWS:
        return dA @ weight
    return rows.rows_times(dA, weight.mT)


def _again(
    ctx: Any,
    x: Tensor,
    h0: Tensor,
    reset: Tensor | None,
    tensors: Sequence[Tensor],
    dh: Tensor | None,
    dz: Tensor | None,
) -> tuple[Any, ...]:
    """The same gradients by operations that a second derivative and vmap can follow."""
    with torch.enable_grad():
        # Views of the inputs: one input may depend on another outside, and that path is not ours.
        x, h0, *tensors = (t.view_as(t) for t in (x, h0, *tensors))
        inputs = [x, h0, None, None, None, None, *tensors]
        U, b, W, S = _apart(tensors, ctx.spec, ctx.biases)
        A = F.linear(x, one_matrix(U), one_bias(b, ctx.spec.depth))
        outputs = cuda.unroll_cuda(A, h0, W, S, reset, *ctx.spec.text, ctx.precision)
        pairs = [(y, d) for y, d in zip(outputs, (dh, dz), strict=True) if d is not None]
        wanted = [i for i, needed in enumerate(ctx.needs_input_grad) if needed]
        found = torch.autograd.grad(
            [y for y, _ in pairs],
            [inputs[i] for i in wanted],
            [d for _, d in pairs],
            create_graph=torch.is_grad_enabled(),
            allow_unused=True,
        )
    by_index = dict(zip(wanted, found, strict=True))
    return tuple(by_index.get(i) for i in range(len(inputs)))
