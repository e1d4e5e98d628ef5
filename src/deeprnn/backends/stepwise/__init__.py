"""⊕ with pooling units or masks inside: a hand-written backward through time, few calls a step.

`deeprnn::unroll_steps` and `deeprnn::unroll_steps_backward` serve what the element-wise backends cannot: Lp
and maxout units, and dropout masks on the state or on intermediate layers. The loops are in
`steps_loop.py`. A population of P models is a leading dimension of every tensor; on the CPU its members are
computed one by one, with the very calls that serve a single model, on a GPU by batched products. A second
derivative follows `reference.unroll_with` (`steps_second.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from deeprnn.backends.cpu import _lead
from deeprnn.backends.gradients import _product, batched_by_autograd, inside_vmap
from deeprnn.backends.stepwise import loop as steps_loop
from deeprnn.backends.stepwise import plain as steps_plain
from deeprnn.backends.stepwise import second as steps_second
from deeprnn.backends.stepwise.loop import Layout, States, layout_of
from deeprnn.model import units as phi

UNITS = ("sigmoid", "tanh", "relu", "identity", "maxout", "lp")
DTYPES = {"cpu": (torch.float32, torch.float64), "cuda": (torch.float32,)}
Named = tuple[str, Tensor | None, Tensor | None]  # a unit's text, and ρ and the centres of an Lp unit


def serves(
    A: Tensor,
    W: Sequence[Tensor],
    S: Sequence[Tensor | None],
    named: Sequence[Named],
    others: Sequence[Tensor | None],
) -> bool:
    """Whether the operators know the units, types and masks; `others` are the state's mask and the layers'.

    Masks take no gradient. Where shapes do not fit each other the reference serves, or says so: a kernel would read
    beyond a tensor's end.
    """
    device, dtype = A.device, A.dtype
    if dtype not in DTYPES.get(device.type, ()) or A.dim() != 3:
        return False
    if device.type == "cuda" and (
        torch.version.cuda is None or torch.cuda.get_device_capability(device) < (7, 0)
    ):
        return False
    specs = [phi.UnitSpec.parse(text) for text, _, _ in named]
    if any(u.name not in UNITS for u in specs):
        return False
    sizes = [w.shape[-2] // u.pool for w, u in zip(W, specs, strict=True)]
    state, expected = sizes[-1], []
    for l, (w, s, (_, rho, centre)) in enumerate(zip(W, S, named, strict=True)):
        width, size, below = w.shape[-2], sizes[l], sizes[l - 1]  # below the first layer: the state
        expected += [(w, (width, below)), (s, (width, state)), (rho, (size,)), (centre, (width,))]
    given = [(x, shape) for x, shape in expected if x is not None]
    if any(x.dtype != dtype or x.device != device or x.shape != shape for x, shape in given):
        return False
    return all(m is None or _plain_mask(m, A, n) for m, n in zip(others, (state, *sizes), strict=False))


def _plain_mask(mask: Tensor, A: Tensor, size: int) -> bool:
    lead = A.shape[:2] if mask.dim() == 3 else A.shape[1:2]
    return mask.dtype == A.dtype and mask.shape == (*lead, size) and not mask.requires_grad


def unroll_with(
    A: Tensor,
    h0: Tensor,
    W: Sequence[Tensor],
    S: Sequence[Tensor | None],
    named: Sequence[Named],
    reset: Tensor | None = None,
    state_mask: Tensor | None = None,
    masks: Sequence[Tensor | None] | None = None,
) -> tuple[Tensor, Tensor]:
    """As `reference.unroll_with`, with the units by name."""
    units = ",".join(text for text, _, _ in named)
    shortcuts = "".join("0" if s is None else "1" for s in S)
    masked = "".join("0" if m is None else "1" for m in masks or [None] * len(W))
    rho = [r for _, r, _ in named if r is not None]
    centre = [c for _, _, c in named if c is not None]
    lists = [list(W), [s for s in S if s is not None], rho, centre, [m for m in masks or () if m is not None]]
    grad = torch.is_grad_enabled()
    if inside_vmap() or not grad:
        return unroll_steps(A, h0, *lists, state_mask, reset, units, shortcuts, masked, grad)[:2]
    counts = tuple(map(len, lists))
    flat = [x for group in lists for x in group]
    return Direct.apply(A, h0, state_mask, reset, (units, shortcuts, masked), counts, *flat)


torch.library.define(
    "deeprnn::unroll_steps",
    "(Tensor A, Tensor h0, Tensor[] W, Tensor[] S, Tensor[] rho, Tensor[] centre, Tensor[] masks, "
    "Tensor? state_mask, Tensor? reset, str units, str shortcuts, str masked, bool keep) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)
torch.library.define(
    "deeprnn::unroll_steps_backward",
    "(Tensor dh, Tensor? dz, Tensor slope, Tensor power, Tensor[] W, Tensor[] S, Tensor? state_mask, "
    "Tensor? reset, str units, str shortcuts) -> (Tensor, Tensor, Tensor)",
)
unroll_steps = torch.ops.deeprnn.unroll_steps.default
unroll_steps_backward = torch.ops.deeprnn.unroll_steps_backward.default


def by_torch(x: Tensor) -> bool:
    """Whether units are torch calls, for one member after the other; else they are kernels."""
    return x.device.type == "cpu"


def _forward(
    A: Tensor, h0: Tensor, W: list[Tensor], S: list[Tensor], rho: list[Tensor], centre: list[Tensor],
    masks: list[Tensor], state_mask: Tensor | None, reset: Tensor | None,
    units: str, shortcuts: str, masked: str, keep: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    """h, z, and for the backward pass the slopes of the units, dz/dρ, and the state that each step saw."""
    if A.dim() == 4 and by_torch(A):
        values = (A, h0, W, S, rho, centre, masks, state_mask, reset)
        text = (units, shortcuts, masked, keep)
        each = [_forward(*_member((*values, *text), p)) for p in range(len(A))]
        return tuple(map(torch.stack, zip(*each, strict=True)))
    layout = _layout(W, units, shortcuts)
    states = _states(A, h0, layout)
    if states.h.numel() == 0:
        return states
    spread = iter(masks)
    by_layer = [next(spread) if has == "1" else None for has in masked]
    states.slope.copy_(A)
    for l, n in enumerate(layout.powers):
        if n:
            c = centre[layout.learned(l)]
            layout.columns(states.slope, l).sub_(c[:, None, None] if A.dim() == 4 else c)
    given = steps_loop.given(rho, by_layer, state_mask, reset, keep)
    if by_torch(A):
        steps_loop.forward(layout, states, h0, W, S, given, steps_plain.PlainForward(layout, states, given))
        if keep:
            steps_plain.slopes(layout, states, given)
        return states
    # Imported here: the kernels need an NVIDIA driver.
    from deeprnn.backends.cuda import _on, step_kernels, unit_kernels

    with _on(A):
        if step_kernels.serves(layout, A.shape[-2]):
            step_kernels.forward(layout, states, h0, W, S, given)
        else:
            steps_loop.forward(layout, states, h0, W, S, given, unit_kernels.forward(layout, states, given))
    return states


def _backward(
    dh: Tensor, dz: Tensor | None, slope: Tensor, power: Tensor, W: list[Tensor], S: list[Tensor],
    state_mask: Tensor | None, reset: Tensor | None, units: str, shortcuts: str,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients before each unit dA ([P,] T, B, Σ widths), of the first state, and of ρ ([P,] Σ powers)."""
    if slope.dim() == 4 and by_torch(slope):
        values = (dh, dz, slope, power, W, S, state_mask, reset, units, shortcuts)
        each = [_backward(*_member(values, p)) for p in range(len(slope))]
        dA, dh0, drho = zip(*each, strict=True)
        return torch.stack(dA), torch.stack(dh0), torch.stack(drho)
    layout = _layout(W, units, shortcuts)
    dA, carry, drho = _gradients(dh, slope, power)
    if dh.numel() == 0:
        return dA, carry.zero_(), drho.zero_()
    G = _outside(layout, dh, dz)
    if by_torch(slope):
        apply = steps_plain.PlainBackward(layout, slope, dA, G, carry, state_mask, reset)
        steps_loop.backward(layout, dA, G, carry, W, S, dz is not None, apply)
    else:
        from deeprnn.backends.cuda import _on, step_kernels, unit_kernels

        with _on(dh):
            if step_kernels.serves(layout, dh.shape[-2]):
                rest = (state_mask, reset, dz is not None)
                step_kernels.backward(layout, slope, dA, G, carry, W, S, *rest)
            else:
                apply = unit_kernels.backward(layout, slope, dA, G, carry, state_mask, reset)
                steps_loop.backward(layout, dA, G, carry, W, S, dz is not None, apply)
    for l, n in enumerate(layout.powers):
        if n:
            layout.power(drho, l).copy_((G[l] * layout.power(power, l)).sum((-3, -2)))
    return dA, steps_loop.first(carry, state_mask, reset).clone(), drho


for _device in ("cpu", "cuda"):
    torch.library.impl("deeprnn::unroll_steps", _device, _forward)
    torch.library.impl("deeprnn::unroll_steps_backward", _device, _backward)


@torch.library.register_fake("deeprnn::unroll_steps")
def _(A, h0, W, S, rho, centre, masks, state_mask, reset, units, shortcuts, masked, keep):
    return tuple(_states(A, h0, _layout(W, units, shortcuts)))


@torch.library.register_fake("deeprnn::unroll_steps_backward")
def _(dh, dz, slope, power, W, S, state_mask, reset, units, shortcuts):
    return _gradients(dh, slope, power)


def _layout(W: Sequence[Tensor], units: str, shortcuts: str) -> Layout:
    return layout_of(units, shortcuts, tuple(w.shape[-2] for w in W))


def _states(A: Tensor, h0: Tensor, layout: Layout) -> States:
    H, lead = h0.shape[-1], A.shape[:-1]
    widths = (H, sum(layout.sizes) - H, A.shape[-1], sum(layout.powers), H)
    return States(*(A.new_empty(*lead, n) for n in widths))


def _gradients(dh: Tensor, slope: Tensor, power: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    lead, (_, B, H) = dh.shape[:-3], dh.shape[-3:]
    return slope.new_empty(slope.shape), slope.new_empty(*lead, B, H), slope.new_empty(*lead, power.shape[-1])


def _outside(layout: Layout, dh: Tensor, dz: Tensor | None) -> list[Tensor]:
    """Where dL/dz_l of each layer is gathered, beginning with what comes from outside the loop."""
    inner = []
    for l in range(layout.last):
        own = dh.new_empty(*dh.shape[:-1], layout.sizes[l])
        inner.append(own if dz is None else own.copy_(layout.place(dz, l)))
    return [*inner, dh.clone(memory_format=torch.contiguous_format)]


def _member(values: Sequence[Any], p: int) -> list[Any]:
    """Member p of each tensor or list of tensors, on its own ground: alignment must not change its bits."""

    def own(x: Any) -> Any:
        if isinstance(x, list):
            return [own(y) for y in x]
        return x[p].clone(memory_format=torch.contiguous_format) if isinstance(x, Tensor) else x

    return [own(value) for value in values]


# ---- autograd


def _save(ctx: Any, inputs: tuple[Any, ...], output: Sequence[Tensor]) -> None:
    A, h0, *lists, state_mask, reset, ctx.units, ctx.shortcuts, ctx.masked, _ = inputs
    _, z, slope, power, before = output
    ctx.counts = [len(x) for x in lists]
    flat = [x for group in lists for x in group]
    ctx.save_for_backward(z, slope, power, before, A, h0, state_mask, reset, *flat)
    ctx.set_materialize_grads(False)


def _unroll_backward(ctx: Any, dh: Tensor | None, dz: Tensor | None, *_: None) -> tuple[Any, ...]:
    z, slope, power, before, A, h0, state_mask, reset, *flat = ctx.saved_tensors
    W, S, rho, centre, masks = steps_second.groups_of(flat, ctx.counts)
    dh = before.new_zeros(before.shape) if dh is None else dh
    nothing = ([None] * len(masks), None, None, None, None, None, None)
    if torch.is_grad_enabled() or batched_by_autograd(dh, dz):  # by operations that a second pass can follow
        values = (A, h0, W, S, rho, centre, masks, state_mask, reset)
        with torch.enable_grad():
            found = steps_second.gradients(dh, dz, values, ctx.units, ctx.shortcuts, ctx.masked)
        return *found, *nothing
    text = ctx.units, ctx.shortcuts
    dA, dh0, drho = unroll_steps_backward(dh, dz, slope, power, W, S, state_mask, reset, *text)
    layout = _layout(W, *text)
    dW, dS = weight_gradients(layout, dA, z, before)
    learned = [l for l, n in enumerate(layout.powers) if n]
    d_rho = [layout.power(drho, l) for l in learned]
    d_centre = [-layout.columns(dA, l).sum((-3, -2)) for l in learned]
    return dA, dh0, dW, dS, d_rho, d_centre, *nothing


def weight_gradients(
    layout: Layout, dA: Tensor, z: Tensor, before: Tensor
) -> tuple[list[Tensor], list[Tensor]]:
    """Gradients of every W and S: one product for each run of layers that see the state, one for each other W."""
    if dA.dim() == 4 and by_torch(dA):
        each = [weight_gradients(layout, *_member((dA, z, before), p)) for p in range(len(dA))]
        dW, dS = zip(*each, strict=True)
        return [torch.stack(d) for d in zip(*dW, strict=True)], [
            torch.stack(d) for d in zip(*dS, strict=True)
        ]
    seen: dict[int, Tensor] = {}
    for run in layout.runs:
        whole = _product(layout.columns(dA, run[0], run[-1]), before)
        seen.update(zip(run, whole.split([layout.widths[l] for l in run], dim=-2), strict=True))
    above = range(1, layout.last + 1)
    dW = [seen[0], *(_product(layout.columns(dA, l), layout.place(z, l - 1)) for l in above)]
    return dW, [seen[l] for l in above if layout.shortcuts[l]]


torch.library.register_autograd("deeprnn::unroll_steps", _unroll_backward, setup_context=_save)


class Direct(torch.autograd.Function):
    """The operator and its backward without the autograd layer of torch.library."""

    @staticmethod
    def forward(ctx: Any, A, h0, state_mask, reset, text, counts, *flat):
        inputs = (A, h0, *steps_second.groups_of(flat, counts), state_mask, reset, *text, True)
        output = unroll_steps(*inputs)
        _save(ctx, inputs, output)
        return output[0], output[1]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        dA, dh0, dW, dS, d_rho, d_centre, none, *_ = _unroll_backward(ctx, *grads)  # type: ignore[arg-type]
        return dA, dh0, None, None, None, None, *dW, *dS, *d_rho, *d_centre, *none


# ---- vmap: the mapped dimension becomes the leading population dimension of every tensor


def _map_forward(info, in_dims, *args):
    tensors = [_lead(value, dim, info.batch_size) for value, dim in zip(args[:9], in_dims[:9], strict=True)]
    return unroll_steps(*tensors, *args[9:]), (0,) * 5


def _map_backward(info, in_dims, *args):
    tensors = [_lead(value, dim, info.batch_size) for value, dim in zip(args[:8], in_dims[:8], strict=True)]
    return unroll_steps_backward(*tensors, *args[8:]), (0,) * 3


torch.library.register_vmap("deeprnn::unroll_steps", _map_forward)
torch.library.register_vmap("deeprnn::unroll_steps_backward", _map_backward)
