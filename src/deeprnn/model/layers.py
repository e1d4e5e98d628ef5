"""DeepRNN: the recurrent layer without an output function, a drop-in for `torch.nn.RNN`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, overload

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import PackedSequence

from deeprnn.backends.call import InputProjection
from deeprnn.backends.direct import eligible_for_direct_call
from deeprnn.backends.single_step import as_sequence, prefers_torch_ops
from deeprnn.backends.unrolling import autocasts
from deeprnn.model.arguments import as_sizes, name_unit
from deeprnn.model.direct_call import WIRED, Wired, call_directly, transition_wiring
from deeprnn.model.operator_specs import Place, PlusSpec, Shortcut, warn_idle_shortcut
from deeprnn.model.recurrent_base import RecurrentBase
from deeprnn.model.sequence_layer import Unrolled
from deeprnn.model.tracing import is_symbolic, leaf, traced_backend
from deeprnn.model.transition import Weights, single_step, unroll_layers, why_not_described
from deeprnn.model.units import Unit, UnitSpec

Hidden = Tensor | None


class Level(NamedTuple):
    """One level in one direction, known once the layer is built: its ⊕ and its parameters' names, None where absent."""

    spec: PlusSpec
    suffix: str
    U: Sequence[str | None]
    W: Sequence[str]
    S: Sequence[str | None]
    b: list[str]
    phis: Sequence[UnitSpec]

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of the parameters, by name."""
        spec, below, shapes = self.spec, self.spec.hidden_size, {}
        for l, (size, width) in enumerate(zip(spec.sizes, spec.widths, strict=True)):
            matrices = (self.U[l], spec.input_size), (self.W[l], below), (self.S[l], spec.hidden_size)
            shapes |= {name: (width, columns) for name, columns in matrices if name is not None}
            biases = self.b[l : l + 1] + self.b[-1:] if l == 0 else self.b[l : l + 1]
            shapes |= dict.fromkeys(biases, (width,))
            below = size
        return shapes

    @classmethod
    def of(cls, spec: PlusSpec, suffix: str) -> Level:
        """A level of this ⊕."""
        ends = [suffix if l == 0 else f"{suffix}_d{l + 1}" for l in range(spec.depth)]
        U = [f"weight_ih{end}" if spec.inputs[l] else None for l, end in enumerate(ends)]
        W = [f"weight_{'zh' if l else 'hh'}{end}" for l, end in enumerate(ends)]
        S = [f"weight_sh{end}" if spec.shortcuts[l] else None for l, end in enumerate(ends)]
        b = [f"bias{'' if l else '_ih'}{end}" for l, end in enumerate(ends)] + [f"bias_hh{suffix}"]
        return cls(spec, suffix, U, W, S, b if spec.bias else [], spec.unit_specs)


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
        proj_size: 0; projected states are `deeprnn.LSTM`'s.
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

    state_names = ("hx",)
    defaults: ClassVar = {
        "intermediate_sizes": (),
        "num_layers": 1,
        "nonlinearity": "tanh",
        "bias": True,
        "batch_first": False,
        "dropout": 0.0,
        "bidirectional": False,
        "shortcut": "none",
        "input_to": "first",
        "backend": "auto",
    }

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
        proj_size: int = 0,
        intermediate_sizes: int | Sequence[int] = (),
        intermediate_nonlinearity: str | Unit | None = None,
        shortcut: Shortcut = "none",
        input_to: Place = "first",
        backend: str = "auto",
    ) -> None:
        if proj_size:
            raise ValueError("proj_size argument is only supported for LSTM, not RNN or GRU")
        phi = name_unit("nonlinearity", nonlinearity)
        super().__init__(f"RNN_{phi.upper()}", input_size, hidden_size, num_layers=num_layers, bias=bias,
                         batch_first=batch_first, dropout=dropout, bidirectional=bidirectional,
                         backend=backend)  # fmt: skip
        self.state_sizes, self.output_size = (hidden_size,), hidden_size * self.num_directions
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
        units = {"nonlinearity": (nonlinearity, phi), "intermediate_nonlinearity": (inner_unit, phi_inner)}
        for argument, (unit, named) in units.items():
            if named.startswith("lp") and named in self.level_specs[0].units:
                raise ValueError(
                    f"{argument} {unit!r} has learned parameters: build with deeprnn.Plus or deeprnn.rnn(...)"
                )
        self.nonlinearity = phi
        self.intermediate_sizes, self.shortcut, self.input_to = inner, shortcut, input_to
        self._levels = tuple(  # in each direction
            Level.of(spec, suffix)
            for k, spec in enumerate(self.level_specs)
            for suffix in (f"_l{k}", f"_l{k}_reverse")[: self.num_directions]
        )
        for level in self._levels:
            self.add_parameters(level.shapes(), device, dtype)
        self.reset_parameters()

    def _list(self, names: Sequence[str | None]) -> list:
        # At once, where `nn.Module` searches; what hooks compute is found there.
        parameters = {} if torch.compiler.is_compiling() else self.__dict__["_parameters"]
        return [None if n is None else parameters[n] if n in parameters else getattr(self, n) for n in names]

    def _level_weights(self, level: Level) -> tuple[list, list, list, list]:
        """U, W, S of a level's layers, None where a layer has none, and b, the last being the first layer's second."""
        return self._list(level.U), self._list(level.W), self._list(level.S), self._list(level.b)

    def _project(self, x: Tensor, spec: PlusSpec, U: list, b: list) -> Tensor:
        if all(u is not None for u in U):
            return InputProjection(x, U, b).A
        parts = []
        biases = [b[0] + b[-1], *b[1:-1]] if b else [None] * spec.depth
        for u, bias, width in zip(U, biases, spec.widths, strict=True):
            part = F.linear(x, u, bias) if u is not None else x.new_zeros(()) if bias is None else bias
            parts.append(part.expand(*x.shape[:-1], width))
        return torch.cat(parts, -1)

    def _call_directly(self, input: Any, hx: Any) -> tuple[Tensor, Tensor] | None:
        if torch.compiler.is_compiling() or type(self) is not DeepRNN or not eligible_for_direct_call(input):
            return None
        level, *others = self._levels
        if others or why_not_described(level.phis) is not None:
            return None
        wired = self.__dict__.get(WIRED)
        if wired is None:
            names = [name for name in (*level.U, *level.W, *level.S, *level.b) if name is not None]
            wired = self.__dict__[WIRED] = Wired(transition_wiring(level.spec), names)
        states = None if hx is None else [hx]
        result = call_directly(self, wired, input, states, self.batch_first, self.backend)
        if result is None:
            return None
        output, (h,) = result
        return output, h

    def _layers(self, level: Level, x: Tensor, h0: Tensor, reset: Tensor | None = None) -> list[Tensor]:
        """All layers of a level over a sequence, the states last."""
        spec = level.spec
        U, W, S, b = self._level_weights(level)
        if reset is None and prefers_torch_ops(self.backend, x, h0):
            *inner, h = single_step(level.phis, x[0], h0, U, W, S, b)
            return [*(z.unsqueeze(0) for z in inner), as_sequence(h)]
        projection = self._project(x, spec, U, b) if None in level.U else InputProjection(x, U, b)
        weights = Weights(W, [s for s in S if s is not None])
        backend = traced_backend(self.backend, x, h0)
        return unroll_layers(spec, projection, h0, weights, reset, backend=backend)

    def unroll_direction(
        self, index: int, x: Tensor, states: Sequence[Tensor], reset: Tensor | None
    ) -> Unrolled:
        """One ⊕ over a sequence."""
        layers = self._layers(self._levels[index], x, states[0], reset)
        return Unrolled(layers[-1], layers[-1:], layers)

    def step_direction(self, index: int, x: Tensor, states: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """One step of ⊕."""
        level = self._levels[index]
        if autocasts(x.device.type):  # inputs in low precision, the state in its own, as in a sequence
            h = self._layers(level, x.unsqueeze(0), states[0])[-1][0]
        else:
            h = single_step(level.phis, x, states[0], *self._level_weights(level))[-1]
        return h, [h]

    @overload
    def forward(
        self, input: Tensor, hx: Hidden = None, return_all_states: Literal[False] = False
    ) -> tuple[Tensor, Tensor]: ...
    @overload
    def forward(
        self, input: PackedSequence, hx: Hidden = None, return_all_states: Literal[False] = False
    ) -> tuple[PackedSequence, Tensor]: ...
    @overload
    def forward(
        self, input: Tensor, hx: Hidden = None, *, return_all_states: Literal[True]
    ) -> tuple[Tensor, Tensor, list[list[Tensor]]]: ...
    @overload
    def forward(
        self, input: PackedSequence, hx: Hidden = None, *, return_all_states: Literal[True]
    ) -> tuple[PackedSequence, Tensor, list[list[PackedSequence]]]: ...

    def forward(self, input, hx=None, return_all_states=False):
        """(output, h_n); with `return_all_states` also every level's layers, as a list of lists.

        input is (T, B, I), (B, T, I) with batch_first, (T, I) unbatched, or a PackedSequence; hx and
        h_n are (levels x directions, B, H). The third result has, for every level and direction, the
        sequence of each transition layer, the last being the state; all are laid out as output is.
        Under autocast the results keep the parameters' type (`nn.RNN` gives autocast's).
        """
        if is_symbolic(input):
            return leaf(self, input, hx, return_all_states)
        if not return_all_states:
            done = self.one_step(input, hx)
            if done is None:
                done = self._call_directly(input, hx)
            if done is not None:
                return done
        return self.results(input, hx, None, None, return_all_states)

    if TYPE_CHECKING:  # for `nn.Module` a call takes and gives anything; here it is as `forward`

        @property
        def __call__(self):  # type: ignore[override]
            return self.forward

    def step(self, x: Tensor, h: Hidden = None) -> tuple[Tensor, Tensor]:
        """One step of the sequence form: x (B, I), h (levels, B, H) -> (output (B, H), h)."""
        return self.run_step(x, h)
