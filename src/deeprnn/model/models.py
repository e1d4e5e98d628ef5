"""The paper's models, assembled from ⊕ and ▷."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from typing import Any, TypedDict, Unpack

import torch

from deeprnn.errors import UserError, did_you_mean
from deeprnn.model import init as initialisation
from deeprnn.model.embedding import embedding_spec
from deeprnn.model.init import InitSpec
from deeprnn.model.operator_specs import CellSpec, Level, Place, PlusSpec, PredictSpec, Shortcut
from deeprnn.model.sequence_model import SequenceModel
from deeprnn.model.spec_fields import positive
from deeprnn.model.specs import Dropout, LevelInput, ModelSpec, Output, OutputFrom
from deeprnn.model.units import Unit, named

Sizes = int | Sequence[int]


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
            hint = did_you_mean(name, known)
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
