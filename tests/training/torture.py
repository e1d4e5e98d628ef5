"""Train a toy run while killing it at random moments: python -m tests.training.torture FOLDER KILLS SEED.

Each life is a forked process that takes the run up and trains on; it is killed with SIGKILL after a random
time, wherever it then is: in an update, in a write, between two renames. When a run survives to its end it
is compared with the undisturbed one, and the next run begins, until so many kills have struck.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import safetensors.torch
import torch

from deeprnn.training.session import run_recipe
from tests.training.toys import DEEP, music, recipe

WALL_CLOCK = ("seconds", "frames_per_second")
SETTINGS = {**DEEP, "seeds": [1, 2], "stop__epochs": 6, "schedule__patience": 1, "save__updates": 4}


def life(folder: Path, clock: Path) -> None:
    """Train in this process until the end, or until somebody kills it."""
    clock.write_text("")  # training begins: what came before is not worth killing
    run_recipe(recipe(**SETTINGS), folder, data=music())


def outcome(folder: Path) -> dict:
    """Everything that must not depend on what befell the run."""
    state = safetensors.torch.load_file(folder / "last.safetensors")
    out: dict = {"state": {k: v.numpy().tobytes() for k, v in state.items()}}
    for member in sorted(folder.glob("seed-*")):
        rows = [json.loads(line) for line in (member / "metrics.jsonl").read_text().splitlines()]
        out[member.name] = [{k: v for k, v in row.items() if k not in WALL_CLOCK} for row in rows]
        out[member.name + ".best"] = (member / "best.safetensors").read_bytes()
        out[member.name + ".result"] = json.loads((member / "run.json").read_text())["result"]
    return out


def attempt(folder: Path, clock: Path, delay: float | None) -> bool:
    """One life; whether it reached the end."""
    clock.unlink(missing_ok=True)
    child = os.fork()
    if child == 0:
        try:
            life(folder, clock)
        except BaseException as error:  # noqa: BLE001 - the parent must hear of it
            print(f"life failed: {error!r}", file=sys.stderr, flush=True)
            os._exit(1)
        os._exit(0)
    if delay is not None:
        while not clock.exists():
            time.sleep(0.0005)
        time.sleep(delay)
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        return False
    assert os.WEXITSTATUS(status) == 0
    return True


def main(folder: Path, kills: int, seed: int) -> None:
    """Kill so many times, over as many runs as that takes."""
    torch.set_num_threads(1)
    chance = random.Random(seed)
    clock = folder / "clock"
    began = time.monotonic()
    assert attempt(folder / "undisturbed", clock, None)
    whole = time.monotonic() - began
    expected = outcome(folder / "undisturbed")
    struck = survived = 0
    while struck < kills:
        run = folder / f"run-{survived}"
        while not attempt(run, clock, chance.uniform(0, 0.5 * whole) if struck < kills else None):
            struck += 1
        assert outcome(run) == expected, f"{run} differs after {struck} kills"
        survived += 1
    print(f"{struck} kills, {survived} runs survived bit-equal")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
