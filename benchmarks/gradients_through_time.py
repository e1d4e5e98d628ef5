"""What shortcuts do for gradients (Sec. 3.3.1): ‖∂loss_T/∂h_{T−k}‖ over ‖∂loss_T/∂h_T‖, with and without them.

    python benchmarks/gradients_through_time.py --out results/studies/gradients --figure docs/images/gradients.png

Models of 100 units on JSB Chorales, at their first parameters and after some epochs of one training for all (adamw).
The loss is that of frame 42 of a validation song given those before it, the ratio a median over songs, then the mean of
its logarithm over seeds. The test part is never scored.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from pathlib import Path

import numpy as np
import torch

from deeprnn import __version__
from deeprnn.data import load
from deeprnn.files import write_atomically, write_json
from deeprnn.model.losses import nats
from deeprnn.model.sequence_model import SequenceModel
from deeprnn.render.curves import legend
from deeprnn.render.style import SERIES, SOFT, dress, new_figure, png_bytes
from deeprnn.runs.provenance import commit, environment
from deeprnn.training.loop import Trainer
from deeprnn.training.recipe import Recipe, load_recipe, override

STEPS, UNITS = 40, 100
MODELS = {
    "RNN": {"model.intermediate": [], "model.shortcut": "none"},
    "DT, depth 2": {"model.intermediate": [UNITS], "model.shortcut": "none"},
    "DT(S), depth 2": {"model.intermediate": [UNITS], "model.shortcut": "last"},
    "DT, depth 3": {"model.intermediate": [UNITS, UNITS], "model.shortcut": "none"},
    "DT(S), depth 3": {"model.intermediate": [UNITS, UNITS], "model.shortcut": "last"},
}


def recipe_for(changes: dict, seed: int, epochs: int) -> Recipe:
    """One training for all models: only the transition differs."""
    shared = {
        "data.lanes": 8, "model.hidden": UNITS, "optimiser.name": "adamw", "optimiser.rate": 0.003,
        "schedule.name": "constant",
        "stop.epochs": epochs, "stop.patience": 0, "evaluation.test": False, "seeds": [seed],
    }  # fmt: skip
    return override(load_recipe("paper/jsb/dts"), {**shared, **changes})


def ratios(model: SequenceModel, songs: list[np.ndarray]) -> list[float]:
    """Median over songs of the norm k steps back as a share of that at the last step, k = 0 .. STEPS."""
    level, rows = model.levels[0], []
    for song in songs:
        frames = torch.from_numpy(song[: STEPS + 2].astype(np.float64))  # single precision ends at 1e-45
        h, states = torch.zeros(1, UNITS, dtype=torch.float64, requires_grad=True), []
        for x in frames[:-1]:
            h = level(x[None], h)
            states.append(h)
        loss = nats(model.spec.output, model.predict(h), frames[-1:]).sum()
        norms = torch.stack([g.norm() for g in torch.autograd.grad(loss, states)]).flip(0)
        rows.append((norms / norms[0]).tolist())
    return np.median(np.array(rows), 0).tolist()


def measure(seeds: list[int], epochs: int) -> dict:
    """All models at both moments, a row a seed."""
    data = load("jsb")
    songs = [
        s for s in (data.splits["valid"][i] for i in range(len(data.splits["valid"]))) if len(s) >= STEPS + 2
    ]
    out: dict = {"songs": len(songs), "first": {}, "trained": {}, "valid": {}}
    for name, changes in MODELS.items():
        for seed in seeds:
            trainer = Trainer(recipe_for(changes, seed, epochs), data)
            for moment in ("first", "trained"):
                if moment == "trained":
                    trainer.train()
                    out["valid"].setdefault(name, []).append(trainer.schedule.members[0].best)
                model = SequenceModel(trainer.spec)
                model.load_state_dict(dict(trainer.layout.views(trainer.updater.parameters[0])))
                out[moment].setdefault(name, []).append(ratios(model.double(), songs))
    return out


def figure(found: dict) -> bytes:
    """Both moments side by side, on a logarithmic scale."""
    drawn = new_figure(9.6, 4.2)
    for place, (moment, title) in enumerate((("first", "before training"), ("trained", "after training")), 1):
        axes = drawn.add_subplot(1, 2, place)
        dress(axes, f"Gradient k steps back, {title}", "share of the last step's norm")
        for name, rows in found[moment].items():
            line = np.exp(np.log(np.array(rows)).mean(0))
            style = "--" if name.startswith("DT,") else "-"
            colour = SERIES[0 if name == "RNN" else 1 if "2" in name else 2]
            axes.plot(range(len(line)), line, style, color=colour, label=name, linewidth=1.8)
        axes.set_yscale("log")
        axes.set_ylim(1e-20, 3)
        axes.set_xlabel("k", color=SOFT, fontsize=9)
        legend(axes)
    return png_bytes(drawn)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--figure", type=Path)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    args = parser.parse_args()
    began = time.monotonic()
    found = measure(args.seeds, args.epochs)
    made = {
        "command": "python benchmarks/gradients_through_time.py " + " ".join(sys.argv[1:]), "version": __version__,
        "commit": commit(), "environment": environment("cpu"), "seeds": args.seeds, "epochs": args.epochs,
        "units": UNITS, "seconds": round(time.monotonic() - began, 1),
    }  # fmt: skip
    write_json(args.out / "gradients.json", {**made, **found})
    if args.figure:
        write_atomically(args.figure, figure(found))
    for moment in ("first", "trained"):
        for name, rows in found[moment].items():
            mean = np.exp(np.log(np.array(rows)).mean(0))
            print(f"{moment:<8} {name:<16} " + "  ".join(f"k={k}: {mean[k]:.1e}" for k in (1, 5, 10, 20, 40)))
    print({name: f"{math.fsum(v) / len(v):.3f}" for name, v in found["valid"].items()})


if __name__ == "__main__":
    main()
