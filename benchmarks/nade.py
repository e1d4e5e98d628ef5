"""The NADE output beside the plain one: numbers against float64, and what training JSB costs.

    DEEPRNN_DATA=data python benchmarks/nade.py OUT --device cuda        about 30 s on an H200
    python benchmarks/nade.py OUT --device cpu --recipes paper/jsb/rnn   the same on a CPU

Writes OUT/nade.json. Updates of both outputs take turns, a hundred at a time, so that both meet the same load. Without
the data, songs of the same lengths with four random notes a frame stand in for it. Needs torch, numpy, safetensors.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src")]

import numpy as np  # noqa: E402
import torch  # noqa: E402

from deeprnn.bench.measure import surroundings  # noqa: E402
from deeprnn.data import load  # noqa: E402
from deeprnn.data.music import MusicData, Songs  # noqa: E402
from deeprnn.errors import UserError  # noqa: E402
from deeprnn.files import write_json  # noqa: E402
from deeprnn.model.nade_loss import nade_nats, plain_nats  # noqa: E402
from deeprnn.training.loop import Trainer  # noqa: E402
from deeprnn.training.recipe import load_recipe, override  # noqa: E402

SIZES = ((1, 1, 1), (7, 7, 7), (50, 88, 200), (63, 63, 63), (129, 88, 129), (400, 88, 512), (3, 200, 1000))
"""frames, notes, hidden units"""
UPDATES = 100


def check(device: str) -> list[dict[str, Any]]:
    """Largest error of nats and of every gradient, as a share of the largest value, against float64 on the CPU."""
    rows = []
    for N, O, D in SIZES:
        for density in (0.05, 1.0):
            torch.manual_seed(N)
            y = (torch.rand(N, O) < density).double()
            exact = [torch.randn(N, O), torch.randn(N, D), torch.randn(O, D) / 2, torch.randn(O, D) / D**0.5]
            exact = [x.double().requires_grad_() for x in exact]
            own = [x.detach().float().to(device).requires_grad_() for x in exact]
            nats, wanted = nade_nats(y.to(device), *own), plain_nats(y, *exact)
            g = torch.randn(N).double()
            found = (nats, *torch.autograd.grad(nats, own, g.float().to(device)))
            truth = (wanted, *torch.autograd.grad(wanted, exact, g))
            errors = {
                name: float(
                    (a.detach().cpu().double() - b.detach()).abs().max()
                    / b.detach().abs().max().clamp(min=1e-12)
                )
                for name, a, b in zip(("nats", "b", "c", "W", "V"), found, truth, strict=True)
            }
            rows.append({"frames": N, "notes": O, "hidden": D, "density": density, **errors})
    return rows


def songs() -> MusicData:
    """JSB, or songs like it."""
    try:
        return load("jsb")
    except (UserError, OSError):
        rng = np.random.default_rng(0)

        def part(count: int) -> Songs:
            rolls = [np.zeros((int(n), 88), np.uint8) for n in rng.integers(30, 130, count)]
            for roll in rolls:
                for frame in roll:
                    frame[rng.choice(np.arange(25, 60), 4, replace=False)] = 1
            return Songs.pack(rolls)

        return MusicData("songs like JSB", {"train": part(229), "valid": part(76), "test": part(77)})


def train(name: str, device: str, members: int, rounds: int) -> dict[str, Any]:
    """Milliseconds of an update with either output, taking turns, and how they compare."""
    data, trainers = songs(), {}
    for output in ("plain", "nade"):
        changes = {"model.output": output, "seeds": list(range(1, members + 1))}
        trainers[output] = Trainer(override(load_recipe(name), changes), data, device=device)
        trainers[output].engine.load(trainers[output].plans(1))
        run(trainers[output], device)  # compiles, and on a GPU captures
    times = {output: [] for output in trainers}
    for _ in range(rounds):
        for output, trainer in trainers.items():
            times[output].append(run(trainer, device) / UPDATES * 1e3)
    middle = {output: statistics.median(values) for output, values in times.items()}
    ratios = [b / a for a, b in zip(times["plain"], times["nade"], strict=True)]
    return {"recipe": name, "data": data.name, "members": members, "threads": torch.get_num_threads(),
            "plain_ms": middle["plain"], "nade_ms": middle["nade"], "ratio": statistics.median(ratios),
            "ratios": [round(r, 3) for r in ratios]}  # fmt: skip


def run(trainer: Trainer, device: str) -> float:
    """Seconds of a hundred updates; on a CPU those of the process, which others on the machine do not lengthen."""
    clock = time.process_time if device == "cpu" else time.perf_counter
    begin = clock()
    for index in range(UPDATES):
        trainer.engine.step(index)
    if device != "cpu":
        torch.cuda.synchronize()
    return clock() - begin


def main() -> None:
    """Check, measure, write."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    options.add_argument("out", type=Path)
    options.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options.add_argument("--only", choices=("check", "train"), default="")
    options.add_argument("--recipes", nargs="*", default=["paper/jsb/rnn", "paper/jsb/dots"])
    options.add_argument("--members", type=int, nargs="*", default=[1, 5])
    options.add_argument("--rounds", type=int, default=7)
    options.add_argument("--threads", type=int, default=1)
    asked = options.parse_args()
    torch.set_num_threads(asked.threads)
    found: dict[str, Any] = {"device": asked.device, **surroundings(asked.device)}
    asked.out.mkdir(parents=True, exist_ok=True)
    if asked.only != "train":
        found["check"] = check(asked.device)
        found["worst"] = max(row[k] for row in found["check"] for k in ("nats", "b", "c", "W", "V"))
        print(
            f"largest error against float64, as a share of the largest value: {found['worst']:.2e}",
            flush=True,
        )
    found["train"] = []
    for name in asked.recipes if asked.only != "check" else ():
        for members in asked.members:
            row = train(name, asked.device, members, asked.rounds)
            found["train"].append(row)
            print(json.dumps(row), flush=True)
            write_json(asked.out / "nade.json", found)
    write_json(asked.out / "nade.json", found)


if __name__ == "__main__":
    main()
