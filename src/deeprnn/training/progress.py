"""Where an epoch stands, for whoever looks at a run folder while it trains.

Lines of progress.jsonl are like those of metrics.jsonl, with a fraction for an epoch and the training score since the
line before. The file belongs to the running epoch and goes with it; nothing is computed from it.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deeprnn.model import metrics

if TYPE_CHECKING:
    from deeprnn.training.loop import Trainer

logger = logging.getLogger("deeprnn")

NAME = "progress.jsonl"
PAUSE = 2.0
"""seconds between two lines: on a GPU reading the sums waits for the device"""
MOST = 500
"""lines of one epoch; a long one then has them further apart"""


class Progress:
    """Watches a trainer and writes how its epoch goes into each member's folder."""

    def __init__(
        self, homes: Sequence[Path], pause: float = PAUSE, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.homes, self.clock = homes, clock
        self._pause = self._first_pause = pause
        self._written_at = clock()
        self._sums: list[dict[str, float]] = [{} for _ in homes]
        self._lines = 0
        self._failed = False
        self._remove()

    def updated(self, trainer: Trainer) -> None:
        """A line, where the last one is long enough ago."""
        now = self.clock()
        if now - self._written_at < self._pause or self._failed:
            return
        self._written_at = now
        sums = {name: values.tolist() for name, values in trainer.updater.sums.items()}
        rates = trainer.schedule.rates(trainer.updater.tau - 1).tolist()
        for p, home in enumerate(self.homes):
            totals = {name: values[p] for name, values in sums.items()}
            part = {name: value - self._sums[p].get(name, 0.0) for name, value in totals.items()}
            self._sums[p] = totals
            if part["updates"] and not trainer.schedule.members[p].finished:
                self._append(home, _row(trainer, part, rates[p]))
        self._lines += 1
        if self._lines % MOST == 0:
            self._pause *= 2

    def epoch_ended(self, trainer: Trainer, rows: Sequence[Mapping[str, Any] | None]) -> None:
        """The epoch has its line in metrics.jsonl now."""
        self._remove()
        self._written_at, self._pause, self._lines = self.clock(), self._first_pause, 0
        self._sums = [{} for _ in self.homes]

    def _append(self, home: Path, row: Mapping[str, Any]) -> None:
        try:
            with open(home / NAME, "a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
        except OSError as error:  # a run does not end because nobody can watch it
            self._failed = True
            logger.warning(
                "%s cannot be written (%s): the page shows whole epochs only", home / NAME, error.strerror
            )

    def _remove(self) -> None:
        for home in self.homes:
            (home / NAME).unlink(missing_ok=True)


def _row(trainer: Trainer, sums: Mapping[str, float], rate: float) -> dict[str, Any]:
    return {
        "epoch": round(trainer.epoch - 1 + trainer.index / trainer.length, 4),
        "step": int(trainer.updater.tau),
        "train": metrics.headline(trainer.data.kind, sums["nats"], int(sums["count"])),
        "rate": rate,
        "grad_norm": sums["norm"] / sums["updates"],
        "seconds": round(trainer.seconds, 3),
    }
