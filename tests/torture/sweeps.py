"""Sweeps: killed workers and coordinators, nodes of a cluster that die, hostile files."""

from __future__ import annotations

import importlib.util
import os
import random
import signal
import time
from pathlib import Path

from tests.torture import child
from tests.torture.attack import Arena, attack
from tests.torture.child import check_polite, deeprnn

KILLS = 20
"""of nodes, if there is time"""
TRIALS = 8


@attack("sweep kills")
def sweep_kills(arena: Arena) -> None:
    """SIGKILL a sweep at random moments until it survives: every trial ends as it would have, none twice."""
    from tests.sweeps.toys import spec, sweep

    which = spec(trials=TRIALS)  # here, so that all processes have the same data

    def outcome(folder: Path) -> None:
        sweep(which, folder, pack=2)

    def values(folder: Path) -> list[tuple[int, str, float | None]]:
        from deeprnn.sweeps.study import Study

        return [(t.number, t.state, t.value) for t in Study(which, folder).trials()]

    whole = arena.folder / "whole"
    began = time.monotonic()
    check_polite(child.forked(lambda: outcome(whole), what="sweep"), allowed=(0,))
    length = time.monotonic() - began
    expected = values(whole)
    for number in arena.each(range(10_000)):
        folder = arena.folder / f"{number}"
        with arena.case(f"sweep killed, seed {arena.seed}"):
            for _ in range(arena.chance.randint(1, 5)):
                moment = arena.chance.random() * length
                ended = child.forked(
                    lambda folder=folder, moment=moment: _killed_after(moment, lambda: outcome(folder)),
                    what="sweep",
                )
                arena.add("kills", int(ended.status == -signal.SIGKILL))
            check_polite(child.forked(lambda folder=folder: outcome(folder), what="sweep"), allowed=(0,))
            assert values(folder) == expected, f"{values(folder)} instead of {expected}"


def _killed_after(seconds: float, work) -> None:
    import threading

    threading.Timer(seconds, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
    work()
    os._exit(0)


@attack("dying nodes", share=2.0)
def dying_nodes(arena: Arena) -> None:
    """A Ray cluster whose nodes are killed while it sweeps, twenty in a long run: every trial ends, none twice."""
    if importlib.util.find_spec("ray") is None:
        return
    with arena.case("nodes killed"):
        place, seconds = arena.folder / "nodes", max(0.0, arena.seconds_left)
        script = (
            f"from tests.torture.sweeps import kill_nodes; kill_nodes({str(place)!r}, {KILLS}, {seconds})"
        )
        ended = child.forked(lambda: _execute(script), what="dying nodes", seconds=600.0, megabytes=64_000)
        check_polite(ended, allowed=(0,))
        arena.add("nodes killed", int(ended.out.rsplit("killed", 1)[-1].split()[0]))
        arena.finished = arena.figures["nodes killed"] == KILLS


def _execute(script: str) -> None:
    """In an interpreter of its own: Ray's threads do not survive a fork."""
    import sys

    os.execv(sys.executable, [sys.executable, "-c", script])


def kill_nodes(place: str, kills: int, seconds: float) -> None:
    """Sweeps on one cluster until enough nodes were killed or time is over; says how many were.

    It is a process of its own. How many kills fit into one sweep depends on the machine, so each sweep is asked for
    those that are still missing, and there is at least one kill, however many sweeps that takes.
    """
    from deeprnn.sweeps.engines import make_engine
    from tests.sweeps.ray_cluster import Cluster, Killer
    from tests.sweeps.toys import spec, sweep

    end = time.monotonic() + seconds
    which = spec(trials=kills, overrides={"stop.epochs": 40})
    killed = 0
    with Cluster(nodes=2) as cluster:
        while killed < kills and (not killed or time.monotonic() < end):
            folder = Path(place) / f"after-{killed}"
            killer = Killer(cluster, folder, kills - killed)
            engine = make_engine("ray", "cpu", 2, cluster.address)
            outcome = sweep(which, folder, pack=2, view=killer, engine=engine)
            assert outcome.finished, "the sweep did not end"
            ended = sorted(trial.number for trial in killer.trials)
            assert ended == list(range(which.trials)), f"a trial ended twice or never: {ended}"
            incomplete = [trial for trial in outcome.trials if trial.state != "complete"]
            assert not incomplete, incomplete
            killed += killer.killed
    print(f"killed {killed} nodes", flush=True)


PIECES = (
    'recipe = "quick/jsb-dts"',
    "recipe = 1",
    'recipe = "../../etc/passwd"',
    "trials = -1",
    "trials = 1e9",
    "trials = 99999999999999999999",
    'sampler = "grid"',
    'sampler = ["tpe"]',
    '[space]\n"optimiser.rate" = "log:1..0"',
    '[space]\n"optimiser.rate" = "log:0.1..inf"',
    '[space]\noptimiser = "log:0.1..1"',
    '[space]\n"seeds" = [1]',
    '[space]\n"model.hidden" = [[99999999999]]',
    '[space]\n"data.name" = ["/etc/passwd", "/dev/zero"]',
    "[space]\n" + "\n".join(f'"data.x{i}" = [1]' for i in range(500)),
    '[override]\n"stop.epochs" = {a = 1}',
    '[override]\n"model.cell" = "os:system"',
    "[override]\nspace = 3",
    "space = " + "[" * 500 + "]" * 500,
    "\x00",
)


@attack("hostile sweeps")
def hostile_sweeps(arena: Arena) -> None:
    """Sweep files put together from nasty pieces: one sentence, no traceback, nothing trained."""
    for number in arena.each(range(10_000)):
        chance = random.Random(f"{arena.seed}/{number}")
        text = "\n".join(chance.sample(PIECES, chance.randint(1, 5)))
        path = arena.folder / "hostile.toml"
        path.write_text(text, encoding="utf-8", errors="replace")
        with arena.case(f"sweep file {text[:60]!r}"):
            ended = deeprnn("sweep", str(path), "--out", str(arena.folder / "out"), "--score-test")
            check_polite(ended)
