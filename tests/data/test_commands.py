"""`deeprnn data ...` as a person uses it: tables, JSON alone on stdout, errors without a traceback."""

from __future__ import annotations

import json
import os
import pickle

import numpy as np
import pytest

from deeprnn.cli import main
from deeprnn.data import Grid, load, sources
from deeprnn.data.show import roll_as_text
from tests.data.makers import midi_file, note_track, npz_bytes
from tests.helpers import benchmark_data

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
    assert "the connection failed" in message
    assert str(tmp_path / "cache" / "music" / "JSB_Chorales.mat") in message


def test_the_cache_folder_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.delenv("DEEPRNN_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert sources.cache_folder() == tmp_path / "deeprnn"
