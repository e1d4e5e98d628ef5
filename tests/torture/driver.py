"""Runs the attacks, each for its share of the time, and sums up."""

from __future__ import annotations

import importlib
import json
import os
import pkgutil
import platform
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.torture import child
from tests.torture.attack import REGISTRY, Arena, Attack

ATTACKS = (
    *("kills", "beside", "disk_full", "damage", "mutated_files", "arguments"),
    *("requests", "hostile_folders", "clients", "sweeps"),
)
"""the files of this folder that hold attacks"""
SKIPPED = ("deeprnn.__main__", "deeprnn.bench", "deeprnn.backends.cuda")
THIRD_PARTY = (
    "symusic",
    "uvicorn",
    "httpx",
    "anyio._backends._asyncio",
    "rich.live",
    "rich.progress",
    "rich.table",
)
THIRD_PARTY += ("matplotlib.backends.backend_agg", "typeguard", "tyro._backends._tyro_backend", "scipy.io")


def attacks(only: Sequence[str] = ()) -> list[Attack]:
    """All attacks, or those whose names contain one of the words."""
    for name in ATTACKS:
        importlib.import_module(f"tests.torture.{name}")
    return [a for a in REGISTRY.values() if not only or any(word in a.name for word in only)]


def run(chosen: Sequence[Attack], minutes: float, seed: int, jobs: int, kept: Path) -> dict[str, Any]:
    """Attack, several at once; what an attack does not need is left to the next ones."""
    began = time.monotonic()
    prepare()
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # no waiting for a real disk
    with tempfile.TemporaryDirectory(prefix="deeprnn-torture-", dir=memory) as root:
        together = sorted((a for a in chosen if not a.alone), key=lambda a: -a.share)
        alone = [a for a in chosen if a.alone]
        everything = sum(a.share for a in together) / jobs + sum(a.share for a in alone)
        reserved = sum(min(a.most, 60 * minutes * a.share / everything) for a in alone)
        runner = Runner(Path(root), seed, kept.absolute())
        found = runner.run(together, began + 60 * minutes - reserved, jobs)
        found += runner.run(alone, began + 60 * minutes, jobs=1)
    return summary(found, seed, minutes, time.monotonic() - began)


class Runner:
    """Runs attacks in processes of their own, so that none can harm another, or this one."""

    def __init__(self, root: Path, seed: int, kept: Path) -> None:
        self.root, self.seed, self.kept = root, seed, kept

    def run(self, chosen: Sequence[Attack], end: float, jobs: int) -> list[dict[str, Any]]:
        """All of them, so many at once, until a moment."""
        waiting, running, found = list(chosen), dict[int, tuple[Attack, float, float]](), []
        while waiting or running:
            while waiting and len(running) < jobs:
                now = time.monotonic()
                room = jobs * max(0.0, end - now) - sum(until - now for _, _, until in running.values())
                attack = waiting.pop(0)
                share = attack.share / (attack.share + sum(a.share for a in waiting))
                until = now + max(1.0, min(attack.most, end - now, room * share))
                running[self._start(attack, until)] = (attack, now, until)
            process, status = os.wait()
            if process in running:
                attack, began, _ = running.pop(process)
                found.append({**self._result(attack, status), "seconds": round(time.monotonic() - began, 1)})
                print(line(found[-1]), flush=True)
        return found

    def _start(self, attack: Attack, until: float) -> int:
        sys.stdout.flush()
        process = child.fork()
        if process:
            return process
        try:
            folder = self.root / attack.name.replace(" ", "-")
            folder.mkdir()
            arena = Arena(attack.name, folder, self.seed, until, self.kept)
            with arena.case("the attack itself"):
                attack.run(arena)
            arena.cases -= 1
            self._place(attack).write_text(json.dumps(arena.to_dict()))
            shutil.rmtree(folder, ignore_errors=True)
            os._exit(0)
        except BaseException:  # noqa: BLE001 - the parent hears of it by the status
            traceback.print_exc()
            os._exit(1)

    def _result(self, attack: Attack, status: int) -> dict[str, Any]:
        place = self._place(attack)
        if place.exists():
            return json.loads(place.read_text())
        broken = f"the attack itself ended with status {status}"
        findings = [{"text": broken, "count": 1}]
        return {"name": attack.name, "cases": 0, "finished": False, "figures": {}, "findings": findings}

    def _place(self, attack: Attack) -> Path:
        return self.root / f"{attack.name.replace(' ', '-')}.json"


def prepare() -> None:
    """Load what commands need, once, for all the processes that will be forked from this one."""
    import torch

    import deeprnn

    torch.set_num_threads(1)
    for module in pkgutil.walk_packages(deeprnn.__path__, "deeprnn."):
        if not module.name.startswith(SKIPPED):
            importlib.import_module(module.name)
    for name in THIRD_PARTY:
        importlib.import_module(name)


def line(found: dict[str, Any]) -> str:
    """One row of the table."""
    told = f"{len(found['findings'])} FINDINGS in {failed(found)} cases" if found["findings"] else "ok"
    whole = "" if found["finished"] else ", a sample"
    return f"{found['name']:<42} {found['cases']:>7,} cases {found['seconds']:>6.0f} s  {told}{whole}"


def failed(found: dict[str, Any]) -> int:
    """Cases of an attack that ended in a finding."""
    return sum(finding["count"] for finding in found["findings"])


def summary(found: Sequence[dict[str, Any]], seed: int, minutes: float, seconds: float) -> dict[str, Any]:
    """Everything as plain data."""
    from deeprnn import __version__
    from deeprnn.runs.provenance import commit
    from deeprnn.runs.run_files import now

    return {
        "format": 1,
        "when": now(),
        "version": __version__,
        "commit": commit(),
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "seed": seed,
        "minutes": minutes,
        "seconds": round(seconds, 1),
        "cases": sum(a["cases"] for a in found),
        "findings": sum(len(a["findings"]) for a in found),
        "attacks": list(found),
    }


def tell(found: dict[str, Any]) -> None:
    """What was found, for a person."""
    for attack in found["attacks"]:
        for name, value in attack["figures"].items():
            print(
                f"  {attack['name']}: {name}: {value:,}" if isinstance(value, int) else f"  {name}: {value}"
            )
    for attack in found["attacks"]:
        for finding in attack["findings"]:
            more = f"  [{finding['count']} such cases]" if finding["count"] > 1 else ""
            print(f"\n{attack['name']}: {finding['text']}{more}")
    print(
        f"\n{found['cases']:,} cases in {found['seconds']:.0f} s, {found['findings']} findings, seed {found['seed']}"
    )


def write(found: dict[str, Any], path: Path) -> None:
    """The summary as a JSON file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found, indent=1) + "\n")
