"""Recurrent: a layer made of cells, the user's own or shipped ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from deeprnn.cells.cell import Cell, first_tensor
from deeprnn.cells.highway import RHN as RHNCell
from deeprnn.errors import UserError
from deeprnn.model.cell_loop import call_cell, unroll_cell
from deeprnn.model.direct_call import call_cell_directly
from deeprnn.model.explain import explain
from deeprnn.model.sequence_layer import SequenceLayer, Unrolled

Cells = Cell | Sequence[Cell] | Callable[[int], Cell]


class Recurrent(SequenceLayer):
    """Cells over sequences, with the conventions of `torch.nn.RNN`.

    `cell` is a `deeprnn.Cell`; for more levels or both directions others are built with the same arguments. It may also
    be a list of cells, one for each level and direction in `nn.RNN`'s order, or a function from an input size to a cell
    (then `input_size` is needed).
    """

    takes_symbols = True

    def __init__(
        self,
        cell: Cells,
        num_layers: int = 1,
        batch_first: bool = False,
        bidirectional: bool = False,
        dropout: float = 0.0,
        backend: str = "auto",
        *,
        input_size: int | None = None,
    ) -> None:
        super().__init__()
        if isinstance(cell, (list, tuple)):
            num_layers = _levels(cell, num_layers, 2 if bidirectional is True else 1)
        self.set_up(num_layers, batch_first, dropout, bidirectional, backend)
        self.cells: Sequence[Cell] = nn.ModuleList(self._make(cell, input_size))  # type: ignore[assignment]
        sizes = [c.sizes() for c in self.cells]
        self.input_size, self.state_sizes = sizes[0].input, sizes[0].states
        self.output_size = sizes[0].output * self.num_directions
        self.state_names = self.cells[0].state_names()
        for k, (own, made) in enumerate(zip(sizes, self.cells, strict=True)):
            if own.states != self.state_sizes:
                raise UserError(
                    f"cell {k} has states of {own.states}, the first {self.state_sizes}: cells of one layer have "
                    "states of the same sizes; put layers on top of each other instead"
                )
            wanted = self.input_size if k < self.num_directions else self.output_size
            if own.input != wanted:
                raise UserError(
                    f"cell {k}, a {type(made).__name__}, takes {own.input} inputs, but gets {wanted}"
                )

    def _make(self, cell: Cells, input_size: int | None) -> list[Cell]:
        """A cell for every level and direction."""
        if isinstance(cell, (list, tuple)):
            return [_a_cell(c) for c in cell]
        if isinstance(cell, Cell):
            first, build = [cell], cell.rebuilt
        elif callable(cell):
            if input_size is None:
                raise UserError("a function that builds cells needs input_size=..., the width of the input")
            first, build = [_a_cell(cell(input_size))], cell
        else:
            raise UserError(
                f"cell must be a deeprnn.Cell, a list of them or a function, got {type(cell).__name__}"
            )
        width = first[0].sizes().input
        inner = first[0].sizes().output * self.num_directions
        below = [width] * self.num_directions + [inner] * self.num_directions * (self.num_layers - 1)
        return first + [_a_cell(build(n)) for n in below[1:]]

    def forward(
        self,
        input: Tensor | PackedSequence,
        state: Any = None,
        reset: Tensor | None = None,
        lengths: Any = None,
        return_all_states: bool = False,
    ) -> Any:
        """(output, state); with `return_all_states` also every sequence inside, as a list of lists.

        input is (T, B, I), (B, T, I) with batch_first, (T, I) unbatched, a PackedSequence, or integer symbols without
        the last dimension. A state is (levels x directions, B, n); several are a tuple. `reset` marks steps before
        which a new sequence begins, `lengths` says where padded sequences end: outputs behind are zero. The third
        result has, for every level and direction, all states and then all other outputs of the cell's stages.
        """
        if reset is None and lengths is None and return_all_states is False:  # torch.fx may give stand-ins
            done = self.one_step(input, state)
            if done is None:
                done = self._call_directly(input, state)
            if done is not None:
                return done
        return self.results(input, state, reset, lengths, return_all_states)

    def _call_directly(self, input: Any, state: Any) -> tuple[Tensor, Any] | None:
        """Output and last states by the fast path, None where there is none for this call."""
        if torch.compiler.is_compiling() or type(self) not in (Recurrent, RHN):
            return None
        cell, *others = self.cells
        if others or cell.output is not None:
            return None
        states = state if state is None or isinstance(state, (tuple, list)) else [state]
        results = call_cell_directly(cell, input, states, self.batch_first, self.backend)
        if results is None:
            return None
        output, last = results
        return output, self._as_state(last)

    def step(self, x: Tensor, state: Any = None) -> tuple[Tensor, Any]:
        """One step, for streaming: x (B, I) or symbols (B,), the state as `forward` takes and gives it."""
        return self.run_step(x, state)

    def unroll_direction(
        self, index: int, x: Tensor, states: Sequence[Tensor], reset: Tensor | None
    ) -> Unrolled:
        """One cell over a sequence."""
        cell = self.cells[index]
        unrolled = unroll_cell(cell, x, states, reset, backend=self.backend)
        output = unrolled.states[0]
        if cell.output is not None:
            rows = [h.reshape(-1, h.shape[-1]) for h in unrolled.states]
            output = cell.output(*rows)
            output = output.reshape(*x.shape[:2], output.shape[-1])
        return Unrolled(output, unrolled.states, [*unrolled.states, *unrolled.others])

    def step_direction(self, index: int, x: Tensor, states: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """One call of a cell."""
        cell = self.cells[index]
        new = call_cell(cell, x, states)
        return new[0] if cell.output is None else cell.output(*new), new

    def initial_states(self, x: Tensor) -> list[Tensor]:
        """The cells' own first states."""
        each = [cell.initial_state(x.shape[1]) for cell in self.cells]
        return [torch.stack(h).to(x.device) for h in zip(*each, strict=True)]

    def first_weight(self) -> Tensor | None:
        """The first parameter, or buffer, of numbers; a replica of `nn.DataParallel` has none in its list."""
        return first_tensor(self)

    def explain(self) -> str:
        """What is computed before the loop, what in every step, what backward saves, and by which backend.

        Where a cell runs by the plain loop, the operation that prevents a description, and its line.
        """
        return explain(self, self.cells)


class RHN(Recurrent):
    """A recurrent highway network (`cells.highway.RHN`): `depth` gated layers between one state and the next.

    `recurrent_dropout` and `zoneout` are probabilities of the cell, in training.
    """

    takes_symbols = False

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        depth: int = 5,
        num_layers: int = 1,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        *,
        recurrent_dropout: float = 0.0,
        zoneout: float = 0.0,
        device: Any = None,
        dtype: torch.dtype | None = None,
        backend: str = "auto",
    ) -> None:
        options = {
            "recurrent_dropout": recurrent_dropout,
            "zoneout": zoneout,
            "device": device,
            "dtype": dtype,
        }
        cell = RHNCell(input_size, hidden_size, depth, **options)
        super().__init__(cell, num_layers, batch_first, bidirectional, dropout, backend)
        self.hidden_size, self.depth = hidden_size, depth


def _levels(cells: Sequence[Any], num_layers: int, directions: int) -> int:
    """How many levels a list of cells makes."""
    count, rest = divmod(len(cells), directions)
    if rest or not count or num_layers not in (1, count):
        raise UserError(
            f"{len(cells)} cells do not make {num_layers} level(s) of {directions} direction(s): give one for each"
        )
    return count


def _a_cell(cell: Any) -> Cell:
    if not isinstance(cell, Cell):
        raise UserError(f"a deeprnn.Cell is expected, got {type(cell).__name__}")
    return cell
