"""What recurrent layers share: the layouts, checks and messages of `torch.nn.RNN`, levels and directions.

A layer runs one or more levels, each in one or two directions. A subclass says how one direction of one level is
unrolled (`unroll_direction`) and how it makes a single step (`step_direction`); everything else is here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from deeprnn.backends.single_step import as_sequence, prefers_torch_ops
from deeprnn.backends.transformations import EXACT_TYPES
from deeprnn.backends.unrolling import autocasts
from deeprnn.model.arguments import check_dtype, check_settings
from deeprnn.model.overrides import refresh_weights
from deeprnn.model.tracing import Traceable, is_symbolic, is_tensor, leaf


class Unrolled(NamedTuple):
    """One direction of one level over a sequence, (T, B, n) each."""

    output: Tensor
    states: list[Tensor]
    sequences: list[Tensor]
    """what `return_all_states` gives of it: the states too, in the layer's own order"""


class Result(NamedTuple):
    """Output, last states (one tensor a state: levels x directions, B, n), and all sequences where they are wanted."""

    output: Tensor
    states: list[Tensor]
    sequences: list[list[Tensor]]


class SequenceLayer(Traceable):
    """Levels and directions of a recurrence with the conventions of `nn.RNN`."""

    input_size: int
    output_size: int
    state_sizes: tuple[int, ...]
    state_names: tuple[str, ...]
    takes_symbols = False
    """whether integers are symbols, without a feature dimension"""
    defaults: Mapping[str, Any] = {
        "num_layers": 1,
        "batch_first": False,
        "dropout": 0.0,
        "bidirectional": False,
        "backend": "auto",
    }
    """settings that are shown where they differ"""

    def set_up(
        self,
        num_layers: int,
        batch_first: bool,
        dropout: float,
        bidirectional: bool,
        backend: str,
        bias: bool = True,
        sizes: tuple[int, int] = (1, 1),
    ) -> None:
        """Check and keep the settings that all layers have; `sizes`, of input and state, where no cell checks them."""
        check_settings(*sizes, num_layers, bias, batch_first, dropout, bidirectional, backend)
        self.num_layers, self.batch_first, self.bidirectional = num_layers, batch_first, bidirectional
        self.dropout, self.backend = float(dropout), backend

    @property
    def num_directions(self) -> int:
        """2 where the sequence is also read backwards."""
        return 2 if self.bidirectional else 1

    def unroll_direction(
        self, index: int, x: Tensor, states: Sequence[Tensor], reset: Tensor | None
    ) -> Unrolled:
        """Direction `index` (level times directions) over x (T, B, ·); it is already reversed for the second one."""
        raise NotImplementedError

    def step_direction(self, index: int, x: Tensor, states: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """One step of a level: its output (B, ·) and new states (B, n)."""
        raise NotImplementedError

    def steps_alone(self, x: Tensor, states: Sequence[Tensor]) -> bool:
        """Whether `step_direction` serves a call of one step better, x (1, B, ·): not where levels are dropped out."""
        drops = self.dropout and self.training and self.num_layers > 1
        return not (drops or self.bidirectional) and prefers_torch_ops(self.backend, x, *states)

    def first_weight(self) -> Tensor | None:
        """A parameter or buffer, for the type and the device of all of them."""
        raise NotImplementedError

    def weights_dtype(self) -> torch.dtype:
        """The type of the parameters, and of the states."""
        weight = self.first_weight()
        return torch.get_default_dtype() if weight is None else weight.dtype

    # ---- a whole sequence

    def one_step(self, input: Any, state: Any) -> tuple[Tensor, Any] | None:
        """(output, state) of a call of one step that `steps_alone`; None where the call is to go the general path."""
        if type(input) not in EXACT_TYPES or input.dim() != 3 or input.shape[-1] != self.input_size:
            return None
        x = input.transpose(0, 1) if self.batch_first else input
        states = state if isinstance(state, (tuple, list)) else () if state is None else (state,)
        if (
            x.shape[0] != 1
            or not all(type(h) in EXACT_TYPES for h in states)
            or not self.steps_alone(x, states)
        ):
            return None
        self._check_type(x)
        y, new = self._step_levels(x[0], self._first_states(state, x, True))
        output = as_sequence(y)
        return (output.transpose(0, 1) if self.batch_first else output), self._as_state(new)

    def results(
        self, input: Tensor | PackedSequence, state: Any, reset: Tensor | None, lengths: Any, keep: bool
    ) -> Any:
        """What `forward` returns: (output, state), with `keep` also all sequences; one node for torch.fx."""
        if is_symbolic(input):
            return leaf(self, input, state, reset, lengths, keep)
        output, last, sequences = self.run(input, state, reset, lengths, keep)
        return (output, last, sequences) if keep else (output, last)

    def run(
        self,
        input: Tensor | PackedSequence,
        state: Any,
        reset: Tensor | None = None,
        lengths: Any = None,
        keep: bool = False,
    ) -> tuple[Any, Any, list[list[Any]]]:
        """Output, last states and, with `keep`, all sequences; everything laid out as the input is."""
        if isinstance(input, PackedSequence):
            return self._run_packed(input, state, reset, lengths, keep)
        self._check_input(input)
        batched = input.dim() == self._dims(input)
        x = input if batched else input.unsqueeze(1)
        marks = reset if batched or reset is None else reset.unsqueeze(-1)
        if self.batch_first and batched:
            x, marks = x.transpose(0, 1), None if marks is None else marks.transpose(0, 1)
        self._check_marks(marks, x)
        ends = self._check_lengths(lengths, x, batched)
        behind = None
        if ends is not None:  # nothing of what lies there may reach a result or a gradient, NaN included
            behind = torch.arange(x.shape[0], device=x.device).unsqueeze(1) >= ends  # (T, B)
            x = x.masked_fill(behind.view(*behind.shape, *[1] * (x.dim() - 2)), 0)
        first = self._first_states(state, x, batched)
        if marks is None and ends is None and not keep and self.steps_alone(x, first):
            y, new = self._step_levels(x[0], first)
            result = Result(as_sequence(y), new, [])
        else:
            result = self._run_levels(x, first, marks, ends, keep)

        def arrange(y: Tensor) -> Tensor:
            if behind is not None:
                y = y.masked_fill(behind.unsqueeze(-1), 0)
            return y.squeeze(1) if not batched else y.transpose(0, 1) if self.batch_first else y

        states = [h if batched else h.squeeze(1) for h in result.states]
        return (
            arrange(result.output),
            self._as_state(states),
            [[arrange(y) for y in s] for s in result.sequences],
        )

    def _run_packed(
        self, packed: PackedSequence, state: Any, reset: Tensor | None, lengths: Any, keep: bool
    ) -> tuple[Any, Any, list[list[Any]]]:
        if reset is not None or lengths is not None:
            raise ValueError(
                f"{self._name}: a PackedSequence has its own lengths and takes no reset or lengths"
            )
        data, batch_sizes, order, back = packed
        if data.dim() != (dims := self._dims(data) - 1):
            raise RuntimeError(f"input must have {dims} dimensions, got {data.dim()}")
        x, ends = pad_packed_sequence(PackedSequence(data, batch_sizes))
        self._check_input(x)
        first = self._first_states(state, x, True)
        if order is not None:
            first = [h.index_select(1, order) for h in first]
        result = self._run_levels(x, first, None, ends.to(x.device), keep)
        states = result.states if back is None else [h.index_select(1, back) for h in result.states]

        def pack(y: Tensor) -> PackedSequence:
            return PackedSequence(pack_padded_sequence(y, ends).data, batch_sizes, order, back)

        return pack(result.output), self._as_state(states), [[pack(y) for y in s] for s in result.sequences]

    def _run_levels(
        self, x: Tensor, first: Sequence[Tensor], reset: Tensor | None, ends: Tensor | None, keep: bool
    ) -> Result:
        last: list[list[Tensor]] = [[] for _ in first]
        sequences = []
        for level in range(self.num_layers):
            outputs = []
            for direction in range(self.num_directions):
                index = level * self.num_directions + direction
                backward = direction == 1
                seen = reverse(x, ends) if backward else x
                marks = reversed_marks(reset, ends) if backward and reset is not None else reset
                done = self.unroll_direction(index, seen, [h[index] for h in first], marks)
                for ends_of_state, h in zip(last, done.states, strict=True):
                    ends_of_state.append(last_of(h, ends))
                outputs.append(reverse(done.output, ends) if backward else done.output)
                if keep:
                    sequences.append([reverse(y, ends) if backward else y for y in done.sequences])
            x = torch.cat(outputs, -1) if len(outputs) > 1 else outputs[0]
            if self.dropout and level < self.num_layers - 1:
                x = F.dropout(x, self.dropout, self.training)
        states = [torch.cat(h) if len(h) > 1 else h[0].clone() for h in last]
        return Result(x, states, sequences)

    # ---- one step

    def run_step(self, x: Tensor, state: Any) -> tuple[Tensor, Any]:
        """One step of all levels: x (B, ·) or symbols (B,)."""
        if self.bidirectional:
            raise RuntimeError(
                f"{self._name}.step: a bidirectional layer needs the whole sequence: use bidirectional=False"
            )
        symbols = is_tensor(x) and self._are_symbols(x)
        shape = tuple(x.shape) if is_tensor(x) else type(x).__name__
        if not is_tensor(x) or x.dim() != self._dims(x) - 1 or not (symbols or shape[-1] == self.input_size):
            expected = "(B,)" if symbols else f"(B, {self.input_size})"
            raise RuntimeError(f"{self._name}.step: x must be {expected}, got {shape}")
        self._check_type(x)
        refresh_weights(self)
        x, new = self._step_levels(x, self._first_states(state, x.unsqueeze(0), True))
        return x, self._as_state(new)

    def _step_levels(self, x: Tensor, first: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
        new: list[list[Tensor]] = [[] for _ in first]
        for level in range(self.num_layers):
            x, states = self.step_direction(level, x, [h[level] for h in first])
            for levels, h in zip(new, states, strict=True):
                levels.append(h)
        return x, [torch.stack(h) for h in new]

    # ---- states

    def _as_state(self, states: list[Tensor]) -> Any:
        """A tensor where there is one state, else a tuple."""
        return states[0] if len(states) == 1 else tuple(states)

    def initial_states(self, x: Tensor) -> list[Tensor]:
        """The states that stand for none given, (levels x directions, B, n) each; x is (T, B, ·)."""
        rows = self.num_layers * self.num_directions
        like = {"dtype": self.weights_dtype(), "device": x.device}
        return [torch.zeros(rows, x.shape[1], n, **like) for n in self.state_sizes]

    def _first_states(self, state: Any, x: Tensor, batched: bool) -> list[Tensor]:
        """The given states, checked and with a batch dimension, or the initial ones."""
        if state is None:
            return self.initial_states(x)
        several = len(self.state_sizes) > 1
        states = list(state) if several and isinstance(state, (tuple, list)) else [state]
        if len(states) != len(self.state_sizes) or not all(is_tensor(h) for h in states):
            names = ", ".join(self.state_names)
            if several:
                expected, got = f"the state must be a tuple ({names}) of Tensors", _kinds(state)
            else:
                expected, got = f"{names} must be a Tensor", type(state).__name__
            raise TypeError(f"{self._name}: {expected} or None, got {got}")
        kind, dims = ("batched 3-D", 3) if batched else ("unbatched 2-D", 2)
        if any(h.dim() != dims for h in states):
            got = ", ".join(f"{h.dim()}-D" for h in states)
            raise RuntimeError(
                f"For {kind} input, {' and '.join(self.state_names)} should also be {dims}-D but got "
                f"{f'({got}) tensors' if several else f'{got} tensor'}"
            )
        states = [h if batched else h.unsqueeze(1) for h in states]
        dtype = self.weights_dtype()
        for k, (h, n, name) in enumerate(zip(states, self.state_sizes, self.state_names, strict=True)):
            shape = (self.num_layers * self.num_directions, x.shape[1], n)
            if tuple(h.shape) != shape:
                which = f"hidden[{k}]" if several else "hidden"
                raise RuntimeError(f"Expected {which} size {shape}, got {list(h.shape)}")
            if h.device != x.device:
                raise RuntimeError(
                    f"Input and hidden tensors are not at the same device, found input tensor at {x.device} and hidden "
                    f"tensor at {h.device}"
                )
            if h.dtype != dtype and not autocasts(x.device.type):
                raise RuntimeError(
                    f"{self._name}: {name} has dtype {h.dtype} but the parameters have {dtype}: use {name}.to({dtype})"
                )
        return [h.to(dtype) for h in states]

    # ---- checks

    def changed_settings(self) -> list[str]:
        """The settings that are not the defaults, as they are written in a call."""
        values = ((name, getattr(self, name), default) for name, default in self.defaults.items())
        return [f"{name}={value!r}" for name, value, default in values if value != default]

    def extra_repr(self) -> str:
        return ", ".join(self.changed_settings())

    @property
    def _name(self) -> str:
        return type(self).__name__

    def _are_symbols(self, x: Tensor) -> bool:
        other = x.is_floating_point() or x.is_complex() or x.dtype == torch.bool
        return self.takes_symbols and not other

    def _dims(self, x: Tensor) -> int:
        """Dimensions of a batch of sequences: symbols have no feature dimension."""
        return 2 if self._are_symbols(x) else 3

    def _check_input(self, x: Any) -> None:
        if not is_tensor(x):
            raise TypeError(
                f"{self._name}: input must be a Tensor or a PackedSequence, got {type(x).__name__}"
            )
        symbols, dims = self._are_symbols(x), self._dims(x)
        if x.dim() not in (dims - 1, dims):
            what = "integer symbols" if symbols else "input"
            raise ValueError(
                f"{self._name}: Expected {what} to be {dims - 1}D or {dims}D, got {x.dim()}D tensor instead"
            )
        self._check_type(x)
        if not symbols and x.shape[-1] != self.input_size:
            raise RuntimeError(
                f"input.size(-1) must be equal to input_size. Expected {self.input_size}, got {x.shape[-1]}"
            )
        if x.shape[1 if self.batch_first and x.dim() == dims else 0] == 0:
            raise RuntimeError(f"Expected sequence length to be larger than 0 in {self._name}")

    def _check_type(self, x: Tensor) -> None:
        """The input is where the parameters are, and has their type, unless autocast changes both or it is symbols."""
        weight = self.first_weight()
        if weight is not None and x.device != weight.device:
            raise RuntimeError(
                f"Input and parameter tensors are not at the same device, found input tensor at {x.device} and "
                f"parameter tensor at {weight.device}"
            )
        if not self._are_symbols(x):
            check_dtype(self._name, x, torch.get_default_dtype() if weight is None else weight.dtype)

    def _check_marks(self, reset: Tensor | None, x: Tensor) -> None:
        if reset is not None and (reset.dtype != torch.bool or reset.shape != x.shape[:2]):
            raise ValueError(
                f"{self._name}: reset must be bool marks, one for every step and sequence, {tuple(x.shape[:2])} with "
                f"time first, got {reset.dtype} of {tuple(reset.shape)}"
            )

    def _check_lengths(self, lengths: Any, x: Tensor, batched: bool) -> Tensor | None:
        if lengths is None:
            return None
        ends = torch.as_tensor(lengths)
        steps, batch = x.shape[:2]
        if not batched or ends.dim() != 1 or ends.shape[0] != batch or ends.is_floating_point():
            raise ValueError(f"{self._name}: lengths must be {batch} whole numbers, got {lengths!r}")
        if ends.device.type == "cpu" and not bool(((ends >= 1) & (ends <= steps)).all()):
            raise ValueError(f"{self._name}: lengths must be between 1 and {steps}, got {ends.tolist()}")
        return ends.to(x.device)


def _kinds(state: Any) -> str:
    if isinstance(state, (tuple, list)):
        return f"({', '.join(type(h).__name__ for h in state)})"
    return type(state).__name__


def reverse(x: Tensor, ends: Tensor | None) -> Tensor:
    """Each sequence of (T, B, …) backwards within its own length; padding stays where it is."""
    if ends is None:
        return x.flip(0)
    t = torch.arange(x.shape[0], device=x.device).unsqueeze(1)  # (T, 1)
    index = torch.where(t < ends, ends - 1 - t, t)  # (T, B)
    return x.gather(0, index.view(*index.shape, *[1] * (x.dim() - 2)).expand_as(x))


def reversed_marks(reset: Tensor, ends: Tensor | None) -> Tensor:
    """The same borders between sequences, for the direction that meets step t before step t - 1."""
    shifted = torch.cat([reset[1:], torch.zeros_like(reset[:1])])
    return reverse(shifted, ends)


def last_of(h: Tensor, ends: Tensor | None) -> Tensor:
    """The state after each sequence's last step, (1, B, n)."""
    return h[-1:] if ends is None else h[ends - 1, torch.arange(h.shape[1], device=h.device)].unsqueeze(0)
