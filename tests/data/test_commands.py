"""`deeprnn data ...` as a person uses it: tables, JSON alone on stdout, errors without a traceback."""

from __future__ import annotations

import json
import os
import pickle
import tomllib

import numpy as np
import pytest

from deeprnn.cli import main
from deeprnn.data import Grid, load, sources
from deeprnn.data.show import choose_song, roll_as_text
from deeprnn.generation.primers import read_primer, run_data
from tests.data.makers import midi_file, note_track, npz_bytes
from tests.helpers import benchmark_data
from tests.small_runs import small_run

pytest.importorskip("tyro")
pytest.importorskip("rich")
Q = 480


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("DEEPRNN_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def songs(tmp_path):
    pytest.importorskip("symusic")
    folder = tmp_path / "songs"
    for i, split in enumerate(("train", "valid", "test")):
        (folder / split).mkdir(parents=True)
        content = midi_file([note_track([(0, Q, 60 + i), (Q + 7, 2 * Q, 64)])])
        (folder / split / f"{i}.mid").write_bytes(content)
    (folder / "bad.mid").write_bytes(b"nothing")
    return folder


def run_json(capsys, *argv):
    assert main(argv) == 0
    return json.loads(capsys.readouterr().out)


def test_check_shows_the_published_counts(capsys):
    benchmark_data()
    found = run_json(capsys, "data", "check", "jsb", "ptb-char", "ptb-word", "--json")
    jsb, chars, words = found["sets"]
    assert jsb["sequences"] == {"train": 229, "valid": 76, "test": 77}
    assert jsb["frames"] == {"train": 13_807, "valid": 4_602, "test": 4_725}
    assert jsb["verified"] is True
    assert jsb["notes_per_frame"]["train"] == pytest.approx(3.9, abs=0.1)
    assert chars["tokens"] == {"train": 5_059_550, "valid": 396_412, "test": 446_184}
    assert chars["vocabulary"] == 50
    assert words["tokens"] == {"train": 929_589, "valid": 73_760, "test": 82_430}
    assert words["vocabulary"] == 10_000


def test_check_as_a_table(capsys):
    benchmark_data()
    assert main(["data", "check", "jsb"]) == 0
    shown = capsys.readouterr().out
    assert "13,807" in shown
    assert "verified" in shown


def test_check_of_a_set_that_is_not_there(capsys, monkeypatch):
    monkeypatch.delenv("DEEPRNN_DATA", raising=False)
    assert main(["data", "check", "nottingham", "--json"]) == 1
    (entry,) = json.loads(capsys.readouterr().out)["sets"]
    assert entry == {
        "name": "nottingham",
        "found": False,
        "missing": ["music/Nottingham.mat"],
        "get": "deeprnn data get nottingham",
    }


def test_check_without_names_looks_at_every_set(capsys, monkeypatch):
    absent = lambda name: {"name": name, "found": False, "get": "somehow"}  # noqa: E731
    monkeypatch.setattr("deeprnn.data.checking.check", absent)
    assert main(["data", "check"]) == 0, "nothing was asked for by name, so nothing is amiss"
    shown = capsys.readouterr().out
    assert all(name in shown for name in ("jsb", "piano-midi", "ptb-word", "bach"))


def test_check_tells_a_damaged_file(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("DEEPRNN_DATA", str(tmp_path))
    (tmp_path / "JSB_Chorales.mat").write_bytes(b"damaged")
    assert main(["data", "check", "jsb"]) == 1
    shown = capsys.readouterr().out
    assert "DIFFERS" in shown
    assert "not a MATLAB 5 file" in shown


def test_import_reports_every_file(capsys, songs, tmp_path):
    out = tmp_path / "kept" / "songs.npz"
    assert main(["data", "import", str(songs), "--out", str(out)]) == 0
    shown = capsys.readouterr().out
    assert "accepted  train/0.mid -> train (8): 1 moved" in shown
    assert "skipped   bad.mid: it is not a MIDI file" in shown
    assert "3 files accepted, 1 skipped" in shown
    assert "of 6 notes: 3 moved" in shown
    assert load(out).splits["test"].frames == 8


def test_import_as_json(capsys, songs):
    found = run_json(capsys, "data", "import", str(songs), "--json")
    assert (found["accepted"], found["skipped"]) == (3, 1)
    assert found["losses"]["moved"] == 3
    assert found["frames"] == {"train": 8, "valid": 8, "test": 8}


def run_of(capsys, folder, out, *options):
    """Train a very small model for an epoch; its recipe's data part, and what was printed."""
    small = ("--model.hidden", "4", "--model.intermediate", "4", "--model.output_hidden", "4")
    out = ("--out", str(out), "--name", "x", "--device", "cpu")
    status = main(["train", str(folder), *small, "--stop.epochs", "1", *out, *options])
    return status, capsys.readouterr()


def test_train_reads_files_as_import_does_and_says_what_that_lost(capsys, songs, tmp_path):
    options = ("--steps-per-beat", "2", "--low", "61", "--high", "90", "--transpose")
    status, shown = run_of(capsys, songs, tmp_path / "runs", *options)
    assert status == 0
    assert "3 files: 4 / 4 / 4 frames to train, validate and test on" in shown.out
    assert "of 6 notes on the grid: 3 moved, 1 out of range" in shown.out
    recipe = tomllib.loads((tmp_path / "runs" / "x" / "recipe.toml").read_text())["data"]
    assert (recipe["steps_per_beat"], recipe["low"], recipe["high"]) == (2, 61, 90)
    assert recipe["transpose"] is True


def test_train_keeps_drums_when_asked(capsys, tmp_path):
    pytest.importorskip("symusic")
    for i, split in enumerate(("train", "valid", "test")):
        content = midi_file([note_track([(0, Q, 60 + i)]), note_track([(0, 4 * Q, 36)], channel=9)])
        (tmp_path / f"{split}.mid").write_bytes(content)
    assert "4 / 4 / 4 frames" in run_of(capsys, tmp_path, tmp_path / "runs")[1].out
    assert "16 / 16 / 16 frames" in run_of(capsys, tmp_path, tmp_path / "more", "--drums")[1].out


def test_a_set_that_is_what_it_is_takes_no_grid(capsys, tmp_path):
    benchmark_data()
    status, shown = run_of(capsys, "jsb", tmp_path, "--steps-per-beat", "2")
    assert status == 2
    assert "data.steps_per_beat=2 is for people's own files and bach" in shown.err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("text", ["a" * 20, "ab", "a\nb\nc\nd"])
def test_too_little_text_is_one_sentence_and_leaves_no_run_behind(capsys, tmp_path, text):
    (tmp_path / "tiny.txt").write_text(text)
    status, shown = run_of(capsys, tmp_path / "tiny.txt", tmp_path / "runs")
    assert status == 2
    assert "too little" in shown.err
    assert shown.err.count("\n") == 1
    assert not (tmp_path / "runs").exists()


def test_a_text_with_too_little_to_test_on_is_trained_on(capsys, tmp_path):
    (tmp_path / "short.txt").write_text(
        "a " * 15 + "b"
    )  # cut between words, which leaves one letter for the end
    status, shown = run_of(capsys, tmp_path / "short.txt", tmp_path / "runs")
    assert status == 0, shown.err
    assert "28 / 2 / 1 symbols" in shown.out
    result = json.loads((tmp_path / "runs" / "x" / "run.json").read_text())["result"]
    assert "valid" in result
    assert "test" not in result


def test_import_of_words(capsys, tmp_path):
    path = tmp_path / "book.txt"
    path.write_text("to be or not to be\n" * 30)
    assert main(["data", "import", str(path), "--kind", "word", "--minimum", "2"]) == 0
    assert "vocabulary: 6; read as <unk>: 0 / 0 / 0" in capsys.readouterr().out


def test_show_draws_a_roll(capsys, songs, tmp_path):
    pytest.importorskip("matplotlib")
    png = tmp_path / "images" / "roll.png"
    assert main(["data", "show", str(songs), "--png", str(png)]) == 0
    shown = capsys.readouterr().out
    assert "  C4 ████····" in shown
    assert "  E4 ····████" in shown
    assert png.read_bytes().startswith(b"\x89PNG")
    found = run_json(capsys, "data", "show", str(songs), "--split", "test", "--json")
    assert found["shown"][0] == [62]
    assert found["frames"] == {"train": 8, "valid": 8, "test": 8}


def test_show_writes_the_image_where_it_was_asked_for(songs, tmp_path):
    pytest.importorskip("matplotlib")
    assert main(["data", "show", str(songs), "--png", str(tmp_path / "roll")]) == 0
    assert (tmp_path / "roll").read_bytes().startswith(b"\x89PNG")
    (tmp_path / "folder").mkdir()
    assert main(["data", "show", str(songs), "--png", str(tmp_path / "folder")]) == 2
    assert not (tmp_path / "folder.png").exists()


def test_a_roll_wider_than_the_screen_is_broken_into_systems():
    roll = np.zeros((10, 88), np.uint8)
    roll[0, 40] = roll[9, 41] = 1
    whole = roll_as_text(roll, Grid())
    assert whole.splitlines() == ["  D4 ·········█", " C#4 █·········"]
    systems = roll_as_text(roll, Grid(), width=11).split("\n\n")
    assert systems == ["  D4 ······\n C#4 █·····", "  D4 ···█\n C#4 ····"]


def test_show_prints_text(capsys, tmp_path):
    path = tmp_path / "book.txt"
    path.write_text("to be or not to be [bold]\n" * 30)
    assert main(["data", "show", str(path)]) == 0
    assert "to be or not to be [bold]" in capsys.readouterr().out


class Harmful:
    def __reduce__(self):
        return os.mkdir, ("ran",)


def bad_files():
    return {
        "harm.pickle": pickle.dumps({"train": Harmful()}),
        "cut.npz": npz_bytes(train=np.zeros((3, 88)))[:-30],
        "bad.json": b'{"train": [[["x"]]], "valid": [], "test": []}',
        "bad.mat": b"x" * 300,
        "bad.mid": b"MThd\0\0\0\6",
        "bad.txt": b"\xff\xfe\0",
        "nothing.xyz": b"",
    }


def test_songs_are_counted_from_one_as_primers_are(capsys, songs):
    run = small_run("music")
    data = run_data(run)
    for number in range(1, 1 + len(data.splits["train"])):
        chosen = choose_song(data, "train", number)
        assert (read_primer(run, f"train:{number}", length=len(chosen)) == chosen).all()
    assert (
        "songs, test:1, test/2.mid"
        in run_json(capsys, "data", "show", str(songs), "--split", "test", "--json")["title"]
    )
    assert main(["data", "show", str(songs), "--index", "0"]) == 2
    assert "songs has songs 1 to 1 in train: 0 is not among them" in capsys.readouterr().err


@pytest.mark.parametrize("name", bad_files())
@pytest.mark.parametrize("command", ["import", "show"])
def test_a_bad_file_is_one_line_on_stderr_and_status_2(capsys, tmp_path, monkeypatch, command, name):
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).write_bytes(bad_files()[name])
    assert main(["data", command, name]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert "Traceback" not in captured.err
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["data", "get", "nope"], "no data set is named 'nope'"),
        (["data", "get", "bach"], "needs no download"),
        (["data", "check", "nope"], "no data set is named nope"),
        (["data", "show", "nope"], "neither a data set"),
        (["data", "import", "absent"], "absent does not exist"),
        (["data", "import", ".", "--steps-per-beat", "0"], "steps_per_beat=0"),
        (["data", "import", ".", "--max-megabytes", "-1"], "--max-megabytes -1"),
    ],
)
def test_mistakes_are_named(capsys, argv, message):
    assert main(argv) == 2
    assert message in capsys.readouterr().err


def test_offline_the_error_says_what_to_do(capsys, monkeypatch, tmp_path):
    monkeypatch.delenv("DEEPRNN_DATA", raising=False)
    monkeypatch.setenv("DEEPRNN_MIRROR", "http://127.0.0.1:9")
    monkeypatch.setattr("deeprnn.data.download.RETRIES", 0)
    assert main(["data", "get", "jsb"]) == 2
    message = capsys.readouterr().err
    assert "1 attempt: no connection was made" in message
    assert message.startswith("jsb: fetching http://127.0.0.1:9/music/JSB_Chorales.mat\n"), "said at once"
    assert str(tmp_path / "cache" / "music" / "JSB_Chorales.mat") in message


def test_the_cache_folder_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.delenv("DEEPRNN_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert sources.cache_folder() == tmp_path / "deeprnn"
