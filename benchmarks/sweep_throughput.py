"""Trials an hour of a sweep on JSB: packed into populations, beside the same trials one at a time.

    python benchmarks/sweep_throughput.py OUT [--device cpu] [--trials 64] [--pack 16] [--epochs 4] [--seconds 25]

The trials are random draws of rate, weight noise and clipping, as `deeprnn sweep` packs them; neither Optuna nor any
other extra is needed. Each way trains for about `--seconds`, whole packs at a time; what the first pack of each takes
to compile is measured beside it. OUT/sweep-throughput-<device>.json holds the figures.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from deeprnn.bench.measure import surroundings
from deeprnn.files import write_json
from deeprnn.sweeps.pack import Pack, train_pack
from deeprnn.sweeps.space import read_space
from deeprnn.training.loading import load_data
from deeprnn.training.recipe import load_recipe, override

SPACE = {
    "optimiser.rate": "log:0.05..2",
    "regulariser.weight_noise": "uniform:0..0.15",
    "optimiser.clip": "log:0.2..5",
}


def measure(size: int, options: argparse.Namespace) -> dict[str, Any]:
    """Trials an hour with so many in a pack."""
    base = override(load_recipe(options.recipe), {"stop.epochs": options.epochs, "stop.patience": 0})
    data, space = load_data(base.data), read_space(SPACE, base)
    seconds: list[float] = []
    trained = 0
    best = float("inf")
    while trained + size <= options.trials and sum(seconds[1:]) < options.seconds:
        numbers = range(trained, trained + size)
        recipes = tuple(override(base, space.draw(0, number)) for number in numbers)
        with tempfile.TemporaryDirectory() as folder:
            began = time.perf_counter()
            results = train_pack(Pack(0, tuple(numbers), recipes), Path(folder), options.device, data=data)
            if options.device.startswith("cuda"):
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - began)
        best = min([best, *(r.valid for r in results if r.valid is not None)])
        trained += size
        print(f"packs of {size}: {trained} trials, {seconds[-1]:.2f} s the last pack", flush=True)
        if sum(seconds) > 2 * options.seconds:
            break
    steady = seconds[1:] or seconds
    return {
        "pack": size,
        "trials": trained,
        "seconds_first_pack": round(seconds[0], 3),
        "seconds_a_pack": round(sum(steady) / len(steady), 3),
        "trials_an_hour": round(3600 * size * len(steady) / sum(steady), 1),
        "best_valid": best,
    }


def main() -> None:
    """Measure both ways and write what came of it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--recipe", default="paper/jsb/rnn")
    parser.add_argument("--trials", type=int, default=64)
    parser.add_argument("--pack", type=int, default=16)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=20.0)
    options = parser.parse_args()
    packed, alone = measure(options.pack, options), measure(1, options)
    figures = {
        **surroundings(options.device),
        "recipe": options.recipe,
        "epochs_a_trial": options.epochs,
        "packed": packed,
        "one_at_a_time": alone,
        "times_faster": round(packed["trials_an_hour"] / alone["trials_an_hour"], 2),
    }
    write_json(options.out / f"sweep-throughput-{options.device.partition(':')[0]}.json", figures)
    print(
        f"{packed['trials_an_hour']:,.0f} trials an hour in packs of {options.pack}, "
        f"{alone['trials_an_hour']:,.0f} one at a time: {figures['times_faster']:g} times"
    )


if __name__ == "__main__":
    main()
