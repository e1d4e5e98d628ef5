"""One step of a cell, run on small tensors and written down as a torch.fx graph of functional torch operations.

The graph's inputs are `rows` (the batch size, an integer), the tensors that the cell holds, x, the states, and one
input for every random draw. In-place operations have become functional ones.
"""

from __future__ import annotations

import operator
import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from deeprnn.cells import draws
from deeprnn.cells.tracing.replacements import REPLACEMENTS
from deeprnn.cells.tracing.side_effects import heard, iterator_of, undone

aten = torch.ops.aten
SIZES = (3, 5)
"""batch sizes of the two runs"""
MOST_RECORDED = 3000
"""operations of a step: one is read in half a millisecond, and most of these would be gone before the loop"""
TORCH = os.path.dirname(os.path.abspath(torch.__file__))
UNSEEN = ("numpy", "tolist", "__array__", "data_ptr", "untyped_storage", "storage", "__dlpack__", "data")
"""ways to a tensor's numbers that torch cannot record"""
GRADIENTS = (
    "requires_grad",
    "grad",
    "grad_fn",
    "is_leaf",
    "register_hook",
    "retain_grad",
    "register_post_accumulate_grad_hook",
    "backward",
)


class Undescribable(Exception):
    """A step that cannot be written as a cell's description; the message names the operation and the line."""

    may_write = True
    """whether the step may write into its arguments: what was recorded to the end does not"""


class ChangesItself(Undescribable):
    """A step that does something besides returning its new states."""


@dataclass
class Draw:
    """A tensor of random numbers that a step takes: `kind` is "uniform" in [0, 1) or "normal"."""

    kind: str
    node: fx.Node
    shape: tuple[int, ...]  # without the batch dimension, which is the first
    per_sequence: bool = False


@dataclass
class Recording:
    """A step as a graph; `constants` are tensors that it takes from elsewhere than the cell."""

    graph: fx.Graph = field(default_factory=fx.Graph)
    rows: fx.Node = None  # type: ignore[assignment]
    held: dict[str, fx.Node] = field(default_factory=dict)
    x: fx.Node = None  # type: ignore[assignment]
    states: list[fx.Node] = field(default_factory=list)
    new_states: list[fx.Node] = field(default_factory=list)
    draws: list[Draw] = field(default_factory=list)
    constants: dict[str, Tensor] = field(default_factory=dict)
    change: str | None = None
    """what the step did besides, in words"""


def where(node: fx.Node) -> str:
    """The line of the user's code that a node comes from."""
    line = node.meta.get("line", "")
    return f" ({line})" if line else ""


def _user_line() -> str:
    """The innermost line that is neither torch's nor the recorder's."""
    frame = sys._getframe(2)
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith(TORCH) and os.path.basename(name) not in (
            "recording.py",
            "replacements.py",
            "draws.py",
        ):
            return f"{os.path.basename(name)}, line {frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return ""


class _Watch(TorchFunctionMode):
    """Notes the line of every call into torch, gives it stand-ins, and refuses what the recorder below would not see.

    Stand-ins are given call by call, and never put into the module, which other threads may be using.
    """

    def __init__(self, recorder: _Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.recorder.line = _user_line()
        self.recorder.called = getattr(func, "__name__", "")
        name = getattr(func, "__name__", "")
        if name == "__get__":
            name = getattr(getattr(func, "__self__", None), "__name__", "")
        if name in UNSEEN:
            raise Undescribable(f"Tensor.{name} takes numbers out of torch ({self.recorder.line})")
        if name in GRADIENTS:
            raise Undescribable(
                f"Tensor.{name} looks at or changes how gradients flow ({self.recorder.line})"
            )
        if name.endswith("_") and not name.endswith("__") and not torch.is_grad_enabled():
            raise Undescribable(f"{name} in place under torch.no_grad() ({self.recorder.line})")
        args, kwargs = tree_map_only(Tensor, self.recorder.stand_in, (tuple(args), kwargs))
        call: Any = REPLACEMENTS.get(name, func)
        return call(*args, **kwargs)


class _Recorder(TorchDispatchMode):
    """Writes every operation into a graph."""

    def __init__(self) -> None:
        super().__init__()
        self.found = Recording()
        self.line, self.count = "", 0
        self.called = ""  # torch's function, which may be several operations
        self.nodes: dict[int, fx.Node] = {}
        self.alive: list[Tensor] = []  # a tensor's id stays its own while it lives
        self.stand_ins: dict[int, Tensor] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # torch's way to do so imports the compiler, a second

    def know(self, tensor: Tensor, node: fx.Node) -> fx.Node:
        """Let a tensor stand for a node's value."""
        self.nodes[id(tensor)] = node
        self.alive.append(tensor)
        node.meta.update(shape=tuple(tensor.shape), dtype=tensor.dtype, line=self.line)
        return node

    def input(self, name: str, tensor: Tensor) -> fx.Node:
        return self.know(tensor, self.found.graph.placeholder(name))

    def hold(self, path: str, tensor: Tensor, stand_in: Tensor) -> None:
        """An input for a tensor of the module, in whose place calls are given another."""
        node = self.found.held[path] = self.input("held_" + path.replace(".", "_"), stand_in)
        self.nodes[id(tensor)] = node
        self.alive.append(tensor)
        self.stand_ins[id(tensor)] = stand_in

    def stand_in(self, tensor: Tensor) -> Tensor:
        """What calls are given in a tensor's place."""
        return self.stand_ins.get(id(tensor), tensor)

    def node_of(self, tensor: Tensor) -> fx.Node:
        if id(tensor) not in self.nodes:
            name = f"constant_{len(self.found.constants)}"
            self.found.constants[name] = tensor
            self.know(tensor, self.found.graph.create_node("get_attr", name))
        return self.nodes[id(tensor)]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.count += 1
        if self.count > MOST_RECORDED:
            raise Undescribable(f"it has more than {MOST_RECORDED:,} operations, too many to be read")
        if func in (aten._local_scalar_dense.default, aten.equal.default, aten.is_nonzero.default):
            raise Undescribable(f"the step asks for the value of a tensor ({self.line})")
        if func._schema.is_mutable:
            name = str(func).removeprefix("aten.").partition(".")[0]
            name = name if self.called in ("", name) else f"{self.called}: {name}"
            raise Undescribable(f"{name} writes into a tensor that the step does not own ({self.line})")
        result = func(*args, **kwargs)
        graph = self.found.graph
        node = graph.call_function(func, *tree_map_only(Tensor, self.node_of, (tuple(args), kwargs)))
        node.meta["line"] = self.line
        if isinstance(result, Tensor):
            self.know(result, self._as_autograd_would(node, result))
        else:
            node.meta["shape"] = None
            for i, part in enumerate(result):
                if isinstance(part, Tensor):
                    item = graph.call_function(operator.getitem, (node, i))
                    item.meta["line"] = self.line
                    self.know(part, self._as_autograd_would(item, part))
        return result

    def _as_autograd_would(self, node: fx.Node, result: Tensor) -> fx.Node:
        """Under torch.no_grad() a result has no gradient."""
        if torch.is_grad_enabled() or not result.is_floating_point():
            return node
        node.meta.update(shape=tuple(result.shape), dtype=result.dtype)
        return self.found.graph.call_function(aten.detach.default, (node,))


def record(
    step: Callable[..., Any],
    module: nn.Module,
    held: Mapping[str, Tensor],
    x: tuple[tuple[int, ...], torch.dtype],
    states: Sequence[int],
    dtype: torch.dtype,
) -> tuple[Recording, Recording]:
    """Write down `step(x, *states)`, a method of `module`, for two batch sizes.

    `held` are what stands for the module's tensors, by path; `x` is the shape of one row and its type. Raises
    `Undescribable`; errors of the step itself come as that too, and again, as they are, when the step is called for
    what it computes.
    """
    if (name := iterator_of(module)) is not None:
        raise Undescribable(f"{name} is an iterator, which a step can only move on")
    first, second = (_run(step, module, held, x, states, dtype, batch) for batch in SIZES)
    if first.change is not None and second.change is not None:  # once may have been another thread
        raise ChangesItself(first.change)
    return first, second


def in_fresh_thread(work: Callable[[], Any]) -> Any:
    """Run `work` where none of the transformations (vmap, autocast, modes, no_grad) around this call are at work."""
    outcome: list[Any] = []

    def run() -> None:
        try:
            outcome.append((work(), None))
        except BaseException as error:  # noqa: BLE001  (raised again below, in the caller's thread)
            outcome.append((None, error))

    thread = threading.Thread(target=run, name="deeprnn-recording")
    thread.start()
    thread.join()
    result, error = outcome[0]
    if error is not None:
        raise error
    return result


def _run(
    step: Callable[..., Any],
    module: nn.Module,
    held: Mapping[str, Tensor],
    x: tuple[tuple[int, ...], torch.dtype],
    states: Sequence[int],
    dtype: torch.dtype,
    batch: int,
) -> Recording:
    recorder, generator = _Recorder(), torch.Generator().manual_seed(0)
    found = recorder.found
    found.rows = found.graph.placeholder("rows")
    for path, tensor in held.items():
        recorder.hold(path, _held_by(module, path), tensor)
    entering = torch.zeros((batch, *x[0]), dtype=x[1])
    found.x = recorder.input("x", entering)
    first = [torch.rand(batch, n, generator=generator).to(dtype) for n in states]
    found.states = [recorder.input(f"state_{k}", h) for k, h in enumerate(first)]

    def watched(x: Tensor, *h: Tensor) -> Any:
        with _Watch(recorder), draws.recorded():
            return step(x, *h)

    functional = torch.func.functionalize(watched, remove="mutations")
    with undone(module) as change, torch.random.fork_rng([]), recorder:
        try:
            with heard(_calls):
                result = functional(entering, *first)
        except Undescribable:
            raise
        except Exception as error:
            raise Undescribable(_reason(error, recorder.line)) from error
        finally:
            found.change = change()
    result = result if isinstance(result, (tuple, list)) else (result,)
    shapes = [tuple(h.shape) if isinstance(h, Tensor) else type(h).__name__ for h in result]
    if shapes != [(batch, n) for n in states]:  # the plain loop says it in its own words, as an error
        raise Undescribable(f"the step returns {shapes} in place of states of {list(states)}")
    found.new_states = [recorder.node_of(h) for h in result]
    found.graph.output(tuple(found.new_states))
    return found


def _calls(name: str, frame: Any) -> Undescribable:
    place = f"{os.path.basename(frame.f_code.co_filename)}, line {frame.f_lineno}"
    return Undescribable(f"the step calls {name}, which is for every step to do ({place})")


def _reason(error: Exception, line: str) -> str:
    message = str(error).strip().partition("\n")[0]
    if "custom_function_call" in message or "autograd.Function" in message:
        return f"an autograd.Function has a derivative of its own ({line})"
    return f"{type(error).__name__}: {message} ({line})"


def _held_by(module: nn.Module, path: str) -> Tensor:
    """The tensor at a path, which a parametrization or a property would compute."""
    owner, _, name = path.rpartition(".")
    part = module.get_submodule(owner)
    return next(home[name] for home in (part._parameters, part._buffers, part.__dict__) if name in home)  # type: ignore[return-value]
