"""DeepRNN: the recurrent layer without an output function, a drop-in for `torch.nn.RNN`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from deeprnn.backends.direct import may_be_direct
from deeprnn.backends.protocol import Linear
from deeprnn.backends.single_step import as_sequence, by_torch
from deeprnn.backends.unrolling import autocasts
from deeprnn.model.arguments import as_sizes, name_unit
from deeprnn.model.direct_call import WIRED, Wired, call_directly, transition_wiring
from deeprnn.model.overrides import refresh_weights
from deeprnn.model.recurrent_base import Hidden, RecurrentBase, States, reverse
from deeprnn.model.specs import Place, PlusSpec, Shortcut, warn_idle_shortcut
from deeprnn.model.tracing import is_tensor, traced_backend
from deeprnn.model.transition import Weights, single_step, unroll_layers, why_not_described
from deeprnn.model.units import Unit, UnitSpec


class Level(NamedTuple):
    """One level in one direction, known once the layer is built: its ⊕ and its parameters' names, None where absent."""

    spec: PlusSpec
    suffix: str
    U: Sequence[str | None]
    W: Sequence[str]
    S: Sequence[str | None]
    b: Sequence[str]
    phis: Sequence[UnitSpec]
    recurrent_weights: int

    @classmethod
    def of(cls, spec: PlusSpec, suffix: str) -> Level:
        """A level of this ⊕."""
        ends = [suffix if l == 0 else f"{suffix}_d{l + 1}" for l in range(spec.depth)]
        U = [f"weight_ih{end}" if spec.inputs[l] else None for l, end in enumerate(ends)]
        W = [f"weight_{'zh' if l else 'hh'}{end}" for l, end in enumerate(ends)]
        S = [f"weight_sh{end}" if spec.shortcuts[l] else None for l, end in enumerate(ends)]
        b = [f"bias{'' if l else '_ih'}{end}" for l, end in enumerate(ends)] + [f"bias_hh{suffix}"]
        below = spec.hidden_size, *spec.sizes
        read = [n + spec.hidden_size * has for n, has in zip(below, spec.shortcuts, strict=False)]
        weights = sum(n * width for n, width in zip(read, spec.widths, strict=True))
        return cls(spec, suffix, U, W, S, b if spec.bias else [], spec.unit_specs, weights)


def _at_ends(h: Tensor, lengths: Tensor) -> Tensor:
    """The state after each sequence's last step, (1, B, H)."""
    return h[lengths - 1, torch.arange(h.shape[1], device=h.device)].unsqueeze(0)


class DeepRNN(RecurrentBase):
    """A recurrent layer whose transition may be deep, with the conventions of `torch.nn.RNN`.

    With no `intermediate_sizes` it is `nn.RNN` (and loads its state_dict). With them, every level
    computes z_l = φ_l(W_l z_{l-1} + U_l x_t + S_l h_{t-1} + b_l), h_t = z_L: DT-RNN, and with
    `shortcut="last"` and `input_to="all"` the paper's DT(S)-RNN. `num_layers` stacks levels (sRNN).

    Args:
        input_size: features of the input x.
        hidden_size: features of the state h of each level.
        num_layers: levels; each above the first reads the states of the one below.
        nonlinearity: unit φ of the state: "tanh", "relu", "sigmoid", "softsign", "identity", "maxout:N", a registered
            name, or a function of a tensor.
        bias: whether every layer has biases (the first has two, as in `nn.RNN`).
        batch_first: input and output are (B, T, ·) instead of (T, B, ·); states are not affected.
        dropout: probability of dropping an output of each level but the last, in training.
        bidirectional: a second set of levels reads the sequence backwards, and outputs are joined.
        device: where the parameters live.
        dtype: the parameters' type. Input and first state must have it too, except under autocast. There the
            input's products run in autocast's type; output and state keep the parameters', where those of
            `nn.RNN` take autocast's.
        intermediate_sizes: width, or widths, of the layers between h_{t-1} and h_t; none is a depth of 1.
        intermediate_nonlinearity: unit of those layers; None takes `nonlinearity`.
        shortcut: which layers also read h_{t-1} directly: "none", the "last", or "all" above the first. At
            depth 1 there is nothing to go around, and all three are the same.
        input_to: which layers read the input: the "first", the "last", or "all".
        backend: "auto" takes the fastest that can serve; "reference" is the plain loop.

    Parameters of level k are named as in `nn.RNN` (`weight_ih_lk`, `weight_hh_lk`, `bias_ih_lk`,
    `bias_hh_lk`) for the first layer of the transition; deeper layers d = 2, 3, … add
    `weight_zh_lk_dD` (from layer d-1), `weight_ih_lk_dD`, `weight_sh_lk_dD` (shortcut from h_{t-1})
    and `bias_lk_dD`; the backward direction ends in `_reverse`.
    """

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
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        intermediate_sizes: int | Sequence[int] = (),
        intermediate_nonlinearity: str | Unit | None = None,
        shortcut: Shortcut = "none",
        input_to: Place = "first",
        backend: str = "auto",
    ) -> None:
        phi = name_unit("nonlinearity", nonlinearity)
        sizes = (input_size, hidden_size, num_layers)
        super().__init__(f"RNN_{phi.upper()}", *sizes, bias, batch_first, dropout, bidirectional, backend)
        inner = as_sizes(intermediate_sizes)
        inner_unit = nonlinearity if intermediate_nonlinearity is None else intermediate_nonlinearity
        phi_inner = name_unit("intermediate_nonlinearity", inner_unit)
        self.level_specs = tuple(
            PlusSpec(
                input_size=input_size if k == 0 else hidden_size * self.num_directions,
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
        warn_idle_shortcut("DeepRNN", shortcut, inner)
        given = {"nonlinearity": (nonlinearity, phi), "intermediate_nonlinearity": (inner_unit, phi_inner)}
        for argument, (unit, named) in given.items():
            if named.startswith("lp") and named in self.level_specs[0].units:
                raise ValueError(
                    f"{argument} {unit!r} has learned parameters: build with deeprnn.Plus or deeprnn.rnn(...)"
                )
        self.nonlinearity = phi
        self.intermediate_sizes, self.shortcut, self.input_to = inner, shortcut, input_to
        self._directions = tuple(  # of each level
            tuple(Level.of(spec, suffix) for suffix in self._suffixes(k))
            for k, spec in enumerate(self.level_specs)
        )
        for level in (level for directions in self._directions for level in directions):
            self._add_level(level.spec, level.suffix, {"device": device, "dtype": dtype})
        self.reset_parameters()

    def _suffixes(self, level: int) -> list[str]:
        return [f"_l{level}", f"_l{level}_reverse"][: self.num_directions]

    def _add_level(self, spec: PlusSpec, suffix: str, kw: dict) -> None:
        below, names = spec.hidden_size, []
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
            names += shapes
            below = size
        self._all_weights.append(names)

    def reset_parameters(self) -> None:
        """Fill with U(-1/√H, 1/√H), as `nn.RNN` does."""
        bound = 1.0 / math.sqrt(self.hidden_size)
        for weight in self.parameters():
            nn.init.uniform_(weight, -bound, bound)

    def _list(self, names: Sequence[str | None]) -> list:
        own = self.__dict__[
            "_parameters"
        ]  # at once, where `nn.Module` searches; what hooks compute is found there
        if not own or torch.compiler.is_compiling():
            own = {}
        return [None if n is None else own[n] if n in own else getattr(self, n) for n in names]

    def _level_weights(self, level: Level) -> tuple[list, list, list, list]:
        """U, W, S of a level's layers, None where a layer has none, and b, the last being the first layer's second."""
        return self._list(level.U), self._list(level.W), self._list(level.S), self._list(level.b)

    def _project(self, x: Tensor, spec: PlusSpec, U: list, b: list) -> Tensor:
        if all(u is not None for u in U):
            return Linear(x, U, b).A
        parts = []
        each = [b[0] + b[-1], *b[1:-1]] if b else [None] * spec.depth
        for u, bias, width in zip(U, each, spec.widths, strict=True):
            part = F.linear(x, u, bias) if u is not None else x.new_zeros(()) if bias is None else bias
            parts.append(part.expand(*x.shape[:-1], width))
        return torch.cat(parts, -1)

    def _call_directly(self, input: Any, hx: Any) -> tuple[Tensor, Tensor] | None:
        if torch.compiler.is_compiling() or type(self) is not DeepRNN or not may_be_direct(input):
            return None
        if (
            len(self.level_specs) != 1
            or self.bidirectional
            or why_not_described(self.level_specs[0]) is not None
        ):
            return None
        wired = self.__dict__.get(WIRED)
        if wired is None:
            ((level,),) = self._directions
            names = [name for name in (*level.U, *level.W, *level.S, *level.b) if name is not None]
            wired = self.__dict__[WIRED] = Wired(transition_wiring(level.spec), names)
        states = None if hx is None else [hx]
        found = call_directly(self, wired, input, states, self.batch_first, self.backend)
        if found is None:
            return None
        output, (h,) = found
        return output, h

    def _run_level(self, x: Tensor, h0: Tensor, level: Level) -> list[Tensor]:
        """All layers of a level, the states last."""
        spec = level.spec
        U, W, S, b = self._level_weights(level)
        if by_torch(self.backend, level.recurrent_weights, x, h0):
            *inner, h = single_step(level.phis, x[0], h0, U, W, S, b)
            return [*(z.unsqueeze(0) for z in inner), as_sequence(h)]
        entering = self._project(x, spec, U, b) if None in level.U else Linear(x, U, b)
        weights = Weights(W, [s for s in S if s is not None])
        return unroll_layers(spec, entering, h0, weights, backend=traced_backend(self.backend, x, h0))

    def _run_levels(
        self, x: Tensor, h0: Tensor, lengths: Tensor | None, return_all_states: bool
    ) -> tuple[Tensor, Tensor, States]:
        states, last, i = [], [], 0
        for k, directions in enumerate(self._directions):
            outs = []
            for level in directions:
                backward = level.suffix.endswith("_reverse")
                seen = reverse(x, lengths) if backward else x
                layers = self._run_level(seen, h0[i], level)
                h = layers[-1]
                last.append(h[-1:] if lengths is None else _at_ends(h, lengths))
                h = reverse(h, lengths) if backward else h
                if return_all_states:
                    states.append([*(reverse(z, lengths) if backward else z for z in layers[:-1]), h])
                outs.append(h)
                i += 1
            x = torch.cat(outs, -1) if len(outs) > 1 else outs[0]
            if self.dropout and k < self.num_layers - 1:
                x = F.dropout(x, self.dropout, self.training)
        return x, torch.cat(last) if len(last) > 1 else last[0].clone(), states

    def step(self, x: Tensor, h: Hidden = None) -> tuple[Tensor, Tensor]:
        """One step of the sequence form: x (B, I), h (levels, B, H) -> (output (B, H), h)."""
        if self.bidirectional:
            raise RuntimeError(
                "step: a bidirectional layer needs the whole sequence; use bidirectional=False"
            )
        if not is_tensor(x) or x.dim() != 2 or x.shape[-1] != self.input_size:
            got = tuple(x.shape) if is_tensor(x) else type(x).__name__
            raise RuntimeError(f"step: x must be (B, {self.input_size}), got {got}")
        self.check_input(x.unsqueeze(0), None)
        refresh_weights(self)
        h = self._initial(h, x, x.shape[0], True)
        new = []
        for k, (level,) in enumerate(self._directions):
            if autocasts(x.device.type):  # inputs in low precision, the state in its own, as in a sequence
                x = self._run_level(x.unsqueeze(0), h[k], level)[-1][0]
            else:
                x = single_step(level.phis, x, h[k], *self._level_weights(level))[-1]
            new.append(x)
        return x, torch.stack(new)

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
