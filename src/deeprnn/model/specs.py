"""What a model is, as data: frozen, hashable, and the same in memory, recipe and checkpoint."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Literal

from deeprnn.errors import UserError
from deeprnn.model.operator_specs import CellSpec, Level, PlusSpec, PredictSpec
from deeprnn.model.spec_fields import as_tuple, boolean, mapping, one_of, positive, read

Output = Literal["bernoulli", "categorical", "nade"]
"""what ▷ gives: independent bits, one of many symbols, or bits that depend on each other (a NADE)"""
OutputFrom = Literal["top", "all"]
"""which levels' states ▷ reads"""
LevelInput = Literal["first", "all"]
"""which levels read the model's input"""


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
        embedding = self.embedding
        if embedding is None:
            return
        if not isinstance(embedding, EmbeddingSpec):
            raise UserError(f"model: embedding must be an EmbeddingSpec or None, got {embedding!r}")
        size, symbols = embedding.size, embedding.symbols
        if any(level.symbols for level in self.levels) or self.levels[0].input_size != size:
            raise UserError(
                f"model: an embedding gives the first level vectors of {size}, but it takes "
                f"{'symbols' if self.levels[0].symbols else self.levels[0].input_size}"
            )
        if not embedding.tied:
            return
        last = self.predict.sizes[-1] if self.predict.sizes else self.predict.input_size
        if last != size or self.predict.output_size != symbols:
            raise UserError(
                f"model: tied embeddings need an output matrix of the embedding's shape, {symbols:,} x {size}, "
                f"but ▷'s last one is {self.predict.output_size:,} x {last}: set model.embedding = {last}, or put a "
                f'projection in between (model.output_hidden = [{size}], output_unit = "identity")'
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
