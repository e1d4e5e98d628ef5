"""Cell: one step of a recurrence, written by the user in ordinary PyTorch."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from deeprnn.errors import UserError

CELLS: WeakValueDictionary[str, Cell] = WeakValueDictionary()
"""cells that are alive, by their handle: a compiler passes words to functions, not modules"""
_numbers = itertools.count()
OWN_START = "reset marks begin with its own initial_state, and described cells begin with zeros"
"""why a cell that can be described runs by the plain loop"""
MOST_TRIED = 30_000
"""calls of a step by which its sizes are found: a second"""
INITIAL_STATE = ", and let initial_state(self, batch) return it as (batch, units)"


class Sizes(NamedTuple):
    """How wide the input, the states and the output of a cell are."""

    input: int
    states: tuple[int, ...]
    output: int


class Cell(nn.Module):
    """One step of a recurrence: subclass it, write `step`, and unroll it with `deeprnn.Recurrent`.

    `step(self, x, *state)` takes the input of one step, (B, input_size) or integer symbols (B,), and one or more
    states, (B, n) each, and returns the new states in the same order: a tensor for one state, else a tuple. The
    output of the layer is the first state, unless the cell has a method `output(self, *state)`, or a module of that
    name, which is called once for all steps, with one row for every step and sequence.

    Sizes are taken from the attributes `input_size` and `state_sizes` (or `hidden_size`, for all states), else from the
    constructor's arguments of these names, else they are found by trying the sizes of the parameters.
    """

    output: Callable[..., Tensor] | None
    _handle: str
    _arguments: dict[str, Any]

    def __new__(cls, *args: Any, **kwargs: Any) -> Cell:
        self = super().__new__(cls)
        self.__dict__["_handle"] = f"cell-{next(_numbers)}"
        CELLS[self._handle] = self
        try:
            bound = inspect.signature(cls.__init__).bind(self, *args, **kwargs)
        except TypeError:  # the constructor itself will say what is wrong
            return self
        bound.apply_defaults()
        self.__dict__["_arguments"] = dict(list(bound.arguments.items())[1:])
        return self

    def __getattr__(self, name: str) -> Any:
        if name == "output":  # no method: a module that was assigned, or none
            return self.__dict__.get("_modules", {}).get(name)
        return super().__getattr__(name)

    def __setattr__(self, name: str, value: Any) -> None:
        if callable(vars(Cell).get(name)) and not callable(value):
            raise UserError(
                f"{type(self).__name__}: self.{name} is a method of deeprnn.Cell, which an attribute would hide: give "
                f"the {type(value).__name__} another name{'' if name != 'initial_state' else INITIAL_STATE}"
            )
        super().__setattr__(name, value)  # type: ignore[arg-type]

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__({k: v for k, v in state.items() if k != "_handle"})  # a copy is another cell

    def step(self, x: Tensor, *state: Tensor) -> Any:
        """The new states from the input of one step and the states before it."""
        raise NotImplementedError(f"{type(self).__name__} has no step(self, x, *state)")

    def forward(self, x: Tensor, *state: Tensor) -> Any:
        """`step`, so that a cell can be called like any module."""
        return self.step(x, *state)

    def initial_state(self, batch: int) -> tuple[Tensor, ...]:
        """The states before the first step: zeros."""
        like = _first_tensor(self)
        return tuple(like.new_zeros(batch, n) for n in self.sizes().states)

    def state_names(self) -> tuple[str, ...]:
        """What `step` calls its states; h, or h1, h2, … where it does not name them."""
        names = _state_parameters(self)
        if names is None:
            count = len(self.sizes().states)
            names = ("h",) if count == 1 else tuple(f"h{k}" for k in range(1, count + 1))
        return names

    def sizes(self) -> Sizes:
        """How wide input, states and output are."""
        if "_sizes" not in self.__dict__:
            own_sizes = self._own_sizes() or _tried(self)
            _check_arguments(self, own_sizes[1])
            output = own_sizes[1][0]
            if self.output is not None:
                with torch.no_grad():
                    like = _first_tensor(self)
                    output = self.output(*(like.new_zeros(2, n) for n in own_sizes[1])).shape[-1]
            self.__dict__["_sizes"] = Sizes(*own_sizes, output)
        return self.__dict__["_sizes"]

    def _own_sizes(self) -> tuple[int, tuple[int, ...]] | None:
        given = {**self.__dict__.get("_arguments", {}), **self.__dict__}
        width, states = given.get("input_size"), given.get("state_sizes")
        if states is None and isinstance(given.get("hidden_size"), int):
            names = _state_parameters(self)
            if names is None:
                raise UserError(
                    f"{type(self).__name__}: step(self, x, *state) does not say how many states there are: name them, "
                    "or set self.state_sizes, such as (400, 400)"
                )
            states = (given["hidden_size"],) * len(names)
        if not isinstance(width, int) or states is None:
            return None
        return width, (states,) if isinstance(states, int) else tuple(states)

    def rebuilt(self, input_size: int) -> Cell:
        """A cell with the same settings, type and device, and parameters of its own, for another input size."""
        arguments = self.__dict__.get("_arguments", {})
        if "input_size" not in arguments:
            raise UserError(
                f"{type(self).__name__} has no argument input_size, so that another cannot be made for the next level: "
                "give a list of cells, or a function from an input size to a cell"
            )
        signature = inspect.signature(type(self).__init__)
        bound = signature.bind_partial(self)
        bound.arguments.update(arguments, input_size=input_size)
        again = type(self)(*bound.args[1:], **bound.kwargs).train(self.training)
        like = _first_tensor(self)
        again.to(like.device, like.dtype)
        if _structure(self) != _structure(again) and input_size == self.sizes().input:
            raise UserError(
                f"this {type(self).__name__} was changed after it was built, so that another cannot be made like it: "
                "give a list of cells, or a function from an input size to a cell"
            )
        return again


def _first_tensor(cell: Cell) -> Tensor:
    """A tensor that has the cell's type and device: a parameter, or a buffer of a cell that learns nothing."""
    tensor = first_tensor(cell)
    return torch.zeros(()) if tensor is None else tensor


def first_tensor(module: nn.Module) -> Tensor | None:
    """The first parameter, or else buffer, of numbers; `parameters()` would take longer than a step."""
    for kind in ("_parameters", "_buffers"):
        waiting = [module]
        while waiting:
            part = waiting.pop()
            for tensor in part.__dict__[kind].values():
                if tensor is not None and tensor.is_floating_point():
                    return tensor
            waiting += [m for m in reversed(part._modules.values()) if m is not None]
    return None


def _state_parameters(cell: Cell) -> tuple[str, ...] | None:
    """The names of step's states, None where it takes any number of them."""
    parameters = list(inspect.signature(cell.step).parameters.values())[1:]
    if any(p.kind is inspect.Parameter.VAR_POSITIONAL for p in parameters):
        return None
    return tuple(p.name for p in parameters if p.default is inspect.Parameter.empty)


def _check_arguments(cell: Cell, states: Sequence[int]) -> None:
    """Refuse a step that takes its states as one argument, or another number of them."""
    signature = inspect.signature(cell.step)
    try:
        signature.bind(None, *states)
    except TypeError as error:
        wanted = ", ".join(["x", *(f"h{k}" for k in range(1, len(states) + 1))])
        raise UserError(
            f"{type(cell).__name__}.step{signature} does not fit its {len(states)} state(s) of "
            f"{', '.join(map(str, states))} units: let it take each by itself, step(self, {wanted}), or change "
            "self.state_sizes"
        ) from error


def _structure(cell: Cell) -> list[Any]:
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in cell.modules()]
    return [*cell.state_dict(), *hooks]


def _tried(cell: Cell) -> tuple[int, tuple[int, ...]]:
    """The only sizes with which a step gives back states like those it takes.

    Of many states, only equal ones are tried: four of them have a quarter of a million combinations.
    """
    names = _state_parameters(cell)
    numbers = {n for p in cell.parameters() for n in p.shape}
    numbers |= {n for n in cell.__dict__.get("_arguments", {}).values() if type(n) is int and n > 0}
    fitting = []
    if names:
        candidates = sorted(numbers)[:12]
        combinations = itertools.product(candidates, repeat=len(names))
        if len(candidates) ** (1 + len(names)) > MOST_TRIED:
            combinations = ((n,) * len(names) for n in candidates)
        for states, width in itertools.product(combinations, candidates):
            if _fits(cell, width, states):
                fitting.append((width, tuple(states)))
    if len(fitting) != 1:
        found = "several fit" if fitting else "none fit"
        raise UserError(
            f"{type(cell).__name__}: its sizes are not known ({found}): set self.input_size and self.state_sizes, "
            "such as 88 and (400,), in its constructor"
        )
    return fitting[0]


def _fits(cell: Cell, width: int, states: Sequence[int]) -> bool:
    like = _first_tensor(cell)
    x, h = like.new_zeros(2, width), [like.new_zeros(2, n) for n in states]
    with torch.no_grad(), torch.random.fork_rng([]):
        try:
            new = cell.step(x, *h)
        except (RuntimeError, ValueError, TypeError, IndexError):
            return False
    new = new if isinstance(new, (tuple, list)) else (new,)
    return [tuple(y.shape) for y in new] == [(2, n) for n in states]


def has_own_start(cell: Cell) -> bool:
    """Whether a sequence begins with something that the cell computes."""
    return type(cell).initial_state is not Cell.initial_state


def handle_of(cell: Cell) -> str:
    """A cell's key in `CELLS`: what a compiler, which takes plain values, is told of it."""
    return cell._handle
