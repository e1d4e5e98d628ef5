"""The models the paper names or suggests but does not train: does the shortcut help, does more depth?"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from deeprnn.model import paper
from deeprnn.model.structure import dissect
from deeprnn.reproduction import statistics
from deeprnn.reproduction.cells import chosen, model_spec
from deeprnn.reproduction.deviations import marks_of
from deeprnn.reproduction.entries import Entry

LABELS = {
    "dt": "DT-RNN",
    "do": "DO-RNN",
    "dot": "DOT-RNN",
    "sdts": "sDT(S)-RNN",
    "dts3": "DT(S)-RNN, depth 3",
    "dts4": "DT(S)-RNN, depth 4",
}
"""name in recipes/extra/<data>/<name>.toml -> label"""


@dataclass(frozen=True)
class ExtraRow:
    """One extra model on one data set."""

    data: str
    model: str
    entries: tuple[Entry, ...]

    @property
    def label(self) -> str:
        """The model's name in tables; with its units where its name is that of a cell of the paper."""
        units = self.entries[0].recipe.model.hidden[0]
        return LABELS.get(self.model) or f"{paper.LABELS[self.model]}, {units} units"

    @property
    def values(self) -> list[float]:
        """Test results, in order of seeds."""
        return [e.value() for e in self.entries]

    @property
    def ours(self) -> float:
        """Mean over seeds."""
        return statistics.mean(self.values)

    @property
    def sd(self) -> float | None:
        """Sample standard deviation over seeds."""
        return statistics.deviation(self.values)

    @property
    def marks(self) -> tuple[str, ...]:
        """What a reader must know of some of the runs."""
        return marks_of(self.entries)

    @property
    def parameters(self) -> int:
        """Weights of the model, biases included."""
        return parameters(self.entries[0])

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {"data": self.data, "model": self.model, "label": self.label, "parameters": self.parameters,
                "ours": self.ours, "sd": self.sd, "seeds": len(self.entries), "marks": list(self.marks)}  # fmt: skip


def level_rows(entries: Iterable[Entry]) -> list[ExtraRow]:
    """RNNs of the size of an sRNN's level, which its first stages are: what a wider shallow model has by itself."""
    entries = [e for e in entries if e.model == "rnn" and e.has_test]
    out = []
    for data in paper.INPUTS:
        level = paper.size(data, "srnn").units
        if level == paper.size(data, "rnn").units:
            continue
        seeds = chosen([e for e in entries if (e.data, e.recipe.model.hidden) == (data, level)])
        if seeds:
            out.append(ExtraRow(data, "rnn", seeds))
    return out


def parameters(entry: Entry) -> int:
    """How many numbers a run's model learns."""
    return dissect(model_spec(entry.recipe)).parameters


def extra_rows(entries: Iterable[Entry]) -> list[ExtraRow]:
    """Every extra model that has runs, by data set."""
    entries = list(entries)
    out = []
    for data in paper.INPUTS:
        for model in LABELS:
            seeds = chosen([e for e in entries if (e.data, e.model) == (data, model) and e.has_test])
            if seeds:
                out.append(ExtraRow(data, model, seeds))
    return out
