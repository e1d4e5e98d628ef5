"""Small run folders for the page's tests."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch

from deeprnn.data import Grid
from deeprnn.model.metrics import HEADLINE
from deeprnn.model.models import dots_rnn, dts_rnn, rnn
from deeprnn.model.notation import label
from deeprnn.model.sequence_model import SequenceModel
from deeprnn.model.structure import dissect
from deeprnn.runs.checkpoint import save_best

TEXT = "the quick brown fox jumps over the lazy dog\n"
WORDS = ["<eos>", "<unk>", "the", "a", "cat", "dog", "sat", "ran", "on", "mat", "."]
METRIC = {"music": "nats/frame", "char": "bpc", "word": "perplexity"}


def curve(epochs: int, start: float = 11.0, floor: float = 8.3) -> list[dict[str, float]]:
    """Rows of a plausible learning curve."""
    rows = []
    for e in range(1, epochs + 1):
        fall = (start - floor) * math.exp(-e / 9)
        valid = floor + fall + 0.15 * math.sin(e) / e
        rows.append(
            {
                "epoch": e,
                "step": 387 * e,
                "seconds": 2.5 * e,
                "train": floor - 0.5 + fall,
                "valid": valid,
                "rate": 1.0 if e < 20 else 20.0 / e,
                "grad_norm": 0.4 + 0.1 * math.cos(e),
                "clipped": 0.1,
                "frames_per_second": 5400.0,
            }
        )
    return rows


def model_of(kind: str, deep: bool = False, seed: int = 0) -> tuple[SequenceModel, list[str] | None]:
    """A small model with random weights and, for text, its vocabulary."""
    if kind == "music":
        sizes: dict[str, Any] = {"input_size": 88, "output_size": 88, "hidden_size": 20}
        make = dots_rnn(intermediate_size=12, output_hidden_size=14, seed=seed, **sizes) if deep else None
        model = make or dts_rnn(intermediate_size=12, seed=seed, **sizes)
        keys = torch.arange(88)
        with torch.no_grad():  # quiet, but with a chord in mind: C major about middle C
            bias = [p for n, p in model.predict.named_parameters() if p.dim() == 1][-1]
            bias.copy_(torch.where(((keys + 21) % 12 % 7 % 4 == 0) & (keys > 24) & (keys < 52), -1.2, -5.0))
        return model, None
    vocabulary = sorted(set(TEXT)) if kind == "char" else WORDS
    n = len(vocabulary)
    model = rnn(input_size=n, hidden_size=16, output_size=n, output="categorical", seed=seed)
    return model, vocabulary


def write_run(
    folder: Path,
    kind: str = "music",
    *,
    status: str = "finished",
    epochs: int = 30,
    data: str | None = None,
    deep: bool = False,
    seed: int = 0,
    weights: bool = True,
    updated: str = "2026-01-02T03:04:05",
    test: float = 8.31,
    paper: bool = True,
    steps_per_beat: int = 1,
) -> Path:
    """One run folder as training leaves it."""
    folder.mkdir(parents=True)
    model, vocabulary = model_of(kind, deep, seed)
    rows = curve(epochs)
    score = {HEADLINE[kind].key: test}
    done = status == "finished"
    info = {
        "format": 1,
        "name": folder.name,
        "status": status,
        "data": {
            "name": data or {"music": "jsb", "char": "ptb-char", "word": "ptb-word"}[kind],
            "kind": kind,
        },
        "model": model.spec.to_dict(),
        "label": label(model.spec),
        "parameters": dissect(model.spec).parameters,
        "seed": seed,
        "created": "2026-01-02T03:00:00",
        "updated": updated,
        "version": "0.1.0",
        "commit": "abc1234",
        "environment": {"python": "3.11", "torch": "2.13", "device": "cpu"},
        "paper": {"music": 8.278, "char": 1.414, "word": 117.7}[kind] if paper else None,
        "metric": METRIC[kind],
        "result": {"best_epoch": epochs - 3, "train": score, "valid": score, "test": score} if done else None,
    }
    (folder / "run.json").write_text(json.dumps(info))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "recipe.toml").write_text(f'seeds = [{seed}]\n\n[optimiser]\nname = "sgd"\nrate = 1.0\n')
    own = (
        {"frames": [[27, 39], [28, 40], [27, 39]]}
        if kind == "music"
        else {"text": "the quick " if kind == "char" else "the cat sat"}
    )
    (folder / "openings.json").write_text(json.dumps([{"name": "own 1", **own}]))
    if kind == "music":
        (folder / "grid.json").write_text(json.dumps(Grid(steps_per_beat=steps_per_beat).to_dict()))
    else:
        (folder / "vocabulary.json").write_text(json.dumps(vocabulary))
    if weights:
        save_best(folder, model.state_dict(), {"epoch": epochs})
    return folder
