"""Deep recurrent neural networks: deep transition, deep output and stacked RNNs, readable and fast."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_WHERE = {
    "DeepRNN": "model.layers",
    "GRU": "model.drop_in",
    "LSTM": "model.drop_in",
    "RHN": "model.recurrent",
    "Cell": "cells.cell",
    "Recurrent": "model.recurrent",
    "Plus": "model.plus",
    "Predict": "model.predict",
    "NadePredict": "model.nade",
    "SequenceModel": "model.sequence_model",
    "build": "model.models",
    "assemble": "model.models",
    "rnn": "model.models",
    "dt_rnn": "model.models",
    "dts_rnn": "model.models",
    "do_rnn": "model.models",
    "dot_rnn": "model.models",
    "dots_rnn": "model.models",
    "stacked_rnn": "model.models",
    "stacked_dts_rnn": "model.models",
    "ModelSpec": "model.specs",
    "PlusSpec": "model.operator_specs",
    "PredictSpec": "model.operator_specs",
    "Dropout": "model.specs",
    "InitSpec": "model.init",
    "UserError": "errors",
    "load_run": "runs.folder",
    "load_data": "data",
}

__all__ = ["__version__", *_WHERE]

if TYPE_CHECKING:
    from deeprnn.cells.cell import Cell
    from deeprnn.data import load as load_data
    from deeprnn.errors import UserError
    from deeprnn.model.drop_in import GRU, LSTM
    from deeprnn.model.init import InitSpec
    from deeprnn.model.layers import DeepRNN
    from deeprnn.model.models import (
        assemble,
        build,
        do_rnn,
        dot_rnn,
        dots_rnn,
        dt_rnn,
        dts_rnn,
        rnn,
        stacked_dts_rnn,
        stacked_rnn,
    )
    from deeprnn.model.nade import NadePredict
    from deeprnn.model.operator_specs import PlusSpec, PredictSpec
    from deeprnn.model.plus import Plus
    from deeprnn.model.predict import Predict
    from deeprnn.model.recurrent import RHN, Recurrent
    from deeprnn.model.sequence_model import SequenceModel
    from deeprnn.model.specs import Dropout, ModelSpec
    from deeprnn.runs.folder import load_run


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used, so that `import deeprnn` stays light."""
    if name not in _WHERE:
        raise AttributeError(f"module 'deeprnn' has no attribute {name!r}")
    from importlib import import_module

    module = import_module(f"deeprnn.{_WHERE[name]}")
    value = getattr(module, "load" if name == "load_data" else name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
