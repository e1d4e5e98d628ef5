"""How a cell's sequence is computed: its description with the graphs around it, or the reason for the plain loop.

A plan is made when a cell is first used, and again when anything but its tensors' numbers has changed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from itertools import count
from threading import RLock
from typing import Any, Literal, NamedTuple
from weakref import WeakKeyDictionary, finalize, ref

import torch
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor

from deeprnn.cells.attribute_table import AttributeTable
from deeprnn.cells.cell import Cell, handle_of
from deeprnn.cells.fingerprint import fingerprint, hook_of, outline, scripted_part
from deeprnn.cells.held_tensors import held_tensors
from deeprnn.cells.surroundings import Name, surroundings, unchanged
from deeprnn.cells.trace import Graphs, TracedStep, Undescribable, trace
from deeprnn.cells.tracing.recording import ChangesItself, in_fresh_thread

logger = logging.getLogger("deeprnn")


class PlanRequest(NamedTuple):
    """What of a call decides about its plan."""

    x_type: torch.dtype
    dtype: torch.dtype  # of the states
    device: str

    @property
    def symbols(self) -> bool:
        """Whether x holds integer symbols."""
        return not self.x_type.is_floating_point


class DrawSpec(NamedTuple):
    """Random numbers of a call: `shape` of one row."""

    kind: str  # "uniform" or "normal"
    shape: tuple[int, ...]
    per_sequence: bool


Entering = Literal["nothing", "x", "source", "A"]
"""What enters the loop: a product with x itself ("x"), one with computed rows ("source"), or sums ("A")."""


class StepSignature(NamedTuple):
    """What a described step takes and gives, in plain values."""

    text: str  # of the description
    held: tuple[str, ...]
    counts: tuple[int, int, int, int]  # matrices, vectors, U, b
    needed: tuple[int, int]
    """how many values computed from parameters alone the graphs `rows` and `sequence` take"""
    enters: Entering
    masks: tuple[bool, ...]  # whether each is one a sequence
    draws: tuple[DrawSpec, ...]
    parts: tuple[
        tuple[int, tuple[int, ...] | None], ...
    ]  # (state, places) of each of the description's states
    new_states: tuple[int, ...]  # which output each of them becomes


@dataclass(frozen=True)
class StepPlan:
    """A cell's plan: `reason` is why there is no description; `mutates_itself`: because the step changes the cell.

    `may_write` says whether the step may write into the tensors that it is given.
    """

    key: str
    traced: TracedStep | None = None
    signature: StepSignature | None = None
    reason: str = ""
    mutates_itself: bool = False
    may_write: bool = False


PLANS: dict[str, StepPlan] = {}
MOST_PLANS = 64
"""of a cell: then all are forgotten"""
Key = tuple[Any, ...]
MUTATES_ITSELF: Key = ("mutates itself",)
"""a cell whose step changed it each time that it was read is called step by step from then on"""
GRAPHS = AttributeTable()
"""graphs of plans by key and name: "fixed", "rows", "sequence" """
_numbers = count()
_by_cell: WeakKeyDictionary[Cell, _CellCache] = WeakKeyDictionary()


def plan_of(cell: Cell, request: PlanRequest, tensors: dict[str, Tensor] | None = None) -> StepPlan:
    """The plan of a cell, whose tensors are its own or the given ones."""
    cache = _by_cell.get(cell) or _by_cell.setdefault(cell, _CellCache({}, {}, RLock()))
    if (mutates_itself := cache.entries.get(MUTATES_ITSELF)) is not None:
        return mutates_itself.plan
    seen, last = outline(cell), cache.last.get(request)
    if last is not None and last.outline == seen and unchanged(last.entry.names):
        return last.entry.plan
    key = (request, hook_of(cell), fingerprint(cell))
    if (entry := _valid_entry(cache.entries, key)) is None:
        with cache.lock:
            entry = _valid_entry(cache.entries, key)  # another thread may have made it meanwhile
            if entry is None:
                held = held_tensors(cell) if tensors is None else tensors
                entry = _new_entry(cell, key, cache, held)
    if seen is not None and seen == outline(cell):  # no other thread changed it meanwhile
        cache.last[request] = _Last(seen, entry)
    return entry.plan


def _valid_entry(entries: dict[Key, _CacheEntry], key: Key) -> _CacheEntry | None:
    """A plan that still holds."""
    entry = entries.get(key)
    return None if entry is None or not unchanged(entry.names) else entry


def _new_entry(cell: Cell, key: Key, cache: _CellCache, held: dict[str, Tensor]) -> _CacheEntry:
    entries = cache.entries
    if len(entries) >= MOST_PLANS:
        _log_changing(type(cell).__qualname__, _differing(key, next(reversed(entries))))
        for old in entries.values():
            old.forget()
        entries.clear()
        cache.last.clear()
    objects: list[Any] = []  # known by their addresses, while they live
    fingerprint(cell, objects)
    names = surroundings(cell, objects)
    plan, forget = _make(cell, key[0], held)
    if plan.reason:
        log_plain(type(cell).__qualname__, plan.reason)
    if plan.mutates_itself and sum(old.plan.mutates_itself for old in entries.values()):
        key = MUTATES_ITSELF
    entries[key] = _CacheEntry(plan, names, [_watched(thing, cache, key) for thing in objects], forget)
    return entries[key]


class _CellCache(NamedTuple):
    """The plans of a cell, of which one thread makes one at a time."""

    entries: dict[Key, _CacheEntry]
    last: dict[PlanRequest, _Last]
    lock: RLock  # type: ignore[valid-type]

    def forget(self, key: Key) -> None:
        """An address in this fingerprint may become another object's."""
        self.last.clear()
        self.entries.pop(key, None)


class _CacheEntry(NamedTuple):
    """A plan, what else it depends on, and what keeps addresses from becoming another object's."""

    plan: StepPlan
    names: tuple[Name, ...]
    watched: list[Any]
    forget: Callable[[], Any]


class _Last(NamedTuple):
    """What was used last, and the cell's outline then."""

    outline: list[Any]
    entry: _CacheEntry


def _watched(thing: Any, cache: _CellCache, key: Key) -> Any:
    """What forgets a plan when an object that is known by its address is gone, or the object where that is not told."""
    try:
        return ref(thing, lambda _: cache.forget(key))
    except TypeError:
        return thing


def _differing(key: Key, other: Key) -> str:
    """The attributes in which two fingerprints differ."""
    pairs = {
        part for part in set(key[2]) ^ set(other[2]) if isinstance(part, tuple) and isinstance(part[0], str)
    }
    return ", ".join(sorted({f"self.{name}" for name, *_ in pairs})) or "its class"


@lru_cache(maxsize=1024)
def log_plain(name: str, reason: str) -> None:
    """Say once of a class why it is unrolled by the plain loop."""
    logger.warning("%s is unrolled by the plain loop, step by step: %s", name, reason)


@lru_cache(maxsize=1024)
def _log_changing(name: str, changing: str) -> None:
    logger.warning(
        "%s was read %d times because of %s: what changes from call to call belongs into a tensor (register_buffer), "
        "whose numbers are no part of what is compiled", name, MOST_PLANS, changing,
    )  # fmt: skip


def _make(cell: Cell, request: PlanRequest, held: dict[str, Tensor]) -> tuple[StepPlan, Callable[[], Any]]:
    """A plan, and what forgets it."""
    key = f"{handle_of(cell)}-{next(_numbers)}"

    def describe() -> tuple[TracedStep, StepSignature, Graphs]:
        traced = _trace(cell, request, {name: _stand_in(tensor) for name, tensor in held.items()})
        graphs = traced.graphs(torch.device(request.device))
        return traced, _signature_of(traced, graphs), graphs

    try:
        traced, signature, graphs = in_fresh_thread(describe)
    except Undescribable as error:
        mutates_itself = isinstance(error, ChangesItself)
        plan = StepPlan(key, reason=str(error), mutates_itself=mutates_itself, may_write=error.may_write)
    else:
        plan = StepPlan(key, traced, signature)
        for name, graph in graphs._asdict().items():
            if graph is not None:
                GRAPHS.keep(f"{key}/{name}", graph)
    PLANS[key] = plan
    return plan, finalize(cell, _forget, key)


def _forget(key: str) -> None:
    del PLANS[key]
    for name in ("fixed", "rows", "sequence"):
        GRAPHS.forget(f"{key}/{name}")


def _trace(cell: Cell, request: PlanRequest, stand_ins: dict[str, Tensor]) -> TracedStep:
    if type(cell).forward is not Cell.forward or "forward" in cell.__dict__:
        raise Undescribable("the cell has a forward of its own")
    if (reason := hook_of(cell) or scripted_part(cell)) is not None:
        raise Undescribable(reason)
    sizes = cell.sizes()
    x = ((), request.x_type) if request.symbols else ((sizes.input,), request.dtype)
    parameters = {name for name, _ in cell.named_parameters()}
    narrow_stages = torch.device(request.device).type == "cpu"
    return trace(cell.step, cell, stand_ins, parameters, x, sizes.states, request.dtype, narrow_stages)


def _stand_in(tensor: Tensor) -> Tensor:
    """A plain tensor on the CPU to trace with: its numbers, where it has some of its own.

    Called where no transformation is at work: inside torch.func.grad a detached tensor would be one of its own.
    """
    plain = type(tensor) in (Tensor, nn.Parameter, nn.Buffer) and tensor.device.type != "meta"
    if plain and not is_functorch_wrapped_tensor(tensor):
        return tensor.detach().cpu()
    generator = torch.Generator().manual_seed(0)
    return torch.randn(tuple(tensor.shape), generator=generator).to(tensor.dtype)


def _signature_of(traced: TracedStep, graphs: Graphs) -> StepSignature:
    hoisted = traced.hoisted
    enters = (
        "x" if traced.plain_input else "source" if traced.linear else "A" if hoisted.entering else "nothing"
    )
    takes = [0 if g is None else sum(n.op == "placeholder" for n in g.graph.nodes) for g in graphs[1:]]
    once = sum(d.per_sequence for d in traced.draws)
    needed = max(takes[0] - 2 - len(traced.draws), 0), max(takes[1] - 1 - once, 0)
    return StepSignature(
        text=traced.cell.text,
        held=tuple(traced.held),
        counts=(len(traced.cell.matrices), len(traced.cell.vectors), len(hoisted.U), len(hoisted.b)),
        needed=needed,
        enters=enters,
        masks=tuple(per_sequence for _, per_sequence in hoisted.masks),
        draws=tuple(DrawSpec(d.kind, d.shape, d.per_sequence) for d in traced.draws),
        parts=tuple((p.state, p.places) for p in traced.parts),
        new_states=tuple(traced.cell.outputs.index(o) for o in traced.cell.new_states),
    )
