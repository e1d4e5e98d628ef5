"""In a worker: train a pack, and report its epochs to the board."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from deeprnn.sweeps.engines import INTERRUPT_POLL, Board, InterruptFlag
from deeprnn.sweeps.pack import Pack, Result, train_pack
from deeprnn.sweeps.storage import Store
from deeprnn.training import saving
from deeprnn.training.loading import load_data_once


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
            data=load_data_once(pack.recipes[0].data),
            report=lambda rows: report(pack.number, rows),
            received=InterruptFlag(board.interrupted, 0.0 if isinstance(board, Board) else INTERRUPT_POLL),
            stopped=stopped,
            store=store,
        )
    except saving.Interrupted:
        return None
