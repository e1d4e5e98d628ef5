"""The shipped cells by name, as recipes and the command line know them."""

from __future__ import annotations

from functools import partial
from typing import Any

from deeprnn.cells.cell import Cell
from deeprnn.cells.gru import GRU, MGU, UGRNN
from deeprnn.cells.highway import RHN
from deeprnn.cells.layer_norm import LayerNormGRU, LayerNormLSTM
from deeprnn.cells.lstm import LSTM, CoupledLSTM, MogrifierLSTM
from deeprnn.cells.simple import RNN, IndRNN, LeakyRNN

LIBRARY: dict[str, Any] = {
    "rnn": RNN,
    "leaky": LeakyRNN,
    "indrnn": IndRNN,
    "gru": GRU,
    "gru-before": partial(GRU, reset="before"),
    "mgu": MGU,
    "ugrnn": UGRNN,
    "lstm": LSTM,
    "peephole-lstm": partial(LSTM, peepholes=True),
    "coupled-lstm": CoupledLSTM,
    "mogrifier": MogrifierLSTM,
    "layer-norm-gru": LayerNormGRU,
    "layer-norm-lstm": LayerNormLSTM,
    "rhn": RHN,
}
"""each is called with an input size, a hidden size and options"""

__all__ = [
    "GRU",
    "LIBRARY",
    "LSTM",
    "MGU",
    "RHN",
    "RNN",
    "UGRNN",
    "Cell",
    "CoupledLSTM",
    "IndRNN",
    "LayerNormGRU",
    "LayerNormLSTM",
    "LeakyRNN",
    "MogrifierLSTM",
]
