"""What the defaults for people's own data were chosen by: transposition of few songs, models for a text.

    python benchmarks/own_data.py transpose [--sets bach nottingham] [--semitones 0 3 6]
    python benchmarks/own_data.py text [--seconds 110] [--characters 2000000] [--models default rnn:400:16:50:0.003 ...]

`transpose` trains on 36 songs of a set, written to a folder as MIDI files, by the settings that `deeprnn train
FOLDER` chooses. `text` trains on the beginning of the Penn Treebank's training text, 90 : 5 : 5, by so many
seconds of one thread's own time, and beside it an LSTM of 20 lines; a model is kind:units:lanes:chunk:rate, or the
`default` of `deeprnn train`, whose best epoch is not looked for here: the last parameters are scored.
"""

from __future__ import annotations

import argparse
import math
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import nn

from deeprnn.data import MusicData, TextData, load
from deeprnn.data.sources import find
from deeprnn.data.text import text_data
from deeprnn.render import midi_bytes
from deeprnn.training.defaults import choose, model_of, resolve
from deeprnn.training.engine import Eager
from deeprnn.training.evaluate import mean_nats, score
from deeprnn.training.loop import Trainer
from deeprnn.training.recipe import DataPart, override

SONGS = 36
MODELS = (
    "default",
    "rnn:400:32:100:0.002",
    "rnn:400:16:50:0.002",
    "dots:200:16:50:0.002",
    "dots:400:32:100:0.002",
)


def main() -> int:
    """Measure one or the other, a line each."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("what", choices=("transpose", "text"))
    parser.add_argument("--sets", nargs="+", default=["bach", "nottingham"])
    parser.add_argument("--semitones", nargs="+", type=int, default=[0, 3, 6])
    parser.add_argument("--seconds", type=float, default=110)
    parser.add_argument("--characters", type=int, default=2_000_000)
    parser.add_argument("--models", nargs="*", default=MODELS)
    parser.add_argument("--lstm", type=int, default=256, help="units of the LSTM; 0: none")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.what == "transpose":
        for name in arguments.sets:
            compare_transposition(name, arguments.semitones)
        return 0
    data = beginning(arguments.characters)
    for model in arguments.models:
        print(model, train_text(data, model, arguments.seconds), flush=True)
    if arguments.lstm:
        print(f"LSTM of {arguments.lstm}", train_lstm(data, arguments.lstm, arguments.seconds), flush=True)
    return 0


def compare_transposition(name: str, semitones: list[int]) -> None:
    """Train on a few songs of a set at each range of random transposition."""
    whole = load(name)
    assert isinstance(whole, MusicData)
    assert whole.grid
    songs, grid = whole.splits["train"], whole.grid
    with tempfile.TemporaryDirectory() as folder:
        for i in np.random.default_rng(0).permutation(len(songs))[:SONGS].tolist():
            content = midi_bytes(songs[i], steps_per_beat=grid.steps_per_beat, low=grid.low)
            Path(folder, f"{i:04d}.mid").write_bytes(content)
        for most in semitones:
            changes = {"data.random_transpose": most}
            recipe, data, _ = resolve(folder, changes=changes)
            assert data
            trainer = Trainer(override(recipe, changes), data)
            trainer.train()
            result = trainer.results()[0]
            scores = ", ".join(f"{s} {result[s]['nats_per_frame']:.3f}" for s in ("train", "valid", "test"))
            print(f"{name}, {SONGS} songs, up to {most} semitones: {scores} nats a frame", flush=True)


def beginning(characters: int) -> TextData:
    """The first characters of the Treebank's training text, 90 : 5 : 5."""
    text = find("ptb-char")[0].read_text()[:characters]
    first, second = int(0.9 * len(text)), int(0.95 * len(text))
    return text_data(
        "ptb", "char", {"train": text[:first], "valid": text[first:second], "test": text[second:]}
    )


def train_text(data: TextData, model: str, seconds: float) -> str:
    """Validation bits per character after so many seconds of processor time, the rate falling to its end there."""
    recipe, _ = choose(data, DataPart(name="ptb"), "dots")
    if model != "default":
        kind, units, lanes, chunk, rate = model.split(":")
        recipe = replace(recipe, model=model_of(kind, int(units)))
        sizes = {"data.lanes": int(lanes), "data.chunk": int(chunk), "optimiser.rate": float(rate)}
        recipe = override(recipe, sizes)
    # The cosine's length is set below.
    recipe = override(recipe, {"stop.epochs": 1_000_000, "evaluation.streams": 16})
    trainer = Trainer(recipe, data)
    engine = Eager(trainer.updater)
    engine.load(trainer.plans(1))
    used, done, total = 0.0, 0, 1_000_000
    while done < total:
        before = time.process_time()
        engine.step(done % engine.length)
        used, done = used + time.process_time() - before, done + 1
        if done % 20 == 0 and used > 0.02 * seconds:  # as `stop.minutes` does, from its first tenth on
            total = max(done, round(done * seconds / used))
            trainer.schedule.expect(total)
    nats = score(trainer.model, trainer.updater.parameters, trainer.valid_plan)[0]
    bits = mean_nats(data, nats) / math.log(2)
    return f"valid {bits:.3f} bits, {done:,} updates, {done / engine.length:.2f} epochs, {used:.0f} s"


def train_lstm(data: TextData, units: int, seconds: float, lanes: int = 32, chunk: int = 64) -> str:
    """What a person might write: an embedding, `nn.LSTM`, a linear layer and Adam."""
    torch.manual_seed(0)
    ids = torch.from_numpy(data.splits["train"].astype(np.int64))
    x = ids[: len(ids) // lanes * lanes].view(lanes, -1).T
    parts = nn.ModuleList([nn.Embedding(data.size, 64), nn.LSTM(64, units), nn.Linear(units, data.size)])
    embedding, lstm, output = parts
    optimiser = torch.optim.Adam(parts.parameters(), 0.003)
    used, done, at, state = 0.0, 0, 0, None
    while used < seconds:
        before = time.process_time()
        if at + chunk + 1 > len(x):
            at, state = 0, None
        hidden, state = lstm(embedding(x[at : at + chunk]), state)
        state = tuple(s.detach() for s in state)
        loss = nn.functional.cross_entropy(output(hidden).flatten(0, 1), x[at + 1 : at + chunk + 1].flatten())
        optimiser.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(parts.parameters(), 1.0)
        optimiser.step()
        used, done, at = used + time.process_time() - before, done + 1, at + chunk
    valid = torch.from_numpy(data.splits["valid"].astype(np.int64))[:, None]
    with torch.no_grad():
        hidden, _ = lstm(embedding(valid[:-1]))
        bits = nn.functional.cross_entropy(output(hidden).flatten(0, 1), valid[1:].flatten()) / math.log(2)
    return (
        f"valid {bits:.3f} bits, {done:,} updates, {done * lanes * chunk / len(ids):.2f} epochs, {used:.0f} s"
    )


if __name__ == "__main__":
    raise SystemExit(main())
