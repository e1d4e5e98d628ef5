"""Where a running epoch stands, as a run folder tells it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from deeprnn.training.loop import Trainer
from deeprnn.training.progress import NAME, Progress
from deeprnn.training.session import run_recipe
from tests.training.toys import music, recipe


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / NAME).read_text().splitlines()]


class Looker:
    """Remembers what the file held after each update."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.seen = folder, []

    def updated(self, trainer: Trainer) -> None:
        if (self.folder / NAME).exists():
            self.seen.append(lines(self.folder)[-1])

    def epoch_ended(self, trainer: Trainer, rows: Sequence[Mapping[str, Any] | None]) -> None:
        assert not (self.folder / NAME).exists()


def test_the_lines_of_an_epoch_add_up_to_it(tmp_path: Path) -> None:
    trainer = Trainer(recipe(stop__epochs=1), music())
    progress, looker = Progress([tmp_path], pause=0), Looker(tmp_path)
    trainer.train_epoch([progress, looker])
    rows = lines(tmp_path)
    assert rows == looker.seen
    assert len(rows) == trainer.length
    assert [row["epoch"] for row in rows] == [
        round((i + 1) / trainer.length, 4) for i in range(trainer.length)
    ]
    count = trainer.updater.sums["count"].item()
    sizes = [count / trainer.length] * trainer.length  # chunks of nearly one length
    whole = sum(row["train"] * n for row, n in zip(rows, sizes, strict=True)) / count
    (ended,) = trainer.end_epoch()
    assert ended is not None
    assert whole == pytest.approx(ended["train"], rel=0.05)
    progress.epoch_ended(trainer, [ended])
    assert not (tmp_path / NAME).exists()


def test_lines_come_no_more_often_than_asked(tmp_path: Path) -> None:
    now = [0.0]
    trainer = Trainer(recipe(), music())
    progress = Progress([tmp_path], pause=10, clock=lambda: now[0])

    class Clock(Looker):
        def updated(self, trainer: Trainer) -> None:
            now[0] += 4

    trainer.train_epoch([Clock(tmp_path), progress])
    assert len(lines(tmp_path)) == 4 * trainer.length // 12


def test_members_have_their_own(tmp_path: Path) -> None:
    homes = [tmp_path / name for name in ("a", "b")]
    for home in homes:
        home.mkdir()
    trainer = Trainer(recipe(seeds=[1, 2]), music())
    trainer.train_epoch([Progress(homes, pause=0)])
    a, b = (lines(home) for home in homes)
    assert len(a) == len(b) == trainer.length
    assert a != b


def test_a_run_goes_on_where_it_cannot_be_written(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trainer = Trainer(recipe(stop__epochs=1), music())
    trainer.train([Progress([tmp_path / "gone"], pause=0)])
    assert sum("the page shows whole epochs only" in message for message in caplog.messages) == 1


def test_nothing_is_left_of_it_after_a_run(tmp_path: Path) -> None:
    run_recipe(recipe(), tmp_path / "run", data=music())
    assert not (tmp_path / "run" / NAME).exists()
    assert json.loads((tmp_path / "run" / "openings.json").read_text())[0]["name"] == "test-0000"
