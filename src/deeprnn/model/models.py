"""The paper's models, assembled from ⊕ and ▷."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, TypedDict, Unpack

import torch
from torch import Tensor, nn

from deeprnn.errors import UserError
from deeprnn.model import init as initialisation
from deeprnn.model.cell_level import CellLevel
from deeprnn.model.embedding import Embedding, embedding_spec
from deeprnn.model.init import InitSpec
from deeprnn.model.nade import NadePredict
from deeprnn.model.operators import Plus, Predict, enter
from deeprnn.model.overrides import formula, refresh_weights
from deeprnn.model.specs import (
    CellSpec,
    Dropout,
    Level,
    LevelInput,
    ModelSpec,
    Output,
    OutputFrom,
    Place,
    PlusSpec,
    PredictSpec,
    Shortcut,
    positive,
)
from deeprnn.model.tracing import Traceable, is_symbolic, is_tensor, leaf
from deeprnn.model.units import Unit, named

State = tuple[Tensor, ...]
Sizes = int | Sequence[int]


@formula("forward", "step", "embed", "joined")
class SequenceModel(Traceable):
    """Levels of ⊕ below one ▷: inputs to logits of the next symbol.

    `y, state = model(x, state)`: x is (T, B, I) vectors or frames, or (T, B) integer symbols; y is
    (T, B, O) logits, or what a NADE takes (`NadePredict`); state is one (B, n) tensor for every state of every
    level (an LSTM has two), None for the first ones. Nothing is hidden on the module, so a sequence may be cut
    anywhere and carried on.
    """

    def __init__(self, spec: ModelSpec, device=None, dtype=None, initialise: bool = True) -> None:
        super().__init__()
        self.spec = spec
        self.levels: list[Plus | CellLevel] = nn.ModuleList(
            (CellLevel if isinstance(p, CellSpec) else Plus).from_spec(p, device, dtype, initialise)  # type: ignore[arg-type]
            for p in spec.levels
        )  # type: ignore[assignment]
        for level in self.levels:
            if spec.dropout.state and isinstance(level, CellLevel):
                level.set_state_dropout(spec.dropout.state)
        output = NadePredict if spec.output == "nade" else Predict
        self.predict = output.from_spec(spec.predict, device, dtype, initialise)
        if spec.embedding is not None and not spec.embedding.tied:
            self.embedding = Embedding(spec.embedding, device, dtype, initialise)
        self.backend = "auto"

    def embed(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """What the first level sees: x itself, or a learned vector for each symbol; `mask` (symbols, 1) drops some."""
        own = self.spec.embedding
        if own is None:
            return x
        # Tied, the vectors are ▷'s last matrix: one parameter, and no second name for it.
        if not own.tied:
            return self.embedding(x, mask)
        refresh_weights(self.predict)
        weight = getattr(self.predict, f"V{len(self.spec.predict.sizes) + 1}")
        return enter(x, weight if mask is None else weight * mask, True)

    def initial_state(self, batch_size: int) -> State:
        """The states before the first step: h_0 = 0 for every level."""
        return tuple(h for level in self.levels for h in level.initial_state(batch_size))

    def hidden(
        self, x: Tensor, state: State | None = None, reset: Tensor | None = None, masks: Masks | None = None
    ) -> tuple[Tensor, State]:
        """The states that ▷ sees, (T, B, ·), and the state to carry on."""
        states, last = self.level_states(x, state, reset, masks)
        return self.joined(states), last

    def joined(self, states: Sequence[Tensor]) -> Tensor:
        """Of all levels' states those that ▷ sees."""
        return torch.cat(list(states), -1) if self.spec.output_from == "all" else states[-1]

    def level_states(
        self, x: Tensor, state: State | None = None, reset: Tensor | None = None, masks: Masks | None = None
    ) -> tuple[list[Tensor], State]:
        """Every level's states, (T, B, H_l) each, and the state to carry on."""
        self._check(x, 2 if self.spec.symbols else 3)
        self._check_reset(reset, x)
        state = self._state(state, x.shape[1])
        masks = masks or {}
        entered = self.embed(x, masks.get("symbols"))
        below = entered if "input" not in masks else entered * masks["input"]
        seen, last = [], []
        for k, (level, own) in enumerate(zip(self.levels, self._by_level(state), strict=True)):
            inner = _of_level(masks, k)
            skip = entered if level.spec.skip_size else None
            if f"below{k}" in masks:
                below = below * masks[f"below{k}"]
            below, new = level.run(below, own, reset, skip, inner, backend=self.backend)
            seen.append(below)
            last += new
        return seen, tuple(last)

    def _by_level(self, state: State) -> list[State]:
        """Each level's own states."""
        found, start = [], 0
        for level in self.levels:
            end = start + len(level.state_sizes)
            found.append(state[start:end])
            start = end
        return found

    def forward(
        self, x: Tensor, state: State | None = None, reset: Tensor | None = None, masks: Masks | None = None
    ) -> tuple[Tensor, State]:
        """Logits of every step and the state after the last; `reset` (T, B) zeroes the state before a step."""
        if is_symbolic(x):
            return leaf(self, x, state, reset, masks)
        top, state = self.hidden(x, state, reset, masks)
        dropped = _of_output(masks or {})
        return self.predict(top, dropped) if dropped else self.predict(top), state

    def step(self, x: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        """One step, for streaming and sampling: x (B, I) or symbols (B,), logits (B, O)."""
        self._check(x, 1 if self.spec.symbols else 2)
        state = self._state(state, x.shape[0])
        entered, seen, last = self.embed(x), [], []
        below = entered
        for level, own in zip(self.levels, self._by_level(state), strict=True):
            below, new = level.run_step(below, own, entered if level.spec.skip_size else None)
            seen.append(below)
            last += new
        return self.predict(self.joined(seen)), tuple(last)

    def _state(self, state: State | None, batch: int) -> State:
        """The given state, checked, or zeros."""
        if state is None:
            return self.initial_state(batch)
        want = [(batch, n) for level in self.levels for n in level.state_sizes]
        got = [tuple(h.shape) if isinstance(h, Tensor) else type(h).__name__ for h in state]
        if got != want:
            raise ValueError(f"state must hold one (B, H) tensor per level, {want}, got {got}")
        return tuple(state)

    def _check_reset(self, reset: Tensor | None, x: Tensor) -> None:
        if reset is not None and not isinstance(reset, Tensor):
            raise TypeError(f"reset must be a Tensor of bool marks, got {type(reset).__name__}")
        if reset is not None and (reset.dtype != torch.bool or reset.shape != x.shape[:2]):
            raise ValueError(
                f"reset must be bool marks of shape (T, B) = {tuple(x.shape[:2])}, got {reset.dtype} of "
                f"shape {tuple(reset.shape)}"
            )

    def _check(self, x: Tensor, dims: int) -> None:
        spec = self.spec
        if not is_tensor(x):
            raise TypeError(f"input must be a Tensor, got {type(x).__name__}")
        if x.dim() != dims:
            shape = {1: "(B,)", 2: "(T, B)" if spec.symbols else "(B, I)", 3: "(T, B, I)"}[dims]
            raise ValueError(f"input must have {dims} dimension(s), {shape}, got {tuple(x.shape)}")
        if spec.symbols and (x.is_floating_point() or x.is_complex()):
            raise ValueError(
                f"input must be integer symbols, got {x.dtype}: this model gathers, it takes no vectors"
            )
        if not spec.symbols and x.shape[-1] != spec.input_size:
            raise ValueError(
                f"input.size(-1) must be equal to input_size. Expected {spec.input_size}, got {x.shape[-1]}"
            )

    def mask_shapes(self, T: int, B: int) -> dict[str, tuple[float, tuple[int, ...]]]:
        """Each dropout mask of a call of `forward` by name: its probability and its shape."""
        drop = self.spec.dropout
        steps = () if drop.per_sequence else (T,)
        out = {}
        if self.spec.embedding is not None:
            out["symbols"] = drop.symbols, (self.spec.embedding.symbols, 1)
        if not self.levels[0].spec.symbols:
            out["input"] = drop.input, (*steps, B, self.levels[0].spec.input_size)
        for k, level in enumerate(self.levels):
            if k:
                out[f"below{k}"] = drop.levels, (*steps, B, level.spec.input_size)
            if isinstance(level, CellLevel):
                continue
            out[f"{k}.state"] = drop.state, (B, level.spec.hidden_size)
            for n, size in enumerate(level.spec.intermediate_sizes, 1):
                out[f"{k}.z{n}"] = drop.intermediate, (*steps, B, size)
        out["out.h"] = drop.output, (*steps, B, self.predict.spec.input_size)
        for n, size in enumerate(self.predict.spec.sizes, 1):
            out[f"out.y{n}"] = drop.output, (*steps, B, size)
        return {name: (p, shape) for name, (p, shape) in out.items() if p}

    def draw_shapes(self, T: int, B: int) -> dict[str, tuple[str, tuple[int, ...]]]:
        """The random numbers that cells take in a call of `forward`, by name: uniform or normal, and their shape."""
        return {
            f"{k}.draw{i}": (kind, (B, *shape) if per_sequence else (T, B, *shape))
            for k, level in enumerate(self.levels)
            if isinstance(level, CellLevel)
            for i, (kind, shape, per_sequence) in enumerate(level.draws())
        }

    def draw_masks(self, T: int, B: int, generator: torch.Generator | None = None) -> dict[str, Tensor]:
        """Fresh dropout masks for one call of `forward`, scaled so that the mean is kept, and what cells draw."""
        kw: dict[str, Any] = {"generator": generator, "device": generator.device if generator else None}
        like, out = next(self.predict.parameters()), {}
        for name, (p, shape) in self.mask_shapes(T, B).items():
            out[name] = (torch.rand(shape, **kw) >= p).to(like) / (1 - p)
        for name, (kind, shape) in self.draw_shapes(T, B).items():
            out[name] = (torch.rand if kind == "uniform" else torch.randn)(shape, **kw).to(like)
        return out


Masks = Mapping[str, Tensor]


def _of_level(masks: Masks, level: int) -> dict[str, Tensor]:
    prefix = f"{level}."
    return {k.removeprefix(prefix): v for k, v in masks.items() if k.startswith(prefix)}


def _of_output(masks: Masks) -> dict[str, Tensor]:
    return {k.removeprefix("out."): v for k, v in masks.items() if k.startswith("out.")}


def default_init(spec: ModelSpec) -> InitSpec:
    """The paper's initialisation for the task that the model's shape suggests."""
    if spec.output != "categorical":
        return initialisation.MUSIC
    return initialisation.WORD if spec.output_size >= 1000 else initialisation.CHAR


def build(
    spec: ModelSpec, init: InitSpec | None = None, seed: int | None = None, device=None, dtype=None
) -> SequenceModel:
    """Assemble and initialise a model; the same seed gives the same weights on every device."""
    if not isinstance(init, InitSpec | None):
        raise UserError(f"init must be an InitSpec, such as deeprnn.model.init.MUSIC, or None, got {init!r}")
    model = SequenceModel(spec, device, dtype, initialise=False)
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    initialisation.initialise(model, init or default_init(spec), generator)
    return model


def assemble(
    *,
    input_size: int,
    output_size: int,
    hidden_sizes: Sequence[int],
    intermediate: Sizes = (),
    output_hidden: Sizes = (),
    shortcut: Shortcut = "none",
    input_to: Place = "first",
    unit: str | Unit = "sigmoid",
    intermediate_unit: str | Unit | None = None,
    output_unit: str | Unit = "sigmoid",
    output: Output = "bernoulli",
    symbols: bool | None = None,
    output_from: OutputFrom = "top",
    input_to_levels: LevelInput = "first",
    output_shortcut: bool = False,
    input_mlp: Sizes = (),
    bias: bool = True,
    dropout: Dropout | None = None,
    cell: str = "",
    cell_options: Sequence[str] = (),
    nade_size: int = 200,
    embedding: int = 0,
    tied: bool = False,
) -> ModelSpec:
    """The spec of any model of the paper's family from plain sizes.

    `symbols=None` takes integer symbols for a categorical output and vectors for any other. `nade_size` is of the
    hidden layer of a NADE (output="nade"), and idle elsewhere. With `cell` every
    level is that cell (`cells.lookup`) in place of the paper's ⊕, built with `cell_options` such as "zoneout=0.1";
    of the settings of ⊕ only `intermediate` has a meaning then, for cells with the argument `intermediate_sizes`.
    `embedding` is the length of a learned vector for each symbol, 0 for none; `tied` takes ▷'s last matrix for it.
    """
    if not hidden_sizes:
        raise UserError("hidden_sizes must name at least one level, got none")
    inner, out_sizes = sizes(intermediate), sizes(output_hidden)
    mlp = sizes(input_mlp)
    symbols = output == "categorical" if symbols is None else symbols
    embedded = embedding_spec(input_size, embedding, tied, symbols)
    if embedded is not None:
        input_size, symbols = embedded.size, False
    skip = input_size if input_to_levels == "all" else 0
    levels: list[Level] = []
    if cell and inner:
        cell_options = (*cell_options, f"intermediate_sizes={'+'.join(map(str, inner))}")
    for k, hidden in enumerate(hidden_sizes):
        if cell:
            below = levels[-1].hidden_size if k else input_size
            levels.append(CellSpec(cell, below, hidden, tuple(cell_options), symbols and not k, bool(k)))
            continue
        levels.append(
            PlusSpec(
                input_size=levels[-1].hidden_size if k else input_size,
                hidden_size=hidden,
                intermediate_sizes=inner,
                units=(*[named(intermediate_unit or unit)] * len(inner), named(unit)),
                shortcut=shortcut,
                input_to=input_to,
                input_mlp_sizes=() if k else mlp,
                skip_size=skip if k else 0,
                bias=bias,
                symbols=symbols and (not k or bool(skip)),
                stacked=bool(k),
            )
        )
    width = sum(hidden_sizes) if output_from == "all" else hidden_sizes[-1]
    hidden_of_nade = nade_size if output == "nade" else 0
    predict = PredictSpec(
        width, output_size, out_sizes, (named(output_unit),), output_shortcut, bias, hidden_of_nade
    )
    dropout = dropout or Dropout()
    return ModelSpec(tuple(levels), predict, output, output_from, input_to_levels, dropout, embedded)


def sizes(value: Sizes) -> tuple[int, ...]:
    """One width or several."""
    if isinstance(value, int):
        return (value,)
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise UserError(f"a size must be a whole number or a list of them, got {value!r}")
    return tuple(value)


class Options(TypedDict, total=False):
    """What every builder takes besides its sizes."""

    unit: str | Unit
    """of the state; "sigmoid" unless given"""
    intermediate_unit: str | Unit | None
    """of the transition's intermediate layers; None is as `unit`"""
    output_unit: str | Unit
    """of the output function's hidden layers"""
    shortcut: Shortcut
    """which layers of the transition also read h_{t-1}; without intermediate layers there is none to go around"""
    input_to: Place
    """which layers of the transition read the input"""
    output: Output
    """what the logits are of: independent bits, one of many symbols, or a NADE's bits"""
    nade_size: int
    """hidden units of a NADE; 200 unless given"""
    symbols: bool | None
    """integer symbols as input; None takes them for a categorical output"""
    output_from: OutputFrom
    """which levels the output reads"""
    input_to_levels: LevelInput
    """which levels read the input"""
    output_shortcut: bool
    """a path from the state around the output function's hidden layers"""
    input_mlp: Sizes
    """hidden layers between the input and the first level"""
    bias: bool
    dropout: Dropout | None
    embedding: int
    """length of a learned vector for each symbol; 0 for none"""
    tied: bool
    """the embedding is the output's last matrix"""
    init: InitSpec | None
    """None is the paper's for the task that the model's shape suggests"""
    seed: int | None
    """the same seed gives the same weights on every device; None draws from torch's own generator"""
    device: Any
    dtype: torch.dtype | None


DEEP_SIZES = ("intermediate_size", "output_hidden_size")


def _make(*, init=None, seed=None, device=None, dtype=None, **settings) -> SequenceModel:
    known = list(inspect.signature(assemble).parameters)
    for name in settings:
        if name in DEEP_SIZES:
            raise TypeError(f"{name} is for the builders of deep models: use dt_rnn, dts_rnn, do_rnn, dot_rnn, "
                            "dots_rnn or stacked_dts_rnn")  # fmt: skip
        if name not in known:
            near = get_close_matches(name, known, n=1)
            hint = f" (did you mean {near[0]!r}?)" if near else ""
            raise TypeError(f"a model has no setting {name!r}{hint}: known are {', '.join(known)}")
    return build(assemble(**settings), init, seed, device, dtype)


def rnn(*, input_size: int, hidden_size: int, output_size: int, **options: Unpack[Options]) -> SequenceModel:
    """The conventional RNN: h_t = φ(W h_{t-1} + U x_t), y_t = V h_t.  Fig. 2a."""
    return _make(input_size=input_size, hidden_sizes=(hidden_size,), output_size=output_size, **options)


def dt_rnn(
    *,
    input_size: int,
    hidden_size: int,
    intermediate_size: Sizes,
    output_size: int,
    **options: Unpack[Options],
) -> SequenceModel:
    """DT-RNN: a transition with intermediate layers, the input entering the first.  Fig. 2b."""
    return _make(input_size=input_size, hidden_sizes=(hidden_size,), intermediate=intermediate_size,
                 output_size=output_size, **options)  # fmt: skip


def dts_rnn(
    *,
    input_size: int,
    hidden_size: int,
    intermediate_size: Sizes,
    output_size: int,
    **options: Unpack[Options],
) -> SequenceModel:
    """DT(S)-RNN: a deep transition with a shortcut from h_{t-1}, the input entering every layer.  Fig. 2b*."""
    return dt_rnn(input_size=input_size, hidden_size=hidden_size, intermediate_size=intermediate_size,
                  output_size=output_size, **with_shortcut(options))  # fmt: skip


def do_rnn(
    *,
    input_size: int,
    hidden_size: int,
    output_hidden_size: Sizes,
    output_size: int,
    **options: Unpack[Options],
) -> SequenceModel:
    """DO-RNN: a conventional transition below a deep output function.  Sec. 3.3.2."""
    return _make(input_size=input_size, hidden_sizes=(hidden_size,), output_hidden=output_hidden_size,
                 output_size=output_size, **options)  # fmt: skip


def dot_rnn(
    *,
    input_size: int,
    hidden_size: int,
    intermediate_size: Sizes,
    output_hidden_size: Sizes,
    output_size: int,
    **options: Unpack[Options],
) -> SequenceModel:
    """DOT-RNN: deep transition and deep output.  Fig. 2c."""
    return _make(input_size=input_size, hidden_sizes=(hidden_size,), intermediate=intermediate_size,
                 output_hidden=output_hidden_size, output_size=output_size, **options)  # fmt: skip


def dots_rnn(
    *,
    input_size: int,
    hidden_size: int,
    intermediate_size: Sizes,
    output_hidden_size: Sizes,
    output_size: int,
    **options: Unpack[Options],
) -> SequenceModel:
    """DOT(S)-RNN: deep transition with shortcut, and deep output.  Fig. 2c with the shortcut of 2b*."""
    return dot_rnn(input_size=input_size, hidden_size=hidden_size, intermediate_size=intermediate_size,
                   output_hidden_size=output_hidden_size, output_size=output_size,
                   **with_shortcut(options))  # fmt: skip


def stacked_rnn(
    *,
    input_size: int,
    hidden_size: Sizes,
    output_size: int,
    num_levels: int | None = None,
    **options: Unpack[Options],
) -> SequenceModel:
    """sRNN: levels of recurrent states (2, or as many as `hidden_size` lists), each fed by the one below.  Fig. 2d."""
    hidden = level_sizes("stacked_rnn", hidden_size, num_levels)
    return _make(input_size=input_size, hidden_sizes=hidden, output_size=output_size, **options)


def stacked_dts_rnn(
    *,
    input_size: int,
    hidden_size: Sizes,
    intermediate_size: Sizes,
    output_size: int,
    output_hidden_size: Sizes = (),
    num_levels: int | None = None,
    **options: Unpack[Options],
) -> SequenceModel:
    """Stacked DT(S)-RNN, with `output_hidden_size` also a deep output: the combination the paper leaves open."""
    hidden = level_sizes("stacked_dts_rnn", hidden_size, num_levels)
    return _make(input_size=input_size, hidden_sizes=hidden, intermediate=intermediate_size,
                 output_hidden=output_hidden_size, output_size=output_size,
                 **with_shortcut(options))  # fmt: skip


def with_shortcut(options: Options) -> Options:
    """The paper's (S), where the options do not say otherwise."""
    return {"shortcut": "last", "input_to": "all", **options}


def level_sizes(owner: str, hidden_size: Sizes, num_levels: int | None) -> tuple[int, ...]:
    """The state size of each level, from one size or a list."""
    levels = 2 if num_levels is None else num_levels
    positive(owner, num_levels=levels)
    hidden = (hidden_size,) * levels if isinstance(hidden_size, int) else sizes(hidden_size)
    if num_levels is not None and len(hidden) != num_levels:
        raise UserError(
            f"{owner}: num_levels={num_levels}, but hidden_size lists {len(hidden)}: give one of them"
        )
    return hidden
