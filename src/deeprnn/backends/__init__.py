"""How one ⊕ is unrolled over time: a registry of backends and the choice among them.

For t = 0 .. T-1, with z_0 = h(t-1), zeroed where reset[t]:

    z_l = φ_l(A_l[t] + W_l z_{l-1} + S_l h(t-1)),    h(t) = z_L

A holds what does not depend on the recurrence (input projections and biases) of all layers side by
side, computed before the loop as one product or gather.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from itertools import accumulate
from types import ModuleType
from typing import TypeVar

import torch
from torch import Tensor
from torch._C import _functorch  # type: ignore[attr-defined]
from torch.autograd import forward_ad
from torch.nn import functional

from deeprnn.errors import UserError

logger = logging.getLogger("deeprnn")
F = TypeVar("F", bound=Callable)


@dataclass(frozen=True)
class TransitionSpec:
    """What a backend must know of one ⊕; hashable, so that compiled code can be kept by it."""

    sizes: tuple[int, ...]
    units: tuple[str, ...]
    shortcuts: tuple[bool, ...]

    @property
    def hidden_size(self) -> int:
        """H, the width of the state."""
        return self.sizes[-1]

    @property
    def depth(self) -> int:
        """L, the number of layers."""
        return len(self.sizes)

    @property
    def total(self) -> int:
        """Width of A: all layers side by side."""
        return sum(self.sizes)

    @property
    def offsets(self) -> tuple[int, ...]:
        """Where each layer begins in A."""
        return tuple(accumulate(self.sizes[:-1], initial=0))

    @property
    def text(self) -> tuple[str, str]:
        """Units and shortcuts as strings, the form in which custom operators take them."""
        return ",".join(self.units), "".join("1" if s else "0" for s in self.shortcuts)

    @classmethod
    def from_text(cls, sizes: Sequence[int], units: str, shortcuts: str) -> TransitionSpec:
        """Read what `text` wrote."""
        return cls(tuple(sizes), tuple(units.split(",")), tuple(c == "1" for c in shortcuts))


REGISTRY = {
    "reference": "deeprnn.backends.reference",
    "cpu": "deeprnn.backends.cpu",
    "cuda": "deeprnn.backends.cuda",
    "scan": "deeprnn.backends.scan",
}
PREFERENCE = {"cpu": ("cpu", "reference"), "cuda": ("cuda", "reference")}


def constant_when_compiled(function: F) -> F:
    """`torch.compiler.assume_constant_result`, without its import of the compiler, which takes a second."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def load(name: str) -> ModuleType:
    """The module of a backend, imported when first asked for."""
    if name not in REGISTRY:
        raise UserError(f"unknown backend {name!r}: known are auto, {', '.join(REGISTRY)}")
    return import_module(REGISTRY[name])


def choose(spec: TransitionSpec, device: str, dtype: torch.dtype, precision: str = "fp32") -> str:
    """The name of the fastest backend that can serve this case; the choice is logged once."""
    return _choose(spec.sizes, *spec.text, device, dtype, precision)


@constant_when_compiled
def _choose(*case) -> str:
    """`choose` over plain values: a compiler runs it while tracing and keeps the answer."""
    return _choose_once(*case)


@lru_cache(maxsize=1024)
def _choose_once(
    sizes: tuple[int, ...], units: str, shortcuts: str, device: str, dtype: torch.dtype, precision: str
) -> str:
    spec = TransitionSpec.from_text(sizes, units, shortcuts)
    reasons = []
    for name in PREFERENCE.get(device, ("reference",)):
        reason = why_not(name, spec, device, dtype, precision)
        if reason is None:
            note = f" ({'; '.join(reasons)})" if reasons else ""
            logger.info("backend %s for ⊕ %s on %s in %s%s", name, sizes, device, dtype, note)
            return name
        reasons.append(f"{name}: {reason}")
    raise UserError("no backend can serve this case: " + "; ".join(reasons))


def why_not(
    name: str, spec: TransitionSpec, device: str, dtype: torch.dtype, precision: str = "fp32"
) -> str | None:
    """None if the backend can serve the case, else the reason and the remedy."""
    return load(name).why_not(spec, torch.device(device), dtype, 1, 1, precision=precision)


def nvidia(device: torch.device) -> bool:
    """Whether kernels of ours can run there: torch calls AMD's GPUs "cuda" too."""
    return device.type == "cuda" and torch.version.cuda is not None


def autocasts(device: str) -> bool:
    """Whether autocast is on for a device; the meta device, which only knows shapes, has none."""
    return device != "meta" and torch.is_autocast_enabled(device)


def without_autocast(device: str) -> AbstractContextManager:
    """Inside, products run in the types they are given: the state keeps its own."""
    return torch.autocast(device, enabled=False) if autocasts(device) else nullcontext()


def unroll(
    A: Tensor,
    h0: Tensor,
    W: Sequence[Tensor],
    S: Sequence[Tensor],
    spec: TransitionSpec,
    reset: Tensor | None = None,
    backend: str = "auto",
    precision: str = "auto",
) -> tuple[Tensor, Tensor]:
    """States of all steps: h (T, B, H) and the intermediate layers z (T, B, ΣM_l − H).

    A is (T, B, ΣM_l), h0 (B, H), W_l (M_l, M_{l-1}), and S holds one (M_l, H) for each shortcut.
    Under autocast the products may run in bf16 where the backend can, but the state keeps its type.
    """
    device, dtype = A.device.type, W[0].dtype
    autocast = autocasts(device) and torch.get_autocast_dtype(device) == torch.bfloat16
    if precision == "auto":
        precision = "bf16" if autocast and device == "cuda" else "fp32"
    _check(A.device, A.shape, h0, W, reset, *S)
    _check_matrices(W, S, spec)
    with without_autocast(device):
        A, h0 = A.to(dtype), h0.to(dtype)
        if backend == "auto":
            backend = _outside_choice() or choose(spec, device, dtype, precision)
        elif (reason := _reason(backend, spec.sizes, *spec.text, device, dtype, precision)) is not None:
            raise UserError(f"backend {backend!r} cannot serve this case: {reason}")
        return _FUNCTIONS[backend](A, h0, list(W), list(S), spec, reset, precision)


def unroll_input(
    x: Tensor,
    U: Sequence[Tensor],
    b: Sequence[Tensor],
    h0: Tensor,
    W: Sequence[Tensor],
    S: Sequence[Tensor],
    spec: TransitionSpec,
    reset: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """`unroll` of A_l = x U_lᵀ + b_l, with the product in one with the loop where a backend can: x is (T, B, I).

    There may be no b; where there is one more than layers, the last adds to the first, as in `nn.RNN`.
    """
    if backend in ("auto", "cuda") and x.is_cuda and not torch.compiler.is_compiling() and nvidia(x.device):
        from deeprnn.backends.cuda import entering

        if _outside_choice() is None and entering.serves(x, U, b, (h0, *W, *S), spec):
            _check(x.device, (*x.shape[:-1], spec.total), h0, W, reset, *U, *b, *S)
            _check_matrices(W, S, spec)
            if choose(spec, "cuda", x.dtype, "fp32") == "cuda":
                return entering.unroll(x, U, b, h0, W, S, spec, reset, "fp32")
    A = functional.linear(x, one_matrix(U), one_bias(b, len(W)))
    return unroll(A, h0, W, S, spec, reset, backend)


def one_matrix(U: Sequence[Tensor]) -> Tensor:
    """The matrices of all layers as one."""
    return torch.cat(list(U)) if len(U) > 1 else U[0]


def one_bias(b: Sequence[Tensor], layers: int) -> Tensor | None:
    """The biases of all layers as one; a further one adds to the first layer's."""
    if not b:
        return None
    first = b[0] if len(b) == layers else b[0] + b[-1]
    return torch.cat([first, *b[1:layers]]) if layers > 1 else first


def _check(
    device: torch.device,
    shape: Sequence[int],  # of A
    h0: Tensor,
    W: Sequence[Tensor],
    reset: Tensor | None,
    *others: Tensor | None,
) -> None:
    """Refuse what does not fit together: a kernel reads where it is told, even beyond a tensor's end."""
    if torch.compiler.is_compiling():
        return
    for x in (h0, *W, reset, *others):
        if x is not None and x.device != device:
            raise UserError(
                f"all tensors must be on one device: one of shape {tuple(x.shape)} is on {x.device}, the input on "
                f"{device}; move it with .to({str(device)!r})"
            )
    *_, steps, batch, total = shape
    if total != (width := sum(w.shape[-2] for w in W)):
        raise UserError(f"A is {total} wide, but the layers are {width} wide together")
    if h0.shape[-2:] != (want := (batch, W[0].shape[-1])):
        raise UserError(f"the first state must be (B, H) = {want}, got {tuple(h0.shape)}")
    if reset is not None and (reset.dtype != torch.bool or reset.shape[-2:] != (steps, batch)):
        raise UserError(
            f"reset must be bool marks of shape (T, B) = {(steps, batch)}, got {reset.dtype} of shape "
            f"{tuple(reset.shape)}"
        )


def _check_matrices(W: Sequence[Tensor], S: Sequence[Tensor], spec: TransitionSpec) -> None:
    """The same for the matrices of ⊕."""
    if torch.compiler.is_compiling():
        return
    found, wanted = [m.shape[-2:] for m in (*W, *S)], _shapes(spec)
    if found != wanted:
        given = ", ".join(str(tuple(shape)) for shape in found)
        raise UserError(f"W and S of ⊕ must be {', '.join(map(str, wanted))}, got {given}")


@lru_cache(maxsize=1024)
def _shapes(spec: TransitionSpec) -> list[tuple[int, int]]:
    """Those of every W, then of every S."""
    sizes, state = spec.sizes, spec.hidden_size
    below = zip(sizes, (state, *sizes[:-1]), strict=True)
    return [*below, *((size, state) for size, has in zip(sizes, spec.shortcuts, strict=True) if has)]


def _outside_choice() -> str | None:
    """The backend that the surrounding transformation asks for, None where any will do.

    Custom operators know reverse-mode differentiation and one vmap; torch.func's own gradients, forward-mode
    differentiation and a vmap inside another need plain operations, and export a loop it can write down.
    """
    if torch.compiler.is_exporting():
        return "scan"
    if torch.compiler.is_compiling():
        return None
    if forward_ad._current_level >= 0:
        return "reference"
    stack = _functorch.get_interpreter_stack() or ()
    population = len(stack) < 2 and all(level.key() == _functorch.TransformType.Vmap for level in stack)
    return None if population else "reference"


def unroll_with(
    A: Tensor,
    h0: Tensor,
    W: Sequence[Tensor],
    S: Sequence[Tensor | None],
    *rest,
    named: Sequence | None = None,
) -> tuple[Tensor, Tensor]:
    """`reference.unroll_with` by the fastest way there is: units that pool, and masks inside ⊕.

    With the units also by name, (text, ρ, centres) for each layer, `steps` serves where it can; a scan does
    while exporting.
    """
    state_mask, masks = rest[3] if len(rest) > 3 else None, rest[4] or () if len(rest) > 4 else ()
    _check(A.device, A.shape, h0, W, rest[2] if len(rest) > 2 else None, *S, state_mask, *masks)
    with without_autocast(A.device.type):
        A, h0 = A.to(W[0].dtype), h0.to(W[0].dtype)
        if torch.compiler.is_exporting():
            return scan.unroll_with(A, h0, W, S, *rest[:3])
        plainly = named is None or torch.compiler.is_compiling() or _outside_choice() is not None
        if named and not plainly and steps.serves(A, W, S, named, (state_mask, *masks)):
            return steps.unroll_with(A, h0, W, S, named, *rest[2:])
        return reference.unroll_with(A, h0, W, S, *rest)


@constant_when_compiled
def _reason(
    name: str,
    sizes: tuple[int, ...],
    units: str,
    shortcuts: str,
    device: str,
    dtype: torch.dtype,
    precision: str,
) -> str | None:
    return why_not(name, TransitionSpec.from_text(sizes, units, shortcuts), device, dtype, precision)


def _lazily(name: str):
    """The backend's `unroll`, its module imported at the first call."""

    def call(*args):
        return load(name).unroll(*args)

    return call


# A compiler traces through these, so the modules that it may meet are imported here, at the end.
from deeprnn.backends import cpu, reference, scan  # noqa: E402
from deeprnn.backends import stepwise as steps  # noqa: E402

_FUNCTIONS = {
    "reference": reference.unroll,
    "cpu": cpu.unroll,
    "scan": scan.unroll,
    "cuda": _lazily("cuda"),
}
