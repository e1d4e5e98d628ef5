"""What a model is, as data: frozen, hashable, and the same in memory, recipe and checkpoint."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any, Literal, TypedDict, TypeVar, get_args

from deeprnn.errors import UserError
from deeprnn.model.units import Unit, UnitSpec, named

T = TypeVar("T")
Units = str | Unit | Sequence[str | Unit]

Place = Literal["first", "last", "all"]
"""which layers of ⊕ read the input"""
Shortcut = Literal["none", "last", "all"]
"""which layers of ⊕ above the first read h(t-1)"""
Output = Literal["bernoulli", "categorical", "nade"]
"""what ▷ gives: independent bits, one of many symbols, or bits that depend on each other (a NADE)"""
OutputFrom = Literal["top", "all"]
"""which levels' states ▷ reads"""
LevelInput = Literal["first", "all"]
"""which levels read the model's input"""


def positive(owner: str, **sizes: int) -> None:
    """Refuse a size that is not a whole number of at least 1."""
    for name, value in sizes.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise UserError(f"{owner}: {name} must be a whole number of at least 1, got {value!r}")


def boolean(owner: str, **flags: bool) -> None:
    """Refuse what is neither True nor False: "no" and 0.5 would count as yes."""
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise UserError(f"{owner}: {name} must be True or False, got {value!r}")


def one_of(owner: str, name: str, value: object, literal: Any) -> None:
    """Refuse a value that is none of a Literal's."""
    known = get_args(literal)
    if value not in known:
        raise UserError(f"{owner}: {name} must be one of {', '.join(known)}, got {value!r}")


def unit_list(owner: str, units: Units, count: int) -> tuple[str, ...]:
    """One unit name per layer; a single one serves all layers. A function is registered by its name."""
    if not (isinstance(units, (str, tuple, list)) or callable(units)):
        raise UserError(f"{owner}: units must be a name, a function or one of them per layer, got {units!r}")
    each = (units,) if isinstance(units, str) or callable(units) else tuple(units)
    each = each * count if len(each) == 1 else each
    if len(each) != count:
        raise UserError(f"{owner}: {count} layers need {count} units (or one for all), got {each!r}")
    return tuple(named(unit) for unit in each)


@dataclass(frozen=True)
class PlusSpec:
    """One ⊕: depth, widths, units, shortcuts and where the input enters."""

    input_size: int
    hidden_size: int
    intermediate_sizes: tuple[int, ...] = ()
    units: tuple[str, ...] = ("sigmoid",)
    """a name or a function for all layers, or one each; kept as names"""
    shortcut: Shortcut = "none"
    """at depth 1 there is no layer to go around, and every value means the same"""
    input_to: Place = "first"
    input_mlp_sizes: tuple[int, ...] = ()
    input_mlp_units: tuple[str, ...] = ("sigmoid",)
    skip_size: int = 0
    """size of a second input that enters beside the first: the model's own, on the upper levels of a stack"""
    bias: bool = True
    symbols: bool = False
    """integer symbols instead of vectors (the skip input where there is one, else the input)"""
    stacked: bool = False
    """the input is another level's state"""

    def __post_init__(self) -> None:
        positive("Plus", input_size=self.input_size, hidden_size=self.hidden_size)
        positive_each(self, "Plus", "intermediate_sizes", "input_mlp_sizes")
        if self.skip_size != 0:
            positive("Plus", skip_size=self.skip_size)
        boolean("Plus", bias=self.bias, symbols=self.symbols, stacked=self.stacked)
        one_of("Plus", "shortcut", self.shortcut, Shortcut)
        one_of("Plus", "input_to", self.input_to, Place)
        object.__setattr__(self, "units", unit_list("Plus", self.units, self.depth))
        mlp = unit_list("Plus", self.input_mlp_units, len(self.input_mlp_sizes))
        object.__setattr__(self, "input_mlp_units", mlp)

    @property
    def embeds(self) -> bool:
        """Whether the input itself (not the skip input) is integer symbols."""
        return self.symbols and not self.skip_size

    @property
    def entering(self) -> int:
        """Width of what enters the transition, behind the input function; 0 where that is integer symbols."""
        if self.input_mlp_sizes:
            return self.input_mlp_sizes[-1]
        return 0 if self.embeds else self.input_size

    @property
    def depth(self) -> int:
        """Number of nonlinear layers between h(t-1) and h(t): 1 is the conventional RNN."""
        return len(self.intermediate_sizes) + 1

    @property
    def sizes(self) -> tuple[int, ...]:
        """Width of each layer's output, M_1 .. M_L, the last being the state's."""
        return (*self.intermediate_sizes, self.hidden_size)

    @property
    def unit_specs(self) -> tuple[UnitSpec, ...]:
        """The units as data, one per layer."""
        return tuple(UnitSpec.parse(u) for u in self.units)

    @property
    def widths(self) -> tuple[int, ...]:
        """Width of each layer's pre-activation: size times the unit's pool."""
        return tuple(m * u.pool for m, u in zip(self.sizes, self.unit_specs, strict=True))

    @property
    def shortcuts(self) -> tuple[bool, ...]:
        """Which layers receive h(t-1) directly; the first always does, through W_1."""
        last = self.depth - 1
        return tuple(l > 0 and (self.shortcut == "all" or (self.shortcut == "last" and l == last))
                     for l in range(self.depth))  # fmt: skip

    @property
    def inputs(self) -> tuple[bool, ...]:
        """Which layers receive the input."""
        wanted = {"first": {0}, "last": {self.depth - 1}, "all": set(range(self.depth))}[self.input_to]
        return tuple(l in wanted for l in range(self.depth))


def warn_idle_shortcut(owner: str, shortcut: str, intermediate_sizes: Sequence[int]) -> None:
    """Say that a shortcut has nothing to go around."""
    if shortcut != "none" and not intermediate_sizes:
        warnings.warn(f"{owner}: shortcut={shortcut!r} goes around intermediate layers, and there are none: give "
                      "intermediate_sizes, or leave the shortcut out", stacklevel=3)  # fmt: skip


class PlusSettings(TypedDict, total=False):
    """The fields of `PlusSpec` beside its two sizes, as keyword arguments."""

    intermediate_sizes: Sequence[int]
    units: Units
    shortcut: Shortcut
    input_to: Place
    input_mlp_sizes: Sequence[int]
    input_mlp_units: Units
    skip_size: int
    bias: bool
    symbols: bool
    stacked: bool


@dataclass(frozen=True)
class CellSpec:
    """One level that is a cell: a shipped one by its name, or a user's own by where it is written (`cells.lookup`)."""

    cell: str
    input_size: int
    hidden_size: int
    options: tuple[str, ...] = ()
    """the constructor's other arguments, as they are written: "depth=3" """
    symbols: bool = False
    """integer symbols, each of which becomes a learned vector as wide as the state"""
    stacked: bool = False
    """the input is another level's state"""

    skip_size = 0
    intermediate_sizes = ()
    units = ()
    depth = 1
    shortcut = "none"
    shortcuts = (False,)
    input_to = "first"

    def __post_init__(self) -> None:
        if not isinstance(self.cell, str) or not self.cell:
            raise UserError(f"cell: a name is expected, such as lstm or my_cells.py:Paced, got {self.cell!r}")
        positive("cell", input_size=self.input_size, hidden_size=self.hidden_size)
        boolean("cell", symbols=self.symbols, stacked=self.stacked)
        as_tuple(self, "options")

    @property
    def entering(self) -> int:
        """How wide the cell's own input is."""
        return self.hidden_size if self.symbols else self.input_size

    @property
    def input_mlp_sizes(self) -> tuple[int, ...]:
        """Layers in front of the cell: the embedding of symbols."""
        return (self.entering,) if self.symbols else ()


Level = PlusSpec | CellSpec


@dataclass(frozen=True)
class PredictSpec:
    """One ▷: hidden widths and units between the state and the logits."""

    input_size: int
    output_size: int
    sizes: tuple[int, ...] = ()
    units: tuple[str, ...] = ("sigmoid",)
    shortcut: bool = False
    bias: bool = True
    nade_size: int = 0
    """hidden units of the NADE above these layers; 0: none, they give the logits"""

    def __post_init__(self) -> None:
        positive("Predict", input_size=self.input_size, output_size=self.output_size)
        positive_each(self, "Predict", "sizes")
        if self.nade_size != 0:
            positive("Predict", nade_size=self.nade_size)
        boolean("Predict", shortcut=self.shortcut, bias=self.bias)
        if self.shortcut and not self.sizes:
            raise UserError("Predict: shortcut=True needs at least one hidden layer to go around (sizes=...)")
        object.__setattr__(self, "units", unit_list("Predict", self.units, len(self.sizes)))

    @property
    def unit_specs(self) -> tuple[UnitSpec, ...]:
        """The hidden layers' units as data."""
        return tuple(UnitSpec.parse(u) for u in self.units)


class PredictSettings(TypedDict, total=False):
    """The fields of `PredictSpec` beside its two sizes, as keyword arguments."""

    sizes: Sequence[int]
    units: Units
    shortcut: bool
    bias: bool


@dataclass(frozen=True)
class Dropout:
    """Probability of leaving a unit out, by place."""

    input: float = 0.0
    state: float = 0.0
    intermediate: float = 0.0
    output: float = 0.0
    per_sequence: bool = False
    """one mask for all steps of a call ("variational": Gal & Ghahramani, 2016); that of the state always is"""
    levels: float = 0.0
    """between one level of a stack and the next"""
    symbols: float = 0.0
    """whole symbols of an embedding, wherever they occur; their learned vectors are zero"""

    def __post_init__(self) -> None:
        for name in ("input", "state", "intermediate", "output", "levels", "symbols"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 1:
                raise UserError(f"dropout.{name} must be at least 0 and below 1, got {value!r}")
        boolean("dropout", per_sequence=self.per_sequence)


@dataclass(frozen=True)
class EmbeddingSpec:
    """A learned vector for each integer symbol, below the first level."""

    symbols: int
    size: int
    tied: bool = False
    """the vectors are the rows of ▷'s last matrix: one parameter for both (Press & Wolf, 2017; Inan et al., 2017)"""

    def __post_init__(self) -> None:
        positive("embedding", symbols=self.symbols, size=self.size)
        boolean("embedding", tied=self.tied)


@dataclass(frozen=True)
class ModelSpec:
    """A whole model: levels of ⊕, one ▷, and what the logits mean."""

    levels: tuple[Level, ...]
    predict: PredictSpec
    output: Output = "bernoulli"
    output_from: OutputFrom = "top"
    input_to_levels: LevelInput = "first"
    dropout: Dropout = field(default_factory=Dropout)
    embedding: EmbeddingSpec | None = None

    def __post_init__(self) -> None:
        as_tuple(self, "levels")
        one_of("model", "output", self.output, Output)
        one_of("model", "output_from", self.output_from, OutputFrom)
        one_of("model", "input_to_levels", self.input_to_levels, LevelInput)
        if not self.levels:
            raise UserError("model: at least one level is needed")
        if not isinstance(self.dropout, Dropout):
            raise UserError(
                f"model: dropout must be a Dropout, such as Dropout(output=0.5), got {self.dropout!r}"
            )
        self._check_dropout()
        if (self.output == "nade") != bool(self.predict.nade_size):
            raise UserError(
                f"model: output={self.output!r} and predict.nade_size={self.predict.nade_size} do not fit: a NADE "
                "needs at least 1 hidden unit, any other output has none"
            )
        if self.output == "nade" and self.symbols:
            raise UserError("model: output='nade' is for frames of notes, the input is integer symbols")
        self._check_cells()
        self._check_sizes()
        self._check_embedding()

    def _check_dropout(self) -> None:
        drop = self.dropout
        if drop.input and self.symbols and self.embedding is None:
            raise UserError(f"model: dropout.input={drop.input} has nothing to act on, the input is integer symbols: "
                            "use dropout.state, intermediate or output, or give the symbols learned vectors "
                            "(model.embedding = 200)")  # fmt: skip
        if drop.symbols and self.embedding is None:
            raise UserError(f"model: dropout.symbols={drop.symbols} leaves out vectors of an embedding, and there is "
                            "none: set model.embedding, such as 200")  # fmt: skip
        if drop.levels and len(self.levels) == 1:
            raise UserError(
                f"model: dropout.levels={drop.levels} acts between levels, and there is one: use dropout.output, or "
                "a stack (model.hidden = [200, 200])"
            )

    def _check_cells(self) -> None:
        cells = [level.cell for level in self.levels if isinstance(level, CellSpec)]
        if cells and self.dropout.intermediate:
            raise UserError(
                f"model: dropout.intermediate acts inside the paper's ⊕, not inside the cell {cells[0]}: use "
                'dropout.state, or zoneout, an option of shipped cells, as in model.cell_options = ["zoneout=0.1"]'
            )
        options = [o for level in self.levels if isinstance(level, CellSpec) for o in level.options]
        if self.dropout.state and any(o.partition("=")[0].strip() == "recurrent_dropout" for o in options):
            raise UserError(
                f"model: dropout.state={self.dropout.state} and the cell's option recurrent_dropout say the same "
                "thing: give one of them"
            )
        if cells and self.input_to_levels == "all":
            raise UserError(
                f"model: input_to_levels='all' needs levels of the paper's ⊕, the cell is {cells[0]}"
            )

    def _check_sizes(self) -> None:
        skip = self.levels[0].input_size if self.input_to_levels == "all" else 0
        for below, level in zip(self.levels, self.levels[1:], strict=False):
            if level.input_size != below.hidden_size:
                raise UserError(f"model: a level takes {level.input_size} inputs but the one below it has "
                                f"{below.hidden_size} units")  # fmt: skip
            if level.skip_size != skip:
                raise UserError(f"model: input_to_levels={self.input_to_levels!r} needs skip_size={skip} "
                                f"on every level above the first, got {level.skip_size}")  # fmt: skip
        top = self.levels[-1].hidden_size
        want = sum(p.hidden_size for p in self.levels) if self.output_from == "all" else top
        if self.predict.input_size != want:
            raise UserError(f"model: ▷ takes {self.predict.input_size} inputs but the state has {want} units")

    def _check_embedding(self) -> None:
        own = self.embedding
        if own is None:
            return
        if not isinstance(own, EmbeddingSpec):
            raise UserError(f"model: embedding must be an EmbeddingSpec or None, got {own!r}")
        if any(level.symbols for level in self.levels) or self.levels[0].input_size != own.size:
            raise UserError(
                f"model: an embedding gives the first level vectors of {own.size}, but it takes "
                f"{'symbols' if self.levels[0].symbols else self.levels[0].input_size}"
            )
        if not own.tied:
            return
        last = self.predict.sizes[-1] if self.predict.sizes else self.predict.input_size
        if last != own.size or self.predict.output_size != own.symbols:
            raise UserError(
                f"model: tied embeddings need an output matrix of the embedding's shape, {own.symbols:,} x {own.size}, "
                f"but ▷'s last one is {self.predict.output_size:,} x {last}: set model.embedding = {last}, or put a "
                f'projection in between (model.output_hidden = [{own.size}], output_unit = "identity")'
            )
        if self.predict.shortcut:
            raise UserError(
                "model: tied embeddings and output_shortcut exclude each other: ▷ has two last matrices then"
            )

    @property
    def symbols(self) -> bool:
        """Whether the input is integer symbols rather than vectors."""
        return self.embedding is not None or self.levels[0].symbols

    @property
    def input_size(self) -> int:
        """Length of an input vector, or the number of symbols."""
        return self.levels[0].input_size if self.embedding is None else self.embedding.symbols

    @property
    def output_size(self) -> int:
        """Number of notes or symbols predicted per step."""
        return self.predict.output_size

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON or TOML."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> ModelSpec:
        """Read what `to_dict` wrote; unknown keys are errors."""
        data = dict(mapping("model", data))
        levels = data.pop("levels", ())
        if not isinstance(levels, (list, tuple)):
            raise UserError(f"model: levels must be a list of tables, got {levels!r}")
        levels = tuple(
            read(CellSpec if "cell" in mapping("PlusSpec", level) else PlusSpec, level) for level in levels
        )
        predict = read(PredictSpec, data.pop("predict", {}))
        dropout = read(Dropout, data.pop("dropout", {}))
        embedding = data.pop("embedding", None)
        embedding = None if embedding is None else read(EmbeddingSpec, embedding)
        parts = {"levels": levels, "predict": predict, "dropout": dropout, "embedding": embedding}
        return read(cls, {**data, **parts})


def mapping(owner: str, data: Any) -> dict[str, Any]:
    """The data itself, refused where it is no table of named fields."""
    if not isinstance(data, dict):
        raise UserError(f"{owner}: a table of named fields is expected, got {data!r}")
    return data


def as_tuple(spec: object, *names: str) -> None:
    """Let lists (from JSON or a careless caller) stand where tuples are kept, so that specs hash."""
    for name in names:
        object.__setattr__(spec, name, tuple(getattr(spec, name)))


def positive_each(spec: object, owner: str, *names: str) -> None:
    """Keep lists of sizes as tuples, refusing what is not a list of whole numbers of at least 1."""
    for name in names:
        value = getattr(spec, name)
        if not isinstance(value, (tuple, list)):
            raise UserError(f"{owner}: {name} must be a list of sizes, such as ({value!r},), got {value!r}")
        as_tuple(spec, name)
        for i, size in enumerate(value):
            positive(owner, **{f"{name}[{i}]": size})


def read(cls: type[T], data: dict[str, Any]) -> T:
    """Make a dataclass from plain data; an unknown key is an error that lists the known ones."""
    known = [f.name for f in dataclasses.fields(cls)]  # type: ignore[arg-type]
    for key in mapping(cls.__name__, data):
        if key not in known:
            near = get_close_matches(key, known, n=1)
            hint = f" (did you mean {near[0]!r}?)" if near else ""
            raise UserError(f"{cls.__name__}: unknown field {key!r}{hint}: known are {', '.join(known)}")
    for f in dataclasses.fields(cls):  # type: ignore[arg-type]
        has_default = f.default is not dataclasses.MISSING or f.default_factory is not dataclasses.MISSING
        if f.name not in data and not has_default:
            raise UserError(f"{cls.__name__}: field {f.name!r} is missing: known are {', '.join(known)}")
    clean = {k: tuple(v) if isinstance(v, list) else v for k, v in data.items()}
    return cls(**clean)
