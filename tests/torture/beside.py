"""Others beside a run: a second trainer is refused and changes nothing, readers disturb nobody."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

from tests.torture import child, disk
from tests.torture.attack import Arena, attack
from tests.torture.kills import LIFE, check_same, undisturbed
from tests.torture.stories import ENDING, QUIETLY, SMALL, STORIES, Story

OTHERS: dict[str, tuple[str, ...]] = {
    "resume": ("resume", "RUN", *QUIETLY),
    "train": ("train", "BOOK", *SMALL, *ENDING, "--out", "RUNS", "--name", "toy", *QUIETLY),
    "resume its first stage": ("resume", "RUN/pretrain", *QUIETLY),
    "runs": ("runs", "RUNS"),
    "describe": ("describe", "RUN"),
    "evaluate": ("evaluate", "RUN", "--device", "cpu", "--threads", "1"),
}
TRAINERS = ("resume", "train", "resume its first stage")


@attack("others beside a run", share=1.5)
def beside(arena: Arena) -> None:
    """A run stands still before each of its writes; meanwhile others try the same folder, and it ends as ever."""
    cases, expected = [], {}
    for story in STORIES[:3]:
        place = arena.folder / story.name.replace(" ", "-")
        expected[story] = undisturbed(story, place)
        early = [(story, place, step, first) for step in range(2, 14) for first in TRAINERS]
        late = [(story, place, step, arena.chance.choice(list(OTHERS))) for step in range(14, 150)]
        cases += early + late
    for story, place, step, first in arena.each(cases):
        second = arena.chance.choice(list(OTHERS))
        later = step + arena.chance.randint(1, 40)
        with arena.case(f"{story}: {first} at step {step}, {second} at step {later}"):
            disk.remove(place / "work")
            _meet(story, place, {step: first, later: second})
            check_same(story, expected[story], place / "work")


def _meet(story: Story, place: Path, visits: dict[int, str]) -> None:
    """Let a story stop itself before some steps, each time try another command, and let it go on."""
    steps = iter(range(1_000_000))
    work, said, holds = place / "work", child.Pipe(), place / "holds"
    holds.unlink(missing_ok=True)

    def stop(step: disk.Step) -> None:
        own = not step.path.endswith(".lock") or step.kind in ("truncate", "write", "rest")
        if own and step.path.startswith("runs/toy/"):
            holds.touch()  # it writes into its folder, so it must be the one that holds it
        if next(steps) in visits:
            os.kill(os.getpid(), signal.SIGSTOP)

    def live() -> int:
        with disk.watched(work, stop):
            return story.live(work)

    number = child.start(live, said.entrance, said.entrance)
    try:
        for name in visits.values():
            if child.stopped_or_ended(number, LIFE):
                if holds.exists():
                    _visit(name, place)
                os.kill(number, signal.SIGCONT)
        assert child.wait(number, LIFE, said), "the run does not go on"
        status = child.reap(number)
        assert status == 0, f"the run ended with status {status}: {said.content.decode()[-300:]}"
    finally:
        child.signal_group(number, signal.SIGKILL)
        child.reap(number)
        said.text()


def _visit(name: str, place: Path) -> None:
    """Another command on the folder of a run that is held."""
    run = place / "work" / "runs" / "toy"
    swapped = {"RUN": str(run), "RUNS": str(run.parent), "BOOK": str(place / "book.txt")}
    words = [swapped.get(word, word.replace("RUN/", f"{run}/")) for word in OTHERS[name]]
    ended = child.deeprnn(*words, cwd=place)
    child.check_polite(ended)
    if name in TRAINERS and not _finished(
        run
    ):  # which lets go of its folder before it writes its ledger's entry
        assert ended.status == 2, f"{name} was let in beside the run: {ended.err[-200:]}"


def _finished(run: Path) -> bool:
    path = run / "run.json"
    return path.is_file() and json.loads(path.read_text())["status"] == "finished"
