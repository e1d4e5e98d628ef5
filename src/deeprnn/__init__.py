"""Deep recurrent neural networks: deep transition, deep output and stacked RNNs, readable and fast."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_WHERE = {
    "DeepRNN": "layers",
    "Plus": "operators",
    "Predict": "operators",
    "SequenceModel": "models",
    "build": "models",
    "assemble": "models",
    "rnn": "models",
    "dt_rnn": "models",
    "dts_rnn": "models",
    "do_rnn": "models",
    "dot_rnn": "models",
    "dots_rnn": "models",
    "stacked_rnn": "models",
    "stacked_dts_rnn": "models",
    "ModelSpec": "specs",
    "PlusSpec": "specs",
    "PredictSpec": "specs",
    "Dropout": "specs",
    "InitSpec": "init",
    "UserError": "errors",
    "load_run": "runs",
    "load_data": "data",
}

__all__ = ["__version__", *_WHERE]

if TYPE_CHECKING:
    from deeprnn.data import load as load_data
    from deeprnn.errors import UserError
    from deeprnn.init import InitSpec
    from deeprnn.layers import DeepRNN
    from deeprnn.models import (
        SequenceModel,
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
    from deeprnn.operators import Plus, Predict
    from deeprnn.runs import load_run
    from deeprnn.specs import Dropout, ModelSpec, PlusSpec, PredictSpec


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
