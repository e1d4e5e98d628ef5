"""Importing: every file accounted for, splits that stay, duplicates found."""

from __future__ import annotations

import hashlib
import json
import os

import numpy as np
import pytest
from hypothesis import given, settings

from deeprnn.data import SPLITS, Grid, MusicData, TextData, importing, load
from deeprnn.data.cutting import Meter
from deeprnn.data.importing import SONGS, Options, import_path, read_song
from deeprnn.data.midi import midi_bytes_to_song
from deeprnn.data.quantise import Losses
from deeprnn.data.song import Song
from deeprnn.data.splitting import split_by_hash
from deeprnn.errors import UserError
from tests.data.makers import midi_file, mutations, note_track

pytest.importorskip("symusic")
Q = 480


def song(pitch: int, name: str = "") -> bytes:
    title = [(0, b"\xff\x03" + bytes([len(name)]) + name.encode())] if name else []
    return midi_file([[*title, *note_track([(0, Q, pitch), (Q, 3 * Q, pitch + 4)])]])


def fill(folder, files):
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return folder


def reports(report):
    return {file.path: file for file in report.files}


def test_another_format_of_songs_is_a_row_of_the_table(tmp_path, monkeypatch):
    def reader(data, *rest, **options):
        return midi_bytes_to_song(data.removeprefix(b"!"), *rest, **options)

    monkeypatch.setitem(importing.SONGS, ".mine", reader)
    _, report = import_path(fill(tmp_path, {"a.mine": b"!" + song(60), "b.mid": song(62)}))
    assert [file.path for file in report.files if file.accepted] == ["a.mine", "b.mid"]


def test_every_file_is_accepted_or_skipped_with_a_reason(tmp_path):
    folder = fill(
        tmp_path,
        {
            "a.mid": song(60),
            "sub/b.MIDI": song(62),
            "copy of a.mid": song(60),
            "broken.mid": song(66)[:-9],
            "silent.mid": midi_file([[]]),
            "drums.mid": midi_file([note_track([(0, Q, 36)], channel=9)]),
            "notes.txt": b"hello",
            ".hidden.mid": song(64),
        },
    )
    data, report = import_path(folder)
    assert isinstance(data, MusicData)
    found = reports(report)
    assert {path for path, file in found.items() if file.accepted} == {"a.mid", "sub/b.MIDI"}
    assert found["copy of a.mid"].reason == "same bytes as a.mid"
    assert "not a readable MIDI file" in found["broken.mid"].reason
    assert found["silent.mid"].reason == "no notes are left on the grid"
    assert found["drums.mid"].reason == "no notes are left on the grid (1 drums)"
    assert ".txt" in found["notes.txt"].reason
    assert ".hidden.mid" not in found
    assert report.accepted == 2
    assert sum(len(songs) for songs in data.splits.values()) == 2


def test_names_and_folders_give_splits_where_all_are_named(tmp_path):
    folder = fill(tmp_path, {f"{s}/{p}.mid": song(p) for p, s in ((60, "train"), (61, "val"), (62, "test"))})
    data, report = import_path(folder)
    assert {file.path: file.split for file in report.files} == {
        "train/60.mid": "train",
        "val/61.mid": "valid",
        "test/62.mid": "test",
    }
    assert [len(data.splits[s]) for s in SPLITS] == [1, 1, 1]


def test_duplicates_across_splits_are_found_though_bytes_differ(tmp_path):
    folder = fill(
        tmp_path, {"train/a.mid": song(60, "one"), "valid/b.mid": song(61), "test/c.mid": song(60, "two")}
    )
    _, report = import_path(folder)
    assert report.duplicates == [("test/test/c.mid", "train/train/a.mid")]


def test_what_quantising_loses_is_summed(tmp_path):
    off = midi_file([note_track([(7, Q, 60), (0, Q, 10)]), note_track([(0, Q, 40)], channel=9)])
    _, report = import_path(fill(tmp_path, {"a.mid": off, "b.mid": song(60)}))
    assert (report.losses.notes, report.losses.moved) == (5, 1)
    assert (report.losses.out_of_range, report.losses.drums) == (1, 1)


def test_the_grid_and_transposition_are_used(tmp_path):
    folder = fill(tmp_path, {"a.mid": song(62)})
    data = load(folder, grid=Grid(2, 40, 90), transpose=True)
    assert data.grid == Grid(2, 40, 90)
    assert data.size == 51
    assert sum(songs.frames for songs in data.splits.values()) == 6


def test_an_empty_split_is_a_warning(tmp_path):
    _, report = import_path(fill(tmp_path, {"a.mid": song(60)}))
    assert len(report.warnings) == 2


@pytest.mark.parametrize("count", [2, 3, 5, 8])
def test_few_files_still_fill_the_splits(tmp_path, count):
    data, report = import_path(fill(tmp_path, {f"{p}.mid": song(p) for p in range(40, 40 + count)}))
    sizes = [len(data.splits[split]) for split in SPLITS]
    assert sum(sizes) == count
    assert min(sizes[: min(count, 3)]) >= 1
    assert "of valid" in next(warning for warning in report.warnings if "more than a third" in warning)


def long_song(beats: int, rest: int = 0, signature: bytes = b"") -> bytes:
    """A quarter note on every beat, but silence for eight of them from `rest` on."""
    notes = [(Q * i, Q * i + Q, 48 + i % 24) for i in range(beats) if not rest <= i < rest + 8 * bool(rest)]
    return midi_file([[*([(0, signature)] if signature else []), *note_track(notes)]])


def test_a_long_movement_does_not_decide_validation(tmp_path):
    """By its hash the long movement would be most of the validation frames, and choose the epoch."""
    assert split_by_hash(hashlib.sha256(long_song(406)).hexdigest()) == "valid"
    files = {f"{i}.mid": long_song(20 + i) for i in range(35)}
    data, report = import_path(fill(tmp_path, files | {"long.mid": long_song(406)}))
    assert reports(report)["long.mid"].split == "train"
    total = sum(data.sizes.values())
    for split in ("valid", "test"):
        assert 0.08 < data.sizes[split] / total < 0.12
        assert data.splits[split].lengths.max() <= data.sizes[split] / 3
        lengths = data.splits[split].lengths / 4
        assert lengths.min() < 35 < lengths.max(), "short and long ones in each"
    assert report.warnings == []


def test_too_few_files_to_fill_the_splits_are_cut_at_silences_or_bar_lines(tmp_path):
    files = {
        "a.mid": long_song(400, rest=315),
        "b.mid": long_song(300, signature=b"\xff\x58\x04\x03\x02\x18\x08"),
    }
    data, report = import_path(fill(tmp_path, files))
    assert {p: f.split for p, f in reports(report).items()} == {
        "a.mid": "all three, cut at a silence and a bar line",
        "b.mid": "all three, cut at a bar line",
    }
    # in beats: a after the rest at 323, then at the bar line of 360; b (in three-four time) at 240 and 270
    assert {s: (songs.lengths / 4).tolist() for s, songs in data.splits.items()} == {
        "train": [323, 240],
        "valid": [37, 30],
        "test": [40, 30],
    }
    assert data.names["valid"] == ["a.mid (part 2 of 3)", "b.mid (part 2 of 3)"]
    whole = np.concatenate([data.splits[s][0] for s in SPLITS])
    (tmp_path / "b.mid").unlink()
    alone = load(tmp_path)
    assert (np.concatenate([alone.splits[s][0] for s in SPLITS]) == whole).all(), "nothing lost"
    assert alone.remarks[0] == "1 file: 1,292 / 148 / 160 frames to train, validate and test on"


def test_a_folder_of_long_texts_is_cut_at_line_ends(tmp_path):
    files = {f"{c}.txt": "".join(f"{c} {i}\n" for i in range(100)).encode() for c in "ab"}
    data, report = import_path(fill(tmp_path, files))
    assert {file.split for file in report.files} == {"all three, cut at line ends"}
    lines = {split: data.decode(ids).splitlines() for split, ids in data.splits.items()}
    assert [len(lines[split]) for split in SPLITS] == [160, 20, 20]
    assert lines["test"][0] == "a 90"
    assert lines["test"][-1] == "b 99"


def test_karaoke_files_are_midi(tmp_path):
    data, _ = import_path(fill(tmp_path, {"a.kar": song(60), "b.KAR": song(62), "c.mid": song(64)}))
    assert sum(len(songs) for songs in data.splits.values()) == 3


def test_load_says_what_it_left_out(tmp_path, caplog):
    load(fill(tmp_path, {"a.mid": song(60), "b.mid": b"nothing"}))
    assert "1 of 2 files skipped" in caplog.text
    assert "deeprnn data import" in caplog.text


def test_one_text_file_is_cut_at_line_ends_in_its_own_order(tmp_path):
    lines = [f"line {i}\n" for i in range(100)]
    path = fill(tmp_path, {"book.txt": "".join(lines).encode()}) / "book.txt"
    data = load(path)
    assert isinstance(data, TextData)
    texts = [data.decode(data.splits[s]) for s in SPLITS]
    assert texts == ["".join(lines[:90]), "".join(lines[90:95]), "".join(lines[95:])]
    assert import_path(path)[1].files[0].split == "all three, cut at line ends"
    words = load(path, kind="word", minimum=2)
    assert words.kind == "word"
    assert words.vocabulary[:2] == ["<eos>", "line"]


def test_a_folder_of_text(tmp_path):
    folder = fill(
        tmp_path,
        {
            "train.txt": b"\xef\xbb\xbfa b\r\nc",
            "valid.txt": b"a d\n",
            "test.txt": "é\n".encode(),
            "latin.txt": "caf\xe9".encode("latin-1"),
            "binary.txt": b"a\0b",
            "empty.txt": b" \n",
        },
    )
    data, report = import_path(folder, Options(kind="char"))
    found = reports(report)
    assert "not UTF-8" in found["latin.txt"].reason
    assert "zero bytes" in found["binary.txt"].reason
    assert found["empty.txt"].reason == "it is empty"
    assert data.decode(data.splits["train"]) == "a b\nc\n"
    assert data.unknown == {"train": 0, "valid": 1, "test": 1}


def test_options_reach_files_that_carry_their_own_splits(tmp_path):
    frames = {split: [[[62], [66], [69], [62]]] for split in SPLITS}  # D major
    path = fill(tmp_path, {"x.json": json.dumps(frames).encode()}) / "x.json"
    assert load(path).grid is None
    moved = load(path, grid=Grid(2), transpose=True)
    assert moved.grid == Grid(2)
    assert (moved.splits["train"][0].argmax(1) + 21).tolist() == [60, 64, 67, 60]
    with pytest.raises(UserError, match="cannot be read as word"):
        load(path, kind="word")
    _, report = import_path(path)
    assert len(report.duplicates) == 2, "the same song stands in all three splits"


def test_hidden_files_are_counted_and_odd_names_printable(tmp_path):
    fill(tmp_path, {".a.mid": song(60), "b\x1b[31m.mid": song(61)})
    _, report = import_path(tmp_path)
    assert "1 hidden files were left out" in report.warnings
    assert report.files[0].path == "b\N{REPLACEMENT CHARACTER}[31m.mid"


def test_a_name_that_is_no_text_is_still_reported(tmp_path):
    name = os.fsencode(tmp_path) + b"/\xff.mid"
    try:
        with open(name, "wb") as file:
            file.write(song(60))
    except OSError:
        pytest.skip("this file system takes only UTF-8 names")
    _, report = import_path(tmp_path)
    assert report.files[0].path.encode().endswith(b".mid")  # printable: a lone surrogate could not be encoded


def test_refusals(tmp_path):
    with pytest.raises(UserError, match="neither a data set"):
        load(tmp_path / "absent")
    with pytest.raises(UserError, match="holds no files"):
        load(tmp_path)
    with pytest.raises(UserError, match=r"no song could be read; a\.mid"):
        load(fill(tmp_path, {"a.mid": b"nothing"}))
    with pytest.raises(UserError, match="name that file"):
        load(fill(tmp_path / "mats", {"a.mat": b"", "b.mat": b""}))
    with pytest.raises(UserError, match="kind='tune'"):
        load(tmp_path, kind="tune")
    with pytest.raises(UserError, match="minimum=0"):
        load(tmp_path, minimum=0)
    with pytest.raises(UserError, match="'~nobody-of-that-name/a' is neither"):
        load("~nobody-of-that-name/a")


def test_what_is_no_file_is_skipped_with_the_reason(tmp_path):
    folder = fill(tmp_path / "songs", {"a.mid": song(60), ".git/b.mid": song(61)})
    fill(tmp_path / "elsewhere", {"c.mid": song(62)})
    (folder / "gone.mid").symlink_to(tmp_path / "absent")
    (folder / "link").symlink_to(tmp_path / "elsewhere")
    os.mkfifo(folder / "pipe.mid")  # must not be waited on
    _, report = import_path(folder)
    skipped = {file.path: file.reason for file in report.files if not file.accepted}
    assert set(skipped) == {"gone.mid", "link", "pipe.mid"}
    assert "link to a folder" in skipped["link"]
    with pytest.raises(UserError, match="neither a file nor a folder"):
        import_path(folder / "pipe.mid")


def test_a_folder_that_cannot_be_listed_is_reported(tmp_path, monkeypatch):
    folder = fill(tmp_path, {"a.mid": song(60), "closed/b.mid": song(61)})
    listing = os.scandir

    def scandir(path):
        if str(path).endswith("closed"):
            raise PermissionError(13, "Permission denied", str(path))
        return listing(path)

    monkeypatch.setattr(os, "scandir", scandir)
    _, report = import_path(folder)
    assert reports(report)["closed"].reason == "its files cannot be listed: Permission denied"


def test_a_file_that_cannot_be_read_says_so(tmp_path, monkeypatch):
    path = fill(tmp_path, {"book": b"some text"}) / "book"

    def refuse(*_, **__):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("pathlib.Path.open", refuse)
    monkeypatch.setattr("pathlib.Path.read_bytes", refuse)
    with pytest.raises(UserError, match=r"cannot read .*book: Permission denied"):
        import_path(path)


@pytest.mark.parametrize("kind", ["char", "word"])
def test_a_text_of_one_line_is_cut_between_words(tmp_path, kind):
    words = [f"word{i}" for i in range(100)]
    data, report = import_path(fill(tmp_path, {"a.txt": " ".join(words).encode()}) / "a.txt", Options(kind))
    assert report.warnings == []
    assert report.files[0].split == "all three, cut at words"
    texts = [data.decode(ids) if kind == "char" else "" for ids in data.splits.values()]
    if kind == "char":
        assert "".join(texts).split() == words, "nothing lost, no word torn apart"
    else:
        assert [len(ids) for ids in data.splits.values()] == [91, 5, 4]


def test_a_text_without_spaces_is_cut_by_characters(tmp_path):
    data, _ = import_path(fill(tmp_path, {"a.txt": b"ACGT" * 25}) / "a.txt")
    assert [len(ids) for ids in data.splits.values()] == [90, 5, 5]


def test_utf_16_is_named(tmp_path):
    _, report = import_path(fill(tmp_path, {"a.txt": b"text", "b.txt": "text".encode("utf-16")}))
    assert reports(report)["b.txt"].reason == "it is UTF-16 text: save it as UTF-8"


def test_songs_without_frames_leave_a_split_empty(tmp_path):
    content = json.dumps({"train": [[[60]]], "valid": [[]], "test": []}).encode()
    _, report = import_path(fill(tmp_path, {"a.json": content}) / "a.json")
    assert [w.partition(":")[0] for w in report.warnings if "empty" in w] == [
        "the valid split is empty",
        "the test split is empty",
    ]


def test_all_files_together_obey_the_limit(tmp_path, monkeypatch):
    fill(tmp_path, {f"{c}.txt": c.encode() * 600 for c in "abcd"})
    monkeypatch.setenv("DEEPRNN_MAX_BYTES", "1500")
    _, report = import_path(tmp_path)
    assert report.accepted == 2
    assert all("DEEPRNN_MAX_BYTES" in file.reason for file in report.files if not file.accepted)


TEXT = "Two lines — of text,\nand some ünïcode.\n".encode()


@settings(max_examples=150, deadline=None)
@given(mutations(TEXT))
def test_mutated_text_is_data_or_a_clean_error(tmp_path_factory, data):
    path = tmp_path_factory.getbasetemp() / "mutated.txt"
    path.write_bytes(data)
    for kind in ("char", "word"):
        try:
            found = load(path, kind=kind)
        except UserError:
            continue
        assert found.size > 0


def test_a_reader_of_another_format_serves_import_and_primers(tmp_path, monkeypatch):
    """One row in `SONGS`: lines of pitches, one line a frame."""

    def read(data, grid, *, drums=False, what="it"):
        frames = [[int(pitch) for pitch in line.split()] for line in data.decode().splitlines()]
        roll = np.zeros((len(frames), grid.size), np.uint8)
        for t, frame in enumerate(frames):
            roll[t, [pitch - grid.low for pitch in frame]] = 1
        return Song(
            roll, Losses(notes=len(frames)), (Meter(0, 4 * grid.steps_per_beat),), ("lines of pitches",)
        )

    monkeypatch.setitem(SONGS, ".pitches", read)
    path = tmp_path / "song.pitches"
    path.write_text("60 64\n60\n" * 40)
    (tmp_path / "other.pitches").write_text("65\n" * 40)
    data, report = import_path(tmp_path)
    assert data.sizes["train"] > 0
    assert all("lines of pitches" in file.notes for file in report.files)
    assert (read_song(path, Grid()).roll[0].nonzero()[0] + Grid().low).tolist() == [60, 64]
    (tmp_path / "other.pitches").unlink()
    path.write_text("")
    with pytest.raises(UserError, match="no song could be read"):
        import_path(tmp_path)
