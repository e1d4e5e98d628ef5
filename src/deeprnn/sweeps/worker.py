"""In a worker: train a pack, report its epochs to the board, and read each data set once."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from threading import Lock
from typing import Any

from deeprnn.sweeps.engines import INTERRUPT_POLL, Board, InterruptFlag
from deeprnn.sweeps.pack import Pack, Result, train_pack
from deeprnn.sweeps.storage import Store
from deeprnn.training import saving, session
from deeprnn.training.recipe import DataPart, Recipe


def train_and_report(
    board: Board, device: str, pack: Pack, root: str, stopped: Sequence[int], store: Store | None
) -> list[Result] | None:
    """Train a pack and tell the board of it; None where everybody was to stop."""
    report: Callable[..., Any] = board.report
    try:
        return train_pack(
            pack,
            Path(root),
            device,
            data=load_data(pack.recipes[0]),
            report=lambda rows: report(pack.number, rows),
            received=InterruptFlag(board.interrupted, 0.0 if isinstance(board, Board) else INTERRUPT_POLL),
            stopped=stopped,
            store=store,
        )
    except saving.Interrupted:
        return None


_LOADING = Lock()


def load_data(recipe: Recipe) -> Any:
    """What a recipe trains on, read once, and its warnings told once, by the coordinator and its threads together."""
    with _LOADING:  # threads that want the same data wait for the one that reads it
        return _load(json.dumps(recipe.to_dict()["data"]))


@lru_cache(maxsize=4)
def _load(part: str) -> Any:
    return session.load_data(DataPart(**json.loads(part)))


def forget_data() -> None:
    """Read data anew the next time: files may have changed since."""
    _load.cache_clear()
