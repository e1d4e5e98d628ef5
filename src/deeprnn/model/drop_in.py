"""Layers that take the place of `torch.nn.GRU` and `torch.nn.LSTM`: their arguments, names, results and errors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, TypeVar, Unpack, overload

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from deeprnn.backends.direct import eligible_for_direct_call
from deeprnn.backends.unrolling import without_autocast
from deeprnn.cells.cell import Cell
from deeprnn.cells.fingerprint import hook_of
from deeprnn.cells.gru import GRU as GRUCell
from deeprnn.cells.lstm import LSTM as LSTMCell
from deeprnn.model.arguments import LayerSettings, as_sizes
from deeprnn.model.cell_loop import call_cell, unroll_cell
from deeprnn.model.direct_call import WIRED, call_directly, wired_cell
from deeprnn.model.explain import explain
from deeprnn.model.recurrent_base import RecurrentBase
from deeprnn.model.sequence_layer import Unrolled

S = TypeVar("S")
"""a layer's state: a tensor, or a tuple of them"""
TORCH_CELLS: dict[str, Callable[..., Any]] = {"GRU": torch.gru_cell, "LSTM": torch.lstm_cell}
"""one step of the layers that torch has too"""


class DropIn(RecurrentBase, Generic[S]):
    """A drop-in layer of cells.

    Each level and direction has a cell without numbers of its own, which says how parameters named as in torch.nn,
    such as `weight_ih_l0_reverse`, are used.
    """

    defaults: ClassVar = {
        "num_layers": 1,
        "bias": True,
        "batch_first": False,
        "dropout": 0.0,
        "bidirectional": False,
        "proj_size": 0,
        "intermediate_sizes": (),
        "backend": "auto",
    }

    def __init__(
        self,
        mode: str,
        cell: type[Cell],
        input_size: int,
        hidden_size: int,
        proj_size: int,
        intermediate_sizes: int | Sequence[int],
        device: Any,
        dtype: torch.dtype | None,
        **settings: Unpack[LayerSettings],
    ) -> None:
        super().__init__(mode, input_size, hidden_size, proj_size, **settings)
        self.intermediate_sizes = as_sizes(intermediate_sizes)
        of_cell: dict[str, Any] = {"bias": self.bias, "intermediate_sizes": self.intermediate_sizes}
        if proj_size:
            of_cell["proj_size"] = proj_size
        width = (proj_size or hidden_size) * self.num_directions
        widths = [input_size, *[width] * (self.num_layers - 1)]
        self._cells: tuple[Cell, ...] = tuple(
            cell(n, hidden_size, **of_cell, device="meta") for n in widths for _ in range(self.num_directions)
        )
        cell_sizes = self._cells[0].sizes()
        self.state_sizes, self.output_size = cell_sizes.states, cell_sizes.output * self.num_directions
        self.state_names = ("hx", "cx")[: len(self.state_sizes)]
        self._names: tuple[dict[str, str], ...] = tuple(
            {path: self._name_of(path, index) for path, _ in template.named_parameters()}
            for index, template in enumerate(self._cells)
        )
        for names, template in zip(self._names, self._cells, strict=True):
            shapes = {name: template.get_parameter(path).shape for path, name in names.items()}
            self.add_parameters(shapes, device, dtype)
        is_torchs = not self.intermediate_sizes and not proj_size
        self.torch_cell = TORCH_CELLS[mode] if is_torchs else None
        self.reset_parameters()

    def _name_of(self, path: str, index: int) -> str:
        """`weight_zh_d2` of the second direction of level 0 is `weight_zh_l0_reverse_d2`."""
        level, backward = divmod(index, self.num_directions)
        base, deep, number = path.partition("_d")
        return f"{base}_l{level}{'_reverse' * backward}{deep}{number}"

    def _tensors(self, index: int) -> dict[str, Tensor]:
        # At once, where `nn.Module` searches; what hooks compute is found there.
        parameters = {} if torch.compiler.is_compiling() else self.__dict__["_parameters"]
        names = self._names[index].items()
        return {path: parameters[name] if name in parameters else getattr(self, name) for path, name in names}

    def unroll_direction(
        self, index: int, x: Tensor, states: Sequence[Tensor], reset: Tensor | None
    ) -> Unrolled:
        """One cell over a sequence, with this layer's parameters."""
        unrolled = unroll_cell(
            self._cells[index], x, states, reset, self._tensors(index), backend=self.backend
        )
        return Unrolled(unrolled.states[0], unrolled.states, [*unrolled.states, *unrolled.others])

    def step_direction(self, index: int, x: Tensor, states: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """One call of a cell, with this layer's parameters."""
        if self.torch_cell is not None and x.device.type == "cpu" and x.is_floating_point():
            with without_autocast("cpu"):  # the state keeps its type
                hx = states[0] if len(states) == 1 else list(states)
                x = x if x.dtype == states[0].dtype else x.to(states[0].dtype)
                result = self.torch_cell(x, hx, *self._tensors(index).values())
                return (result, [result]) if isinstance(result, Tensor) else (result[0], list(result))
        new = call_cell(self._cells[index], x, states, self._tensors(index))
        return new[0], new

    @overload
    def forward(
        self,
        input: Tensor,
        hx: S | None = None,
        reset: Tensor | None = None,
        lengths: Any = None,
        return_all_states: Literal[False] = False,
    ) -> tuple[Tensor, S]: ...
    @overload
    def forward(
        self,
        input: PackedSequence,
        hx: S | None = None,
        reset: None = None,
        lengths: None = None,
        return_all_states: Literal[False] = False,
    ) -> tuple[PackedSequence, S]: ...
    @overload
    def forward(
        self,
        input: Tensor,
        hx: S | None = None,
        reset: Tensor | None = None,
        lengths: Any = None,
        *,
        return_all_states: Literal[True],
    ) -> tuple[Tensor, S, list[list[Tensor]]]: ...
    @overload
    def forward(
        self,
        input: PackedSequence,
        hx: S | None = None,
        reset: None = None,
        lengths: None = None,
        *,
        return_all_states: Literal[True],
    ) -> tuple[PackedSequence, S, list[list[PackedSequence]]]: ...

    def forward(self, input, hx=None, reset=None, lengths=None, return_all_states=False):  # type: ignore[override]
        """(output, h_n) as torch.nn's, with `return_all_states` also every sequence inside, as a list of lists.

        `reset` marks steps before which a new sequence begins, `lengths` says where padded sequences end.
        """
        if reset is None and lengths is None and return_all_states is False:  # torch.fx may give stand-ins
            done = self.one_step(input, hx)
            if done is None:
                done = self._call_directly(input, hx)
            if done is not None:
                return done
        return self.results(input, hx, reset, lengths, return_all_states)

    if TYPE_CHECKING:  # for `nn.Module` a call takes and gives anything; here it is as `forward`

        @property
        def __call__(self):  # type: ignore[override]
            return self.forward

    def _call_directly(self, input: Any, hx: Any) -> tuple[Tensor, Any] | None:
        """Output and last states by the fast path, None where there is none for this call."""
        if (
            torch.compiler.is_compiling()
            or type(self) not in (GRU, LSTM)
            or not eligible_for_direct_call(input)
        ):
            return None
        if len(self._cells) != 1 or hook_of(cell := self._cells[0]) is not None:
            return None
        wired = self.__dict__.get(WIRED)
        if wired is None or wired.step is not type(cell).step:
            names = list(self._names[0].values())
            if not all(name in self._parameters for name in names):
                return None
            wired = self.__dict__[WIRED] = wired_cell(cell, self._tensors(0), names, input)
        states = hx if hx is None or isinstance(hx, (tuple, list)) else [hx]
        results = call_directly(self, wired, input, states, self.batch_first, self.backend)
        if results is None:
            return None
        output, last = results
        return output, self._as_state(last)

    def step(self, x: Tensor, hx: Any = None) -> tuple[Tensor, Any]:
        """One step, for streaming: x (B, I), the state as `forward` takes and gives it."""
        return self.run_step(x, hx)

    def explain(self) -> str:
        """What is computed before the loop, what in every step, what backward saves, and by which backend."""
        return explain(self, self._cells, [self._tensors(i) for i in range(len(self._cells))])


class GRU(DropIn[Tensor]):
    """`torch.nn.GRU`; with `intermediate_sizes` a deep transition computes the candidate (`cells.gru.GRU`)."""

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        proj_size: int = 0,
        intermediate_sizes: int | Sequence[int] = (),
        backend: str = "auto",
    ) -> None:
        if proj_size:
            raise ValueError("proj_size argument is only supported for LSTM, not RNN or GRU")
        super().__init__("GRU", GRUCell, input_size, hidden_size, 0, intermediate_sizes, device, dtype,
                         num_layers=num_layers, bias=bias, batch_first=batch_first, dropout=dropout,
                         bidirectional=bidirectional, backend=backend)  # fmt: skip


class LSTM(DropIn[tuple[Tensor, Tensor]]):
    """`torch.nn.LSTM`; with `intermediate_sizes` a deep transition computes the candidate (`cells.lstm.LSTM`)."""

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        proj_size: int = 0,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        intermediate_sizes: int | Sequence[int] = (),
        backend: str = "auto",
    ) -> None:
        if proj_size < 0:
            raise ValueError("proj_size should be a positive integer or zero to disable projections")
        if proj_size and proj_size >= hidden_size:
            raise ValueError("proj_size has to be smaller than hidden_size")
        super().__init__("LSTM", LSTMCell, input_size, hidden_size, proj_size, intermediate_sizes, device, dtype,
                         num_layers=num_layers, bias=bias, batch_first=batch_first, dropout=dropout,
                         bidirectional=bidirectional, backend=backend)  # fmt: skip
