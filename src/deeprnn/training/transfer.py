"""A model starts from another's parameters: levels by name and size, inputs and outputs by their symbols.

A symbol (a character, a word, a pitch) keeps what was learnt about it wherever it stands in either vocabulary; the
output function is taken over only from the very same model, for other data or for more of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from deeprnn.data.music import Grid
from deeprnn.data.text import TextData
from deeprnn.errors import UserError
from deeprnn.model.sequence_model import SequenceModel
from deeprnn.model.specs import Dropout, ModelSpec
from deeprnn.runs import ledger
from deeprnn.runs.checkpoint import load_best
from deeprnn.runs.folder import Run
from deeprnn.training.evaluate import Data
from deeprnn.training.flat import Layout
from deeprnn.training.recipe import ModelPart, Recipe


@dataclass(frozen=True)
class Source:
    """What a model starts from: parameters by name and, where it is known, whose they are."""

    tensors: Mapping[str, Tensor]
    spec: ModelSpec | None = None
    kind: str = ""
    """music, char or word"""
    symbols: Sequence[str | int] | None = None
    """what each input and output stands for: the vocabulary, or MIDI numbers"""
    name: str = "the first stage"
    origin: Mapping[str, Any] | None = None
    """how the run that they come from was trained, as `ledger.origin` tells it"""

    @classmethod
    def of(cls, run: Run) -> Source:
        """A run's best parameters."""
        symbols = run.vocabulary or _pitches(run.grid)
        return cls(
            load_best(run.path).tensors, run.spec, run.kind, symbols, str(run.path), ledger.origin(run)
        )

    def meta(self) -> dict[str, Any]:
        """Everything but the tensors as plain data."""
        spec = None if self.spec is None else self.spec.to_dict()
        symbols = None if self.symbols is None else list(self.symbols)
        return {"model": spec, "kind": self.kind, "symbols": symbols, "run": self.name, "origin": self.origin}

    @classmethod
    def from_meta(cls, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> Source:
        """Read what `meta` wrote; a folder of an earlier version has tensors alone."""
        spec = meta.get("model")
        spec = None if spec is None else ModelSpec.from_dict(spec)
        name, origin = meta.get("run", cls.name), meta.get("origin")
        return cls(tensors, spec, meta.get("kind", ""), meta.get("symbols"), name, origin)


def symbols_of(data: Data) -> Sequence[str | int] | None:
    """What each input and output of a model for this data stands for, None where that is not known."""
    return data.vocabulary if isinstance(data, TextData) else _pitches(data.grid)


def _pitches(grid: Grid | None) -> Sequence[int] | None:
    return None if grid is None else range(grid.low, grid.high + 1)


class Transfer:
    """Which parameters of a model start from a source's, and which of their rows belong to symbols of both."""

    def __init__(self, layout: Layout, model: ModelPart, data: Data, source: Source) -> None:
        self.layout, self.source = layout, source
        self.shapes = dict(zip(layout.names, layout.shapes, strict=True))
        self.axes = _symbol_axes(model, data)
        spec = _spec(model, data, data.size)
        _check_kind(source, data)
        self.rows_to, self.rows_from = _common(symbols_of(data), source.symbols)
        names: list[str] = []
        for number in range(len(spec.levels)):
            names += self._level(f"levels.{number}.", number, spec)
        names += [n for n in self._level("embedding.", 0, spec) if names]
        if not names:
            raise UserError(f"nothing could be transferred: {source.name} has no level of the same sizes")
        if source.spec is not None and _same_but_data(model, data, source):
            names += [n for n in layout.names if n.startswith("predict.")]
        self.names = tuple(names)

    def _level(self, prefix: str, number: int, spec: ModelSpec) -> list[str]:
        """The parameters of one level that the source has too; none where any has other sizes there."""
        names = [n for n in self.layout.names if n.startswith(prefix) and n in self.source.tensors]
        if not names or not all(self._fits(name) for name in names):
            return []
        if self.source.spec is not None:
            units, source_units = spec.levels[number].units, self.source.spec.levels[number].units
            if units != source_units:
                raise UserError(
                    f"{prefix}* of {self.source.name} was trained with {', '.join(source_units)} units, this model has "
                    f"{', '.join(units)}: choose the same with --model.unit"
                )
        return names

    def _fits(self, name: str) -> bool:
        shape, source_shape = list(self.shapes[name]), list(self.source.tensors[name].shape)
        axis = self.axes.get(name)
        if axis is not None and self.rows_to is not None and len(shape) == len(source_shape):
            shape[axis] = source_shape[axis] = 0
        return shape == source_shape

    @torch.no_grad()
    def copy(self, row: Tensor) -> None:
        """Put the source's parameters into a member's flat ones (N,)."""
        views = self.layout.views(row)
        for name in self.names:
            axis, source = self.axes.get(name), self.source.tensors[name].to(row)
            if axis is None or self.rows_to is None:
                views[name].copy_(source)
            else:
                views[name].index_copy_(
                    axis,
                    self.rows_to.to(row.device),
                    source.index_select(axis, self.rows_from.to(row.device)),
                )

    def multipliers(self, rate: float, like: Tensor) -> Tensor:
        """(N,) rate multipliers: `rate` for what was transferred, 1 for the rest."""
        out = torch.ones(self.layout.width, dtype=like.dtype, device=like.device)
        views = self.layout.views(out)
        for name in self.names:
            axis = self.axes.get(name)
            if axis is None or self.rows_to is None:
                views[name].fill_(rate)
            else:
                views[name].index_fill_(axis, self.rows_to.to(like.device), rate)
        return out

    def report(self, symbols: Sequence[str | int] | None) -> list[str]:
        """What was transferred and what not, a sentence each; `symbols` are those of the data here."""
        rest = [n for n in self.layout.names if n not in self.names]
        lines = [f"from {self.source.name}: {_grouped(self.names)}"]
        if rest:
            lines.append(f"not from there, but new: {_grouped(rest)}")
        if self.rows_to is not None and symbols is not None and self.source.symbols is not None:
            known = {symbols[i] for i in self.rows_to.tolist()}
            what = "pitches" if isinstance(symbols, range) else "symbols"
            lines.append(f"{len(known):,} of {len(symbols):,} {what} are known there")
            lines[-1] += _examples("new here", [s for s in symbols if s not in known])
            lines[-1] += _examples("left behind", [s for s in self.source.symbols if s not in known])
        return lines


def check_transfer(recipe: Recipe, data: Data, source: Source) -> None:
    """Refuse a source that a run by this recipe cannot start from."""
    model = SequenceModel(_spec(recipe.model, data, data.size), "meta", initialise=False)
    Transfer(Layout.of(model), recipe.model, data, source)


def _spec(model: ModelPart, data: Data, size: int) -> ModelSpec:
    return model.spec(size, data.kind != "music", Dropout())


def _symbol_axes(model: ModelPart, data: Data) -> dict[str, int]:
    """By parameter, the dimension that has one entry a symbol: it is the one that grows with the data's size."""
    a, b = (
        dict(SequenceModel(_spec(model, data, size), "meta", initialise=False).named_parameters())
        for size in (data.size, data.size + 1)
    )
    grows = {n: [d for d in range(a[n].dim()) if a[n].shape[d] != b[n].shape[d]] for n in a}
    return {name: dims[0] for name, dims in grows.items() if dims}


def _check_kind(source: Source, data: Data) -> None:
    if source.kind and source.kind != data.kind:
        words = {"music": "music", "char": "characters", "word": "words"}
        raise UserError(
            f"{source.name} is a model of {words[source.kind]}, which a model of {words[data.kind]} cannot start from"
        )


def _common(
    symbols: Sequence[str | int] | None, source_symbols: Sequence[str | int] | None
) -> tuple[Tensor | None, Tensor]:
    """The places of the symbols that both have, in either; None where symbols are not known: by position."""
    if symbols is None or source_symbols is None:
        return None, torch.empty(0, dtype=torch.int64)
    places = {symbol: place for place, symbol in enumerate(source_symbols)}
    pairs = [(i, places[symbol]) for i, symbol in enumerate(symbols) if symbol in places]
    if not pairs:
        raise UserError("nothing could be transferred: the two vocabularies have no symbol in common")
    a, b = torch.tensor(pairs, dtype=torch.int64).T
    return a, b


def _same_but_data(model: ModelPart, data: Data, source: Source) -> bool:
    """Whether the source is this very model, perhaps for other symbols: then its output function serves too."""
    assert source.spec is not None
    size = source.spec.predict.output_size
    return replace(_spec(model, data, size), dropout=source.spec.dropout) == source.spec


def _grouped(names: Sequence[str]) -> str:
    """levels.0 (W1, U1, b1), predict (V1, b1)"""
    groups: dict[str, list[str]] = {}
    for name in sorted(names):
        place, _, parameter = name.rpartition(".")
        groups.setdefault(place, []).append(parameter)
    return ", ".join(f"{place} ({', '.join(parameter)})" for place, parameter in groups.items())


def _examples(what: str, symbols: Sequence[str | int]) -> str:
    if not symbols:
        return ""
    shown = " ".join(repr(s) if isinstance(s, str) else str(s) for s in symbols[:8])
    return f"; {what}: {shown}{' …' if len(symbols) > 8 else ''}"
