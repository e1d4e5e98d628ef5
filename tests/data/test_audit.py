"""The audit finds what was planted, in any key and with small edits, and nothing where nothing is."""

from __future__ import annotations

import json

import numpy as np
import pytest

from deeprnn.cli import main
from deeprnn.data.audit import audit
from deeprnn.data.audit.duplicates import edits
from deeprnn.data.music import MusicData, Songs
from deeprnn.data.rolls import save_npz
from deeprnn.data.text import text_data
from deeprnn.errors import UserError
from deeprnn.training.clean import evaluate_clean
from deeprnn.training.evaluate import evaluate
from deeprnn.training.loop import Trainer
from tests.training import toys


def song(seed: int, length: int = 60) -> np.ndarray:
    draw = np.random.default_rng(seed)
    roll = np.zeros((length, 88), np.uint8)
    for row in roll:
        row[draw.choice(np.arange(20, 60), 4, replace=False)] = 1
    return roll


def moved(roll: np.ndarray, semitones: int) -> np.ndarray:
    return np.roll(roll, semitones, axis=1)


def edited(roll: np.ndarray, seed: int = 0) -> np.ndarray:
    """Two frames changed, one left out, one put in."""
    draw = np.random.default_rng(seed)
    out = roll.copy()
    for place in draw.choice(len(out), 2, replace=False):
        out[place, 70] ^= 1
    return np.insert(np.delete(out, 7, axis=0), 30, out[5], axis=0)


def music(train, valid, test) -> MusicData:
    return MusicData(
        "made-up",
        {s: Songs.pack(p) for s, p in zip(("train", "valid", "test"), (train, valid, test), strict=True)},
    )


def matches(data: MusicData, split: str = "test", other: str = "train"):
    (found,) = [c for c in audit(data).comparisons if (c.split, c.other) == (split, other)]
    return [(m.piece, m.other, m.kind, m.semitones) for m in found.matches]


def test_planted_duplicates_are_found_and_named():
    train = [song(i, 50 + i) for i in range(12)]
    test = [song(100), train[3], moved(train[4], 5), edited(train[5]), edited(moved(train[6], -7)),
            np.concatenate([song(101, 40), train[7], song(102, 30)]), train[8][5:50]]  # fmt: skip
    data = music(train, [song(200), moved(test[0], 2)], test)
    # A train song inside a longer test song is not most of it; a part of a train song is all in it.
    assert matches(data) == [(1, 3, "exact", 0), (2, 4, "transposed", 5), (3, 5, "edited", 0),
                             (4, 6, "transposed and edited", -7), (6, 8, "contained", 0)]  # fmt: skip
    assert matches(data, "valid") == []
    assert matches(data, "test", "valid") == [(0, 1, "transposed", -2)]
    report = audit(data)
    assert report.flagged("test") == [1, 2, 3, 4, 6]
    lengths = data.splits["test"].lengths
    assert report.clean("test").sum() == lengths[0] + lengths[5]


def test_nothing_is_found_where_nothing_is():
    data = music(
        [song(i) for i in range(20)], [song(i) for i in range(50, 55)], [song(i) for i in range(60, 65)]
    )
    report = audit(data)
    assert all(not c.matches and not c.melodies and not any(c.shared.values()) for c in report.comparisons)
    assert report.clean("test").all()


@pytest.mark.parametrize("semitones", range(-6, 6))
def test_all_twelve_keys(semitones):
    data = music([song(1), song(2)], [], [moved(song(2), semitones)])
    ((_, other, kind, shift),) = matches(data)
    assert (other, kind, shift) == (1, "transposed" if semitones else "exact", semitones)


def test_held_chords_and_silence_are_no_passages():
    held = np.repeat(song(1, 3), 20, axis=0)
    quiet = np.zeros((60, 88), np.uint8)
    data = music([np.concatenate([held, song(2)]), np.concatenate([quiet, song(5)])], [],
                 [np.concatenate([held, song(3)]), np.concatenate([quiet, song(4)])])  # fmt: skip
    assert matches(data) == []
    assert audit(data).comparisons[0].shared["passages of 16 frames"] == 0


def test_the_same_melody_over_other_voices_is_told_apart():
    train, test = song(1), song(2)
    tune = np.random.default_rng(5).integers(70, 82, 60)
    train[np.arange(60), tune] = test[np.arange(60), tune] = 1
    (found,) = audit(music([train], [], [test])).comparisons
    assert not found.matches
    assert [m.kind for m in found.melodies] == ["exact"]


def test_edits_against_the_textbook_table():
    draw = np.random.default_rng(0)
    for _ in range(30):
        a, b = (draw.integers(0, 4, draw.integers(1, 12)).astype(np.uint64) for _ in range(2))
        table = np.zeros((len(a) + 1, len(b) + 1), int)
        table[:, 0], table[0] = range(len(a) + 1), range(len(b) + 1)
        for i in range(len(a)):
            for j in range(len(b)):
                table[i + 1, j + 1] = min(
                    table[i, j + 1] + 1, table[i + 1, j] + 1, table[i, j] + (a[i] != b[j])
                )
        longer, want = max(len(a), len(b)), table[-1, -1]
        assert edits(a, b, longer) == want
        assert edits(a, b, 3) == (want if want <= 3 else longer)


# ---- text


LINES = [f"sentence {i} tells of thing {i * 7} and of {i * 13} others besides" for i in range(40)]


@pytest.mark.parametrize("kind", ["char", "word"])
def test_lines_and_n_grams_of_a_text(kind):
    near = LINES[4].replace("besides", "too")
    new = "altogether different words stand in this one line here"
    test = "\n".join([LINES[3], near, new, "too short"]) + "\n"
    data = text_data("made-up", kind, {"train": "\n".join(LINES) + f"\n{new.upper()}\nx y z\n", "test": test})
    (found,) = audit(data).comparisons
    assert [(m.piece, m.other, m.kind) for m in found.matches] == [(0, 3, "exact"), (1, 4, "edited")]
    assert found.names[0] == LINES[3]
    assert found.too_short == 1
    longest = list(found.shared.values())
    assert 0 < longest[2] < longest[0] <= 1
    clean = audit(data).clean("test")
    ends = data.splits["test"] == data.vocabulary.index("\n" if kind == "char" else "<eos>")
    assert clean.sum() == len(clean) - (np.flatnonzero(ends)[1] + 1)


# ---- scores and the command


@pytest.mark.parametrize("make", [toys.music, toys.text])
def test_the_clean_part_is_scored_beside_the_whole(make):
    data = make()
    trainer = Trainer(toys.recipe(stop__epochs=1), data)
    trainer.train()
    model, whole = trainer.model, evaluate(trainer.model, data, "test")
    clean = evaluate_clean(model, data, "test")
    if data.kind == "music":  # nothing is near-duplicate there: the clean part is the whole
        assert clean["near_duplicates"] == 0
        assert clean["clean_nats_per_frame"] == pytest.approx(whole["nats_per_frame"])
        data.splits["test"] = Songs.pack([data.splits["train"][0], data.splits["test"][1]], data.size)
        clean = evaluate_clean(model, data, "test")
        data.splits["test"] = Songs.pack([data.splits["test"][1]], data.size)
        assert clean["near_duplicates"] == 1
        assert clean["clean_nats_per_frame"] == pytest.approx(evaluate(model, data, "test")["nats_per_frame"])
    else:  # every line of five words and more stands in the training part
        assert clean["near_duplicates"] > 0
        assert clean["clean_symbols"] < len(data.splits["test"])


def test_the_command_writes_what_it_found(tmp_path, capsys):
    path, out = tmp_path / "songs.npz", tmp_path / "audit.json"
    train = [song(i) for i in range(4)]
    save_npz(path, music(train, [train[1][5:45]], [moved(train[2], 3)]))
    assert main(["data", "audit", str(path), "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "test in train: 1 of 1 songs have a near-duplicate (1 transposed)" in printed
    assert "+3 semitones" in printed
    assert "contained: 100 % of 'valid-0000' lies in 'train-0001'" in printed
    written = json.loads(out.read_text())
    assert written["command"].startswith("deeprnn data audit")
    assert main(["data", "audit", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["comparisons"] == written["comparisons"]
    assert main(["data", "audit", str(path), "--similarity", "0.1"]) == 2
    assert "from 0.5 to 1" in capsys.readouterr().err


def test_one_split_alone_is_refused():
    with pytest.raises(UserError, match="one split only"):
        audit(MusicData("made-up", {"train": Songs.pack([song(1)])}))
