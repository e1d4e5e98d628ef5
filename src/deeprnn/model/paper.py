"""The numbers the paper prints: Table 1's sizes, and the 23 results of Tables 2 and 3."""

from __future__ import annotations

from dataclasses import dataclass

from deeprnn.model.models import assemble
from deeprnn.model.specs import ModelSpec

INPUTS = {"nottingham": 88, "jsb": 88, "musedata": 88, "ptb-char": 50, "ptb-word": 10_000}
LABELS = {"rnn": "RNN", "dts": "DT(S)-RNN", "dots": "DOT(S)-RNN", "srnn": "sRNN", "dots-star": "DOT(S)-RNN*"}
KINDS = {"nottingham": "music", "jsb": "music", "musedata": "music", "ptb-char": "char", "ptb-word": "word"}


@dataclass(frozen=True)
class Size:
    """One entry of Table 1: units as printed, and the printed number of parameters."""

    data: str
    model: str
    units: tuple[int, ...]
    printed: str


@dataclass(frozen=True)
class Cell:
    """One result of Table 2 or 3 (test set)."""

    table: int
    data: str
    model: str
    value: float

    @property
    def kind(self) -> str:
        """Of the data, which decides the value's metric: music, char or word."""
        return KINDS[self.data]


def _sizes() -> tuple[Size, ...]:
    rows = {
        "nottingham": ((600,), "465K", (400, 400), "585K", (400, 400, 400), "745K", (400,), "550K"),
        "jsb": ((200,), "75K", (400, 400), "585K", (400, 400, 400), "745K", (400,), "550K"),
        "musedata": ((600,), "465K", (400, 400), "585K", (400, 400, 400), "745K", (600,), "1185K"),
        "ptb-char": ((600,), "420K", (400, 400), "540K", (400, 400, 600), "790K", (400,), "520K"),
        "ptb-word": ((200,), "4.04M", (200, 200), "6.12M", (200, 200, 200), "6.16M", (400,), "8.48M"),
    }
    out = []
    for data, row in rows.items():
        for i, model in enumerate(("rnn", "dts", "dots", "srnn")):
            out.append(Size(data, model, row[2 * i], row[2 * i + 1]))  # type: ignore[arg-type]
    return tuple(out)


TABLE1 = _sizes()

CELLS = tuple(
    Cell(table, data, model, value)
    for table, data, values in (
        (2, "nottingham", (3.225, 3.206, 3.215, 3.258, 2.95)),
        (2, "jsb", (8.338, 8.278, 8.437, 8.367, 7.92)),
        (2, "musedata", (6.990, 6.988, 6.973, 6.954, 6.59)),
        (3, "ptb-char", (1.414, 1.409, 1.386, 1.412)),
        (3, "ptb-word", (117.7, 112.0, 107.5, 110.0)),
    )
    for model, value in zip(LABELS, values, strict=False)
)


def result(data: str, model: str) -> float | None:
    """The paper's test result for a data set and model, None where it has none."""
    return next((c.value for c in CELLS if c.data == data and c.model == model), None)


def size(data: str, model: str) -> Size:
    """The entry of Table 1."""
    return next(s for s in TABLE1 if s.data == data and s.model == model)


def spec(data: str, model: str) -> ModelSpec:
    """The model of Table 1 for a data set, as the parameter counts settle it."""
    n, units = INPUTS[data], size(data, model).units
    text = data.startswith("ptb")
    common = {"input_size": n, "output_size": n, "output": "categorical" if text else "bernoulli"}
    deep = {"shortcut": "last", "input_to": "all"}
    if model == "rnn":
        return assemble(hidden_sizes=units, **common)
    if model == "srnn":
        return assemble(hidden_sizes=units * 2, **common)
    if model == "dts":
        return assemble(hidden_sizes=units[:1], intermediate=units[1], **deep, **common)
    rectified = "relu" if data == "ptb-char" else "sigmoid"
    return assemble(hidden_sizes=units[:1], intermediate=units[1], output_hidden=units[2],
                    output_unit=rectified, **deep, **common)  # fmt: skip
