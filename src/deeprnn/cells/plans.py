"""How a cell's sequence is computed: its description with the graphs around it, or the reason for the plain loop.

A plan is made when a cell is first used, and again when anything but its tensors' numbers has changed. Functions here
take and return plain values, so that a compiler can run them while it traces.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import count
from threading import RLock
from types import BuiltinFunctionType, FunctionType
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, finalize, ref

import torch
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor

from deeprnn.cells.cell import CELLS, Cell, handle_of
from deeprnn.cells.fingerprint import PLAIN, fingerprint, hook_of, outline, scripted_part, settings
from deeprnn.cells.surroundings import Name, surroundings, unchanged
from deeprnn.cells.trace import Graphs, Traced, Undescribable, trace
from deeprnn.cells.tracing.recording import ChangesItself, in_fresh_thread

logger = logging.getLogger("deeprnn")


class Request(NamedTuple):
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


class Layout(NamedTuple):
    """A plan in plain values."""

    text: str  # of the description
    held: tuple[str, ...]
    counts: tuple[int, int, int, int]  # matrices, vectors, U, b
    needed: tuple[int, int]  # what of the parameters the graphs of rows and of sequences take
    enters: str  # "nothing", "x" (a product with x), "source" (a product with computed rows), "A"
    masks: tuple[bool, ...]  # whether each is one a sequence
    draws: tuple[DrawSpec, ...]
    parts: tuple[
        tuple[int, tuple[int, ...] | None], ...
    ]  # (state, places) of each of the description's states
    new_states: tuple[int, ...]  # which output each of them becomes


@dataclass(frozen=True)
class Plan:
    """A cell's plan: `reason` is why there is no description; `restless`: because the step changes the cell.

    `may_write` says whether the step may write into the tensors that it is given.
    """

    key: str
    traced: Traced | None = None
    layout: Layout | None = None
    reason: str = ""
    restless: bool = False
    may_write: bool = False


PLANS: dict[str, Plan] = {}
MOST_PLANS = 64
"""of a cell: then all are forgotten"""
Key = tuple[Any, ...]
RESTLESS: Key = ("restless",)
"""a cell whose step changed it each time that it was read is called step by step from then on"""


class Kept:
    """Things by name, as attributes: a compiler looks an attribute up when it comes to it, but a dict only once."""

    def keep(self, name: str, thing: Any) -> None:
        self.__dict__[name] = thing

    def forget(self, name: str) -> None:
        self.__dict__.pop(name, None)


GRAPHS = Kept()
"""graphs of plans by key and name: "fixed", "rows", "sequence" """
_numbers = count()
_by_cell: WeakKeyDictionary[Cell, _Plans] = WeakKeyDictionary()


def plan_of(cell: Cell, request: Request, tensors: dict[str, Tensor] | None = None) -> Plan:
    """The plan of a cell, whose tensors are its own or the given ones."""
    own = _by_cell.get(cell) or _by_cell.setdefault(cell, _Plans({}, {}, RLock()))
    if (restless := own.known.get(RESTLESS)) is not None:
        return restless.plan
    seen, last = outline(cell), own.last.get(request)
    if last is not None and last.outline == seen and unchanged(last.known.names):
        return last.known.plan
    key = (request, hook_of(cell), fingerprint(cell))
    if (found := _found(own.known, key)) is None:
        with own.lock:
            if (found := _found(own.known, key)) is None:  # another thread may have made it meanwhile
                held = held_tensors(cell) if tensors is None else tensors
                found = _plan_anew(cell, key, own, held)
    if seen is not None and seen == outline(cell):  # no other thread changed it meanwhile
        own.last[request] = _Last(seen, found)
    return found.plan


def _found(known: dict[Key, _Known], key: Key) -> _Known | None:
    """A plan that still holds."""
    found = known.get(key)
    return None if found is None or not unchanged(found.names) else found


def _plan_anew(cell: Cell, key: Key, own: _Plans, held: dict[str, Tensor]) -> _Known:
    known = own.known
    if len(known) >= MOST_PLANS:
        _log_changing(type(cell).__qualname__, _differing(key, next(reversed(known))))
        for old in known.values():
            old.forget()
        known.clear()
        own.last.clear()
    objects: list[Any] = []  # known by their addresses, while they live
    fingerprint(cell, objects)
    names = surroundings(cell, objects)
    plan, forget = _make(cell, key[0], held)
    if plan.reason:
        log_plain(type(cell).__qualname__, plan.reason)
    if plan.restless and sum(old.plan.restless for old in known.values()):
        key = RESTLESS
    known[key] = _Known(plan, names, [_watched(thing, own, key) for thing in objects], forget)
    return known[key]


class _Plans(NamedTuple):
    """The plans of a cell, of which one thread makes one at a time."""

    known: dict[Key, _Known]
    last: dict[Request, _Last]
    lock: RLock  # type: ignore[valid-type]

    def forget(self, key: Key) -> None:
        """An address in this fingerprint may become another object's."""
        self.last.clear()
        self.known.pop(key, None)


class _Known(NamedTuple):
    """A plan, what else it depends on, and what keeps addresses from becoming another object's."""

    plan: Plan
    names: tuple[Name, ...]
    watched: list[Any]
    forget: Callable[[], Any]


class _Last(NamedTuple):
    """What was used last, and the cell's outline then."""

    outline: list[Any]
    known: _Known


def _watched(thing: Any, own: _Plans, key: Key) -> Any:
    """What forgets a plan when an object that is known by its address is gone, or the object where that is not told."""
    try:
        return ref(thing, lambda _: own.forget(key))
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


def _make(cell: Cell, request: Request, held: dict[str, Tensor]) -> tuple[Plan, Callable[[], Any]]:
    """A plan, and what forgets it."""
    key = f"{handle_of(cell)}-{next(_numbers)}"

    def describe() -> tuple[Traced, Layout, Graphs]:
        traced = _trace(cell, request, {name: _stand_in(tensor) for name, tensor in held.items()})
        graphs = traced.graphs(torch.device(request.device))
        return traced, _laid_out(traced, graphs), graphs

    try:
        traced, layout, graphs = in_fresh_thread(describe)
    except Undescribable as error:
        restless = isinstance(error, ChangesItself)
        plan = Plan(key, reason=str(error), restless=restless, may_write=error.may_write)
    else:
        plan = Plan(key, traced, layout)
        for name, graph in graphs._asdict().items():
            if graph is not None:
                GRAPHS.keep(f"{key}/{name}", graph)
    PLANS[key] = plan
    return plan, finalize(cell, _forget, key)


def _forget(key: str) -> None:
    del PLANS[key]
    for name in ("fixed", "rows", "sequence"):
        GRAPHS.forget(f"{key}/{name}")


def _trace(cell: Cell, request: Request, stand_ins: dict[str, Tensor]) -> Traced:
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


def _laid_out(traced: Traced, graphs: Graphs) -> Layout:
    own = traced.hoisted
    enters = "x" if traced.plain_input else "source" if traced.linear else "A" if own.entering else "nothing"
    takes = [0 if g is None else sum(n.op == "placeholder" for n in g.graph.nodes) for g in graphs[1:]]
    once = sum(d.per_sequence for d in traced.draws)
    needed = max(takes[0] - 2 - len(traced.draws), 0), max(takes[1] - 1 - once, 0)
    return Layout(
        text=traced.cell.text,
        held=tuple(traced.held),
        counts=(len(traced.cell.matrices), len(traced.cell.vectors), len(own.U), len(own.b)),
        needed=needed,
        enters=enters,
        masks=tuple(per_sequence for _, per_sequence in own.masks),
        draws=tuple(DrawSpec(d.kind, d.shape, d.per_sequence) for d in traced.draws),
        parts=tuple((p.state, p.places) for p in traced.parts),
        new_states=tuple(traced.cell.outputs.index(o) for o in traced.cell.new_states),
    )


# ---- tensors of a cell by path


def held_tensors(cell: nn.Module) -> dict[str, Tensor]:
    """Every tensor that a cell holds: parameters, buffers and plain attributes, each once."""
    found: dict[str, Tensor] = {}
    seen: set[int] = set()
    for path, part in cell.named_modules():
        for home in (part._parameters, part._buffers, part.__dict__):
            for name, value in home.items():
                if isinstance(value, Tensor) and id(value) not in seen:
                    seen.add(id(value))
                    found[f"{path}.{name}" if path else name] = value
    return found


def held_tensor(cell: Any, path: str) -> Tensor:
    """The tensor at a path."""
    for name in path.split("."):
        cell = getattr(cell, name)
    return cell


def with_tensors(module: nn.Module, tensors: Mapping[str, Tensor]) -> nn.Module:
    """A module that holds the given tensors, by path, and all else that `module` holds; that one stays as it is.

    `torch.func.functional_call` puts tensors into the module itself, which other threads may be using.
    """
    own = held_tensors(module)
    return _twin(module, {id(own[path]): tensor for path, tensor in tensors.items()}, {})


def _twin(module: nn.Module, given: Mapping[int, Tensor], made: dict[int, nn.Module]) -> nn.Module:
    if id(module) not in made:
        twin = made[id(module)] = object.__new__(type(module))
        for name, value in module.__dict__.items():
            twin.__dict__[name] = given.get(id(value), value)
        for home in ("_parameters", "_buffers"):
            twin.__dict__[home] = {name: given.get(id(t), t) for name, t in getattr(module, home).items()}
        parts = module._modules.items()
        twin.__dict__["_modules"] = {
            name: None if part is None else _twin(part, given, made) for name, part in parts
        }
    return made[id(module)]


# ---- for compilers: plain values in, plain values out


def compiled_plan(
    handle: str, x_type: torch.dtype, dtype: torch.dtype, device: str, replaced: bool = False
) -> str:
    """The key of the plan of the cell with that handle, as it is now.

    `replaced`: other tensors, of the states' type, take the places of those that it holds.
    """
    cell = CELLS[handle]
    tensors = None
    if replaced:
        held = held_tensors(cell).items()
        tensors = {path: t.to(dtype) if t.is_floating_point() else t for path, t in held}
    return plan_of(cell, Request(x_type, dtype, device), tensors).key


def compiled_layout(key: str) -> Layout | None:
    """The layout of a plan, None for the plain loop."""
    return PLANS[key].layout


def compiled_may_write(key: str) -> bool:
    """Whether the step of a plan may write into its arguments."""
    return PLANS[key].may_write


def compiled_settings(handle: str) -> Sequence[tuple[tuple[str, ...], str, str, Any]]:
    """(path, attribute, kind, what it stands for) of a cell's settings: a compiler guards on them by comparing.

    Numbers and words are compared as they are, lists and dictionaries of them as tuples, functions by address.
    """
    found = []
    for path, name, value in settings(CELLS[handle]):
        found += _compared(tuple(path.split(".")) if path else (), name, value)
    return tuple(found)


def _compared(path: tuple[str, ...], name: str, value: Any, depth: int = 2) -> list[tuple[Any, ...]]:
    if isinstance(value, PLAIN):
        return [(path, name, "value", value)]
    if isinstance(value, (list, tuple)):
        return [(path, name, "list", tuple(value))] if all(isinstance(v, PLAIN) for v in value) else []
    if isinstance(value, dict):
        items = tuple(value.items())
        return (
            [(path, name, "dict", items)] if all(isinstance(v, PLAIN) for pair in items for v in pair) else []
        )
    if isinstance(value, (FunctionType, BuiltinFunctionType, type)):
        return [(path, name, "id", id(value))]
    if not depth or isinstance(value, (Tensor, nn.Module)) or callable(value):
        return []
    inner = getattr(value, "__dict__", {}).items()
    return [entry for key, own in inner for entry in _compared((*path, name), key, own, depth - 1)]


def compiled_step(handle: str) -> int:
    """The address of a cell's step, which a class may get anew."""
    return id(type(CELLS[handle]).step)


for _function in (compiled_plan, compiled_layout, compiled_may_write, compiled_settings, compiled_step):
    _function._dynamo_marked_constant = True  # type: ignore[attr-defined]  # run while tracing, the answer kept
