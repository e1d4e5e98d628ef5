"""DeepRNN: the recurrent layer without an output function, a drop-in for `torch.nn.RNN`."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from deeprnn.backends import (
    TransitionSpec,
    autocasts,
    one_bias,
    one_matrix,
    unroll,
    unroll_input,
    unroll_with,
    without_autocast,
)
from deeprnn.model import equations, units
from deeprnn.model.arguments import as_sizes, check_settings, name_unit
from deeprnn.model.specs import PlusSpec, positive
from deeprnn.model.units import Unit

Hidden = Tensor | None


class Level(NamedTuple):
    """One level in one direction, known once the layer is built: its ⊕ and its parameters' names, None where absent."""

    spec: PlusSpec
    suffix: str
    U: Sequence[str | None]
    W: Sequence[str]
    S: Sequence[str | None]
    b: Sequence[str]
    transition: TransitionSpec | None  # None where units pool

    @classmethod
    def of(cls, spec: PlusSpec, suffix: str) -> Level:
        """A level of this ⊕."""
        ends = [suffix if l == 0 else f"{suffix}_d{l + 1}" for l in range(spec.depth)]
        U = [f"weight_ih{end}" if spec.inputs[l] else None for l, end in enumerate(ends)]
        W = [f"weight_{'zh' if l else 'hh'}{end}" for l, end in enumerate(ends)]
        S = [f"weight_sh{end}" if spec.shortcuts[l] else None for l, end in enumerate(ends)]
        b = [f"bias{'' if l else '_ih'}{end}" for l, end in enumerate(ends)] + [f"bias_hh{suffix}"]
        names = tuple(u.name for u in spec.unit_specs)
        pools = any(name in units.POOLED for name in names)
        transition = None if pools else TransitionSpec(spec.sizes, names, spec.shortcuts)
        return cls(spec, suffix, U, W, S, b if spec.bias else [], transition)


class DeepRNN(nn.Module):
    """A recurrent layer whose transition may be deep, with the conventions of `torch.nn.RNN`.

    With no `intermediate_sizes` it is `nn.RNN` (and loads its state_dict). With them, every level
    computes z_l = φ_l(W_l z_{l-1} + U_l x_t + S_l h_{t-1} + b_l), h_t = z_L: DT-RNN, and with
    `shortcut="last"` and `input_to="all"` the paper's DT(S)-RNN. `num_layers` stacks levels (sRNN).

    Parameters of level k are named as in `nn.RNN` (`weight_ih_lk`, `weight_hh_lk`, `bias_ih_lk`,
    `bias_hh_lk`) for the first layer of the transition; deeper layers d = 2, 3, … add
    `weight_zh_lk_dD` (from layer d-1), `weight_ih_lk_dD`, `weight_sh_lk_dD` (shortcut from h_{t-1})
    and `bias_lk_dD`; the backward direction ends in `_reverse`.
    """

    weight_hh_l0: Tensor

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        nonlinearity: str | Unit = "tanh",
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        device=None,
        dtype=None,
        *,
        intermediate_sizes: int | Sequence[int] = (),
        intermediate_nonlinearity: str | Unit | None = None,
        shortcut: str = "none",
        input_to: str = "first",
        backend: str = "auto",
    ) -> None:
        super().__init__()
        check_settings(num_layers, bias, batch_first, dropout, bidirectional, backend)
        for name, size in (("input_size", input_size), ("hidden_size", hidden_size)):
            positive("DeepRNN", **{name: size})
        inner = as_sizes(intermediate_sizes)
        phi = name_unit("nonlinearity", nonlinearity)
        inner_unit = nonlinearity if intermediate_nonlinearity is None else intermediate_nonlinearity
        phi_inner = name_unit("intermediate_nonlinearity", inner_unit)
        self.level_specs = tuple(
            PlusSpec(
                input_size=input_size if k == 0 else hidden_size * (2 if bidirectional else 1),
                hidden_size=hidden_size,
                intermediate_sizes=inner,
                units=(*[phi_inner] * len(inner), phi),
                shortcut=shortcut,
                input_to=input_to,
                bias=bias,
                stacked=k > 0,
            )
            for k in range(num_layers)
        )
        given = {"nonlinearity": (nonlinearity, phi), "intermediate_nonlinearity": (inner_unit, phi_inner)}
        for argument, (unit, named) in given.items():
            if named.startswith("lp") and named in self.level_specs[0].units:
                raise ValueError(
                    f"{argument} {unit!r} has learned parameters: build with deeprnn.Plus or deeprnn.rnn(...)"
                )
        self.input_size, self.hidden_size, self.num_layers = input_size, hidden_size, num_layers
        self.nonlinearity, self.bias, self.batch_first = phi, bias, batch_first
        self.dropout, self.bidirectional, self.proj_size = float(dropout), bidirectional, 0
        self.intermediate_sizes, self.shortcut, self.input_to = inner, shortcut, input_to
        self.backend = backend
        self._directions = tuple(  # of each level
            tuple(Level.of(spec, suffix) for suffix in self._suffixes(k))
            for k, spec in enumerate(self.level_specs)
        )
        for level in (level for directions in self._directions for level in directions):
            self._add_level(level.spec, level.suffix, {"device": device, "dtype": dtype})
        self.reset_parameters()

    def _suffixes(self, level: int) -> list[str]:
        return [f"_l{level}", f"_l{level}_reverse"][: 2 if self.bidirectional else 1]

    def _add_level(self, spec: PlusSpec, suffix: str, kw: dict) -> None:
        below = spec.hidden_size
        for l, (size, width) in enumerate(zip(spec.sizes, spec.widths, strict=True)):
            deep = "" if l == 0 else f"_d{l + 1}"
            shapes: dict[str, tuple[int, ...]] = {}
            if spec.inputs[l]:
                shapes[f"weight_ih{suffix}{deep}"] = (width, spec.input_size)
            shapes[f"weight_{'zh' if l else 'hh'}{suffix}{deep}"] = (width, below)
            if spec.shortcuts[l]:
                shapes[f"weight_sh{suffix}{deep}"] = (width, spec.hidden_size)
            if spec.bias and l == 0:
                shapes[f"bias_ih{suffix}"] = shapes[f"bias_hh{suffix}"] = (width,)
            elif spec.bias:
                shapes[f"bias{suffix}{deep}"] = (width,)
            for name, shape in shapes.items():
                self.register_parameter(name, nn.Parameter(torch.empty(shape, **kw)))
            below = size

    def reset_parameters(self) -> None:
        """Fill with U(-1/√H, 1/√H), as `nn.RNN` does."""
        bound = 1.0 / math.sqrt(self.hidden_size)
        for weight in self.parameters():
            nn.init.uniform_(weight, -bound, bound)

    @property
    def all_weights(self) -> list[list[Tensor]]:
        """The parameters of each level and direction, as `nn.RNN` lists them; deeper layers' follow."""
        named = dict(self.named_parameters())
        return [
            [p for name, p in named.items() if re.search(rf"{suffix}(_d\d+)?$", name)]
            for level in range(self.num_layers)
            for suffix in self._suffixes(level)
        ]

    @property
    def mode(self) -> str:
        """`nn.RNN`'s name of the cell, such as RNN_TANH."""
        return f"RNN_{self.nonlinearity.upper()}"

    def flatten_parameters(self) -> None:
        """Nothing to do: parameters are never flattened here. For code written with `nn.RNN` in mind."""

    def _list(self, names: Sequence[str | None]) -> list:
        return [None if name is None else getattr(self, name) for name in names]

    def _level_weights(self, level: Level) -> tuple[list, list, list, list]:
        """U, W, S of a level's layers, None where a layer has none, and b, the last being the first layer's second."""
        return self._list(level.U), self._list(level.W), self._list(level.S), self._list(level.b)

    def _project(self, x: Tensor, spec: PlusSpec, U: list, b: list) -> Tensor:
        if all(u is not None for u in U):
            return F.linear(x, one_matrix(U), one_bias(b, spec.depth))
        parts = []
        each = [b[0] + b[-1], *b[1:-1]] if b else [None] * spec.depth
        for u, bias, width in zip(U, each, spec.widths, strict=True):
            part = F.linear(x, u, bias) if u is not None else x.new_zeros(()) if bias is None else bias
            parts.append(part.expand(*x.shape[:-1], width))
        return torch.cat(parts, -1)

    def _run_level(self, x: Tensor, h0: Tensor, level: Level) -> tuple[Tensor, Tensor]:
        spec, transition = level.spec, level.transition
        U, W, S, b = self._level_weights(level)
        if transition is None:
            A = self._project(x, spec, U, b)
            phis = [units.resolve(u) for u in spec.unit_specs]
            named = None if self.backend == "reference" else [(str(u), None, None) for u in spec.unit_specs]
            return unroll_with(A, h0, W, S, phis, spec.widths, named=named)
        shortcuts = [s for s in S if s is not None]
        if all(u is not None for u in U):
            return unroll_input(x, U, b, h0, W, shortcuts, transition, backend=self.backend)
        A = self._project(x, spec, U, b)
        return unroll(A, h0, W, shortcuts, transition, backend=self.backend)

    def forward(
        self,
        input: Tensor | PackedSequence,
        h0: Hidden = None,
        return_all_states: bool = False,
        *,
        hx: Hidden = None,
    ):
        """(output, h_n); with `return_all_states` also every level's layers, as a list of lists.

        input is (T, B, I), (B, T, I) with batch_first, (T, I) unbatched, or a PackedSequence; h0 and
        h_n are (levels x directions, B, H). The third result has, for every level and direction, the
        sequence of each transition layer, the last being the state; all are laid out as output is.
        `hx` is `nn.RNN`'s name for h0.
        """
        if hx is not None:
            if h0 is not None:
                raise TypeError("DeepRNN: h0 and hx are two names of one argument, give one of them")
            h0 = hx
        if isinstance(input, PackedSequence):
            return self._forward_packed(input, h0, return_all_states)
        dtype = self._dtype()
        self._check_input(input, dtype)
        batched = input.dim() == 3
        x = input if batched else input.unsqueeze(1)
        if self.batch_first and batched:
            x = x.transpose(0, 1)
        h0 = self._initial(h0, x, batched, dtype)
        output, h_n, states = self._levels(x, h0, None, return_all_states)

        def arrange(y: Tensor) -> Tensor:
            return y.squeeze(1) if not batched else y.transpose(0, 1) if self.batch_first else y

        output, h_n = arrange(output), h_n if batched else h_n.squeeze(1)
        if not return_all_states:
            return output, h_n
        return output, h_n, [[arrange(z) for z in level] for level in states]

    def _forward_packed(self, packed: PackedSequence, h0: Hidden, return_all_states: bool):
        data, batch_sizes, order, back = packed
        x, lengths = pad_packed_sequence(PackedSequence(data, batch_sizes))
        dtype = self._dtype()
        self._check_input(x, dtype)
        h0 = self._initial(h0, x, True, dtype)
        if order is not None:
            h0 = h0.index_select(1, order)
        output, h_n, states = self._levels(x, h0, lengths.to(x.device), return_all_states)
        if back is not None:
            h_n = h_n.index_select(1, back)
        out = PackedSequence(pack_padded_sequence(output, lengths).data, batch_sizes, order, back)
        if not return_all_states:
            return out, h_n
        repack = [
            [PackedSequence(pack_padded_sequence(z, lengths).data, batch_sizes, order, back) for z in level]
            for level in states
        ]
        return out, h_n, repack

    def _levels(
        self, x: Tensor, h0: Tensor, lengths: Tensor | None, return_all_states: bool
    ) -> tuple[Tensor, Tensor, list[list[Tensor]]]:
        """Output, last states, and every layer's sequence where that is wanted."""
        states, last, i = [], [], 0
        for k, directions in enumerate(self._directions):
            outs = []
            for level in directions:
                backward = level.suffix.endswith("_reverse")
                seen = reverse(x, lengths) if backward else x
                h, z = self._run_level(seen, h0[i], level)
                last.append(
                    h[-1] if lengths is None else h[lengths - 1, torch.arange(h.shape[1], device=h.device)]
                )
                h = reverse(h, lengths) if backward else h
                if return_all_states:
                    z = reverse(z, lengths) if backward else z
                    sizes = list(level.spec.intermediate_sizes)
                    states.append([*z.split(sizes, -1), h] if sizes else [h])
                outs.append(h)
                i += 1
            x = torch.cat(outs, -1) if len(outs) > 1 else outs[0]
            if self.dropout and k < self.num_layers - 1:
                x = F.dropout(x, self.dropout, self.training)
        return x, torch.stack(last), states

    def step(self, x: Tensor, h: Hidden = None) -> tuple[Tensor, Tensor]:
        """One step of the sequence form: x (B, I), h (levels, B, H) -> (output (B, H), h)."""
        if self.bidirectional:
            raise RuntimeError(
                "step: a bidirectional layer needs the whole sequence; use bidirectional=False"
            )
        if not isinstance(x, Tensor) or x.dim() != 2 or x.shape[-1] != self.input_size:
            got = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
            raise RuntimeError(f"step: x must be (B, {self.input_size}), got {got}")
        dtype = self._dtype()
        self._check_type(x, dtype)
        h = self._initial(h, x.unsqueeze(0), True, dtype)
        new = []
        for k, (level,) in enumerate(self._directions):
            spec = level.spec
            U, W, S, b = self._level_weights(level)
            A = self._project(x, spec, U, b)
            phis = [units.resolve(u) for u in spec.unit_specs]
            St = [None if s is None else s.mT for s in S]
            with without_autocast(A.device.type):  # the state keeps its type, as in a sequence
                parts = A.to(W[0].dtype).split(list(spec.widths), -1)
                x = equations.transition_mlp(parts, h[k], [w.mT for w in W], St, phis)[-1]
            new.append(x)
        return x, torch.stack(new)

    def _dtype(self) -> torch.dtype:
        """The parameters' dtype; a replica of `nn.DataParallel` has them as plain attributes."""
        weight = next(self.parameters(), None)
        return (self.weight_hh_l0 if weight is None else weight).dtype

    def _initial(self, h0: Hidden, x: Tensor, batched: bool, dtype: torch.dtype) -> Tensor:
        """h0 checked and given a batch dimension, zeros where it is None; x is (T, B, I), dtype the parameters'."""
        directions = 2 if self.bidirectional else 1
        want = (self.num_layers * directions, x.shape[1], self.hidden_size)
        if h0 is None:
            return torch.zeros(want, dtype=dtype, device=x.device)
        if not isinstance(h0, Tensor):
            raise TypeError(f"DeepRNN: h0 must be a Tensor or None, got {type(h0).__name__}")
        if h0.dim() != (3 if batched else 2):
            kind = (
                "batched 3-D input, h0 should also be 3-D"
                if batched
                else "unbatched 2-D input, h0 should also be 2-D"
            )
            raise RuntimeError(f"For {kind} but got {h0.dim()}-D tensor")
        h0 = h0 if batched else h0.unsqueeze(1)
        if tuple(h0.shape) != want:
            raise RuntimeError(f"Expected hidden size {want}, got {tuple(h0.shape)}")
        if h0.dtype != dtype and not autocasts(x.device.type):
            raise ValueError(f"h0 has dtype {h0.dtype} but the parameters have {dtype}: use h0.to({dtype})")
        return h0.to(dtype)

    def _check_input(self, x: Tensor, dtype: torch.dtype) -> None:
        if not isinstance(x, Tensor):
            raise TypeError(f"DeepRNN: input must be a Tensor or a PackedSequence, got {type(x).__name__}")
        if x.dim() not in (2, 3):
            raise ValueError(f"DeepRNN: Expected input to be 2D or 3D, got {x.dim()}D instead")
        if x.shape[-1] != self.input_size:
            raise RuntimeError(
                f"input.size(-1) must be equal to input_size. Expected {self.input_size}, got {x.shape[-1]}"
            )
        if x.shape[1 if self.batch_first and x.dim() == 3 else 0] == 0:
            raise RuntimeError("Expected sequence length to be larger than 0 in DeepRNN")
        self._check_type(x, dtype)

    def _check_type(self, x: Tensor, dtype: torch.dtype) -> None:
        """The parameters' dtype is the input's too, unless autocast changes both."""
        if x.dtype != dtype and not autocasts(x.device.type):
            other = f" or layer.to({x.dtype})" if x.is_floating_point() else ""
            raise ValueError(
                f"input has dtype {x.dtype} but the parameters have {dtype}: use input.to({dtype}){other}"
            )

    def extra_repr(self) -> str:
        text = f"{self.input_size}, {self.hidden_size}"
        if self.intermediate_sizes:
            text += f", intermediate_sizes={self.intermediate_sizes}"
        defaults = {"num_layers": 1, "nonlinearity": "tanh", "bias": True, "batch_first": False, "dropout": 0.0,
                    "bidirectional": False, "shortcut": "none", "input_to": "first", "backend": "auto"}  # fmt: skip
        for name, default in defaults.items():
            if (value := getattr(self, name)) != default:
                text += f", {name}={value!r}"
        return text


def reverse(x: Tensor, lengths: Tensor | None) -> Tensor:
    """Each sequence of (T, B, ·) backwards within its own length; padding stays where it is."""
    if lengths is None:
        return x.flip(0)
    t = torch.arange(x.shape[0], device=x.device).unsqueeze(1)  # (T, 1)
    index = torch.where(t < lengths, lengths - 1 - t, t)  # (T, B)
    return x.gather(0, index.unsqueeze(-1).expand_as(x))
