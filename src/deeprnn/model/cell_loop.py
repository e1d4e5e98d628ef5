"""A cell over a sequence: by its description on the fastest backend, or by the plain loop over its step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.func import functional_call

from deeprnn.backends.call import InputProjection, Inputs
from deeprnn.backends.registry import REFERENCE, check_plain
from deeprnn.backends.unrolling import project_and_unroll, unroll, without_autocast
from deeprnn.cells import compiled_plans, draws, plans
from deeprnn.cells.cell import OWN_START, Cell, handle_of, has_own_start
from deeprnn.cells.description import from_text
from deeprnn.cells.held_tensors import held_tensor, with_tensors
from deeprnn.cells.plans import DrawSpec, PlanRequest, StepSignature
from deeprnn.errors import UserError
from deeprnn.model.overrides import refresh_weights
from deeprnn.model.tracing import traced_backend


class Sequences(NamedTuple):
    """Every state, and every other output of the description, at every step: (T, B, n) each."""

    states: list[Tensor]
    others: list[Tensor]


def unroll_cell(
    cell: Cell,
    x: Tensor,
    states: Sequence[Tensor],
    reset: Tensor | None = None,
    tensors: Mapping[str, Tensor] | None = None,
    drawn: Sequence[Tensor] | None = None,
    backend: str = "auto",
) -> Sequences:
    """All steps of a cell: x (T, B, ·) or symbols (T, B), states (B, n) before the first.

    `tensors` replace those that the cell holds, by path; `drawn` are the random numbers of `draw_specs`, (T, B, ·) or,
    for a whole sequence, (B, ·), and are drawn here where they are not given.
    """
    if tensors is None:
        refresh_weights(cell)  # `step` is read, the cell itself not called
    if torch.jit.is_tracing():  # type: ignore[attr-defined]  # sizes are tensors there; a trace is of torch's operations
        return plain_loop(cell, x, states, reset, tensors, REFERENCE, _may_write(cell))
    backend = traced_backend(backend, x, *states)
    request = PlanRequest(x.dtype, states[0].dtype, str(x.device))
    if torch.compiler.is_compiling():
        key = compiled_plans.compiled_plan(handle_of(cell), *request, tensors is not None)
        _guard(cell)
        signature, may_write = compiled_plans.compiled_signature(key), compiled_plans.compiled_may_write(key)
        described = None
    else:
        plan = plans.plan_of(cell, request, None if tensors is None else dict(tensors))
        key, signature, may_write = plan.key, plan.signature, plan.may_write
        # One object for all layers alike.
        described = None if signature is None else from_text(signature.text)
    if signature is not None and reset is not None and has_own_start(cell):
        if not torch.compiler.is_compiling():
            plans.log_plain(type(cell).__qualname__, OWN_START)
        signature = None
    if signature is None:
        return plain_loop(cell, x, states, reset, tensors, backend, may_write)
    values = [held_tensor(cell, path) if tensors is None else tensors[path] for path in signature.held]
    drawn = draw(signature.draws, x, request.dtype) if drawn is None else drawn
    projection, inputs = _before_loop(key, signature, values, x, drawn)
    masks = [y.to(request.dtype) for y in inputs.masks]  # which may be bool; kernels read numbers
    inputs = inputs._replace(states=_parts(signature, states), masks=masks, reset=reset)
    described = signature.text if described is None else described
    if isinstance(projection, InputProjection):
        outputs = project_and_unroll(described, projection, inputs, backend)
    else:
        outputs = unroll(described, inputs._replace(A=projection), backend)
    others = [y for k, y in enumerate(outputs) if k not in signature.new_states]
    return Sequences(_whole(signature, [outputs[k] for k in signature.new_states], len(states)), others)


def draw_specs(cell: Cell, request: PlanRequest) -> tuple[DrawSpec, ...]:
    """The random numbers that a described cell takes; none where it runs by the plain loop."""
    signature = plans.plan_of(cell, request).signature
    return () if signature is None else signature.draws


def draw(specs: Sequence[DrawSpec], x: Tensor, dtype: torch.dtype) -> list[Tensor]:
    """Fresh random numbers for a sequence x (T, B, …)."""
    draws = []
    for kind, shape, per_sequence in specs:
        size = (*x.shape[1 if per_sequence else 0 : 2], *shape)
        sample = torch.rand if kind == "uniform" else torch.randn
        draws.append(sample(size, dtype=dtype, device=x.device))
    return draws


def _guard(cell: Cell) -> None:
    """Read every setting of the cell, so that compiled code is made anew when one of them changes."""
    if id(type(cell).step) != compiled_plans.compiled_step(handle_of(cell)):
        raise AssertionError("the step changed while it was compiled")
    for path, name, kind, value in compiled_plans.compiled_settings(handle_of(cell)):
        part: Any = cell
        for inner in path:
            part = getattr(part, inner)
        now = getattr(part, name)
        if kind == "dict":
            now = tuple(now.items())
        elif kind != "value":
            now = id(now) if kind == "id" else tuple(now)
        if now != value:
            raise AssertionError(f"{name} changed while it was compiled")


def _before_loop(
    key: str, signature: StepSignature, values: Sequence[Tensor], x: Tensor, drawn: Sequence[Tensor]
) -> tuple[InputProjection | Tensor, Inputs]:
    """What enters, and the matrices, vectors and masks."""
    with without_autocast(x.device.type):  # weights that are computed keep their type
        results = getattr(plans.GRAPHS, f"{key}/fixed")(*values)
    groups, start = [], 0
    for count in (*signature.counts, *signature.needed):
        groups.append(list(results[start : start + count]))
        start += count
    matrices, vectors, U, b, for_rows, for_sequence = groups
    T, B = x.shape[:2]
    by_step: list[Tensor] = []
    if hasattr(plans.GRAPHS, f"{key}/rows"):
        rows = [_rows(d, T, B, spec.per_sequence) for d, spec in zip(drawn, signature.draws, strict=True)]
        by_step = list(getattr(plans.GRAPHS, f"{key}/rows")(T * B, _rows(x, T, B), *rows, *for_rows))
        by_step = [y.reshape(T, B, y.shape[-1]) for y in by_step]
    by_sequence: list[Tensor] = []
    if hasattr(plans.GRAPHS, f"{key}/sequence"):
        once = [d for d, spec in zip(drawn, signature.draws, strict=True) if spec.per_sequence]
        by_sequence = list(getattr(plans.GRAPHS, f"{key}/sequence")(B, *once, *for_sequence))
    if signature.enters == "x":
        projection = InputProjection(x, U, b)
    elif signature.enters == "source":
        projection = InputProjection(by_step.pop(0), U, b)
    elif signature.enters == "A":
        projection = by_step.pop(0)
    else:
        projection = torch.zeros(T, B, 0, dtype=values[0].dtype if values else None, device=x.device)
    masks = [by_sequence.pop(0) if once else by_step.pop(0) for once in signature.masks]
    return projection, Inputs(None, [], matrices, vectors, masks)


def _rows(x: Tensor, T: int, B: int, per_sequence: bool = False) -> Tensor:
    """Time and batch as one dimension."""
    if per_sequence:
        x = x.unsqueeze(0).expand(T, *x.shape)
    return x.reshape(T * B, *x.shape[2:])


def _parts(signature: StepSignature, states: Sequence[Tensor]) -> list[Tensor]:
    """The states as the description has them: whole, or in parts."""
    return [
        states[k] if places is None else states[k][..., torch.tensor(places, device=states[k].device)]
        for k, places in signature.parts
    ]


def _whole(signature: StepSignature, parts: Sequence[Tensor], count: int) -> list[Tensor]:
    """The cell's own states from those of the description."""
    states = []
    for state in range(count):
        own = [(places, y) for (k, places), y in zip(signature.parts, parts, strict=True) if k == state]
        if own[0][0] is None:
            states.append(own[0][1])
            continue
        order = [place for places, _ in own for place in places]  # type: ignore[union-attr]
        back = sorted(range(len(order)), key=order.__getitem__)
        joined = torch.cat([y for _, y in own], -1)
        states.append(
            joined
            if back == list(range(len(back)))
            else joined[..., torch.tensor(back, device=joined.device)]
        )
    return states


def plain_loop(
    cell: Cell,
    x: Tensor,
    states: Sequence[Tensor],
    reset: Tensor | None,
    tensors: Mapping[str, Tensor] | None,
    backend: str,
    may_write: bool = True,
) -> Sequences:
    """Call the cell step by step; a step that may write into its arguments gets copies."""
    check_plain(
        backend,
        f"{type(cell).__name__}, which is unrolled by the plain loop: use backend='auto'; layer.explain() says why",
    )
    fresh = None if reset is None else cell.initial_state(x.shape[1])
    with draws.sequence() as drawn:

        def advance(x: Tensor, state: Sequence[Tensor], marks: Tensor | None) -> list[Tensor]:
            if drawn.asked:  # export lets a loop change nothing outside
                drawn.asked = 0
            if marks is not None and fresh is not None:
                state = [torch.where(marks.unsqueeze(-1), h0, h) for h0, h in zip(fresh, state, strict=True)]
            return call_cell(cell, x, state, tensors, may_write)

        if torch.compiler.is_exporting():
            return Sequences(_written_loop(advance, x, states, reset), [])
        state, steps = list(states), []
        for t in range(x.shape[0]):
            state = advance(x[t], state, None if reset is None else reset[t])
            steps.append(state)
    if not steps:
        return Sequences([h.unsqueeze(0)[:0] for h in states], [])
    return Sequences([torch.stack(h) for h in zip(*steps, strict=True)], [])


def _written_loop(
    advance: Callable[[Tensor, Sequence[Tensor], Tensor | None], list[Tensor]],
    x: Tensor,
    states: Sequence[Tensor],
    reset: Tensor | None,
) -> list[Tensor]:
    """The loop as one operator, so that time stays a dynamic dimension."""
    from torch._higher_order_ops.scan import scan

    advance(
        x[0], states, None if reset is None else reset[0]
    )  # what is drawn for a sequence is drawn here, once
    marks = x.new_zeros(x.shape[:2], dtype=torch.bool) if reset is None else reset

    def step(state: list[Tensor], now: tuple[Tensor, Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        new = advance(now[0], state, None if reset is None else now[1])
        return [h.clone() for h in new], [h.clone() for h in new]

    return list(scan(step, list(states), (x, marks), dim=0)[1])


def _may_write(cell: Cell) -> bool:
    """Whether a step that has not been read may write into its arguments: those of this package do not."""
    return not type(cell).__module__.startswith("deeprnn.")


def call_cell(
    cell: Cell,
    x: Tensor,
    states: Sequence[Tensor],
    tensors: Mapping[str, Tensor] | None = None,
    may_write: bool | None = None,
) -> list[Tensor]:
    """The states after one step, in the states' own type; under autocast too a cell computes in that type."""
    with without_autocast(x.device.type):
        x = x.to(states[0].dtype) if x.is_floating_point() and x.dtype != states[0].dtype else x
        arguments = (x, *states)
        if _may_write(cell) if may_write is None else may_write:
            arguments = tuple(a.clone() for a in arguments)
        if tensors is None:
            new = cell(*arguments)
        elif torch.compiler.is_compiling():  # which knows this way
            new = functional_call(cell, dict(tensors), arguments)
        else:
            new = with_tensors(cell, tensors)(*arguments)
        pairs = zip(_as_states(cell, new), states, strict=True)
        return [h if h.dtype == old.dtype else h.to(old.dtype) for h, old in pairs]


def _as_states(cell: Cell, new: Any) -> tuple[Tensor, ...]:
    """What a step returned, as a tuple of the right length."""
    states = tuple(new) if isinstance(new, (tuple, list)) else (new,)
    wanted = cell.sizes().states
    shapes = [tuple(h.shape[1:]) if isinstance(h, Tensor) else type(h).__name__ for h in states]
    if shapes != [(n,) for n in wanted]:
        raise UserError(
            f"{type(cell).__name__}.step must return its {len(wanted)} new state(s), (B, n) with n = "
            f"{', '.join(map(str, wanted))}, got {', '.join(map(str, shapes))} after the batch dimension"
        )
    if any(h.is_complex() for h in states):
        raise UserError(
            f"{type(cell).__name__}.step returns a complex state, and states are real: let it return "
            "torch.view_as_real(h).flatten(1), and take it apart with torch.view_as_complex"
        )
    return states
