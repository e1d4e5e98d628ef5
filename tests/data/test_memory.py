"""No file takes more than ten times its size in memory, beside a floor: files made to do so are refused."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

from deeprnn.data import SPLITS, load
from deeprnn.errors import UserError
from tests.data.makers import midi_file, npz_bytes, plain_npz

MEGABYTE = 10**6
LEAST = 20 * 2**20
OWN = 2 * MEGABYTE  # modules imported late, and what the allocator keeps
SETTINGS = {
    "DEEPRNN_MAX_MEMORY": str(LEAST),
    "DEEPRNN_MAX_FRAMES": "100000",
}  # so that small files reach them

# VmHWM and not getrusage: the latter counts what the parent held before it started this process.
MEASURE = textwrap.dedent(
    """
    import sys
    from pathlib import Path
    import deeprnn.data.midi
    from deeprnn.data.importing import Options, import_path
    from deeprnn.errors import UserError

    def kilobytes(name):
        return int(next(x for x in open("/proc/self/status") if x.startswith(name)).split()[1])

    before = kilobytes("VmRSS")
    try:
        import_path(Path(sys.argv[1]), Options(sys.argv[2]))
        print("read")
    except UserError as error:
        print(str(error).replace("\\n", " "))
    print(1024 * (kilobytes("VmHWM") - before))
    """
)


def peak(path: Path, kind: str = "auto", **settings: str) -> tuple[str, int]:
    """What became of a file, and the bytes of memory that it took at the most."""
    if sys.platform != "linux":
        pytest.skip("the peak of a process's memory is read from /proc")
    command = [sys.executable, "-c", MEASURE, str(path), kind]
    done = subprocess.run(
        command, capture_output=True, text=True, env=os.environ | SETTINGS | settings, timeout=300
    )
    assert done.returncode == 0, done.stderr
    answer, taken = done.stdout.splitlines()
    return answer, int(taken)


def splits(**given: object) -> dict[str, object]:
    return {split: [] for split in SPLITS} | given


def pickled(body: bytes) -> bytes:
    """The pickle of a dict whose `train` is what `body` makes."""
    return b"\x80\x02}(X\x05\x00\x00\x00train" + body + b"u."


LYRICS = b"la la la and so the song goes on and on\n"
UNIQUE = b" ".join(b"%x" % number for number in range(0x100000, 0x100000 + 1_000_000))

# name: content, kind, and a word of the answer
FILES: dict[str, tuple[bytes, str, str]] = {
    "lists.pickle": (b"]" * (2 * MEGABYTE), "auto", "memory"),
    "marked.pickle": (pickled(b"](" + b")" * (2 * MEGABYTE) + b"e"), "auto", "memory"),
    "numbers.pickle": (pickled(b"](" + b"M\xff\xff" * MEGABYTE + b"e"), "auto", "memory"),
    "shared.pickle": (
        pickle.dumps(splits(train=[[(60,)] * 10_000] * 2000), 2),
        "auto",
        "memory",
    ),
    "array.json": (b"[" + b"[]," * (3 * MEGABYTE), "auto", "holds a list"),
    "songs.json": (b'{"train":[' + b"[]," * (3 * MEGABYTE), "auto", "songs"),
    "frames.json": (b'{"train":[[' + b"[]," * (3 * MEGABYTE), "auto", "100,000"),
    "notes.json": (b'{"train":[[[' + b"[]," * (3 * MEGABYTE), "auto", "frame"),
    "other.json": (b'{"other":[' + b"[]," * (3 * MEGABYTE), "auto", "other"),
    "text.txt": (LYRICS * (8 * MEGABYTE // len(LYRICS)), "char", "read"),
    "emoji.txt": ("\N{MUSICAL SCORE}".encode() + LYRICS * (8 * MEGABYTE // len(LYRICS)), "char", "read"),
    "lines.txt": (b"a\n" * (4 * MEGABYTE), "char", "read"),
    "words.txt": (b"ab " * (3 * MEGABYTE), "word", "read"),
    "unique.txt": (UNIQUE, "word", "memory"),
    "dense.mid": (
        midi_file([[(0, b"\x90\x3c\x50"), *([(1, b"\x3c\x00"), (0, b"\x3c\x50")] * 500_000)]]),
        "auto",
        "read",
    ),
    "cells.mat": (b"", "auto", "songs"),
    "empty.npz": (b"", "auto", "songs"),
    "packed.npz": (b"", "auto", "read"),
}


def content(name: str) -> bytes:
    if name == "empty.npz":
        lengths = {f"{s}_len": np.zeros(3 * MEGABYTE, np.uint8) for s in SPLITS}
        return npz_bytes(**{s: np.zeros((0, 88), np.uint8) for s in SPLITS}, **lengths)
    if name == "packed.npz":
        table = np.random.default_rng(0).integers(0, 256, (700_000, 11), np.uint8)
        tables = {f"{s}_packed": table if s == "train" else table[:10] for s in SPLITS}
        lengths = {f"{s}_lengths": np.array([10] * (len(tables[f"{s}_packed"]) // 10)) for s in SPLITS}
        return plain_npz(**tables, **lengths, pitches=np.array(88))
    if name == "cells.mat":
        return many_cells(MEGABYTE)
    return FILES[name][0]


def many_cells(count: int) -> bytes:
    """A MATLAB 5 file whose traindata is a cell array of so many empty arrays."""
    word = lambda *numbers: np.array(numbers, "<u4").tobytes()  # noqa: E731
    head = word(6, 8, 1, 0) + word(5, 8, 1, count) + word(1, 9) + b"traindata".ljust(16, b"\0")
    body = head + word(14, 0) * count
    return b" " * 124 + b"\0\1IM" + word(14, len(body)) + body


@pytest.mark.parametrize("name", FILES)
def test_a_file_takes_at_most_ten_times_its_size(tmp_path, name):
    path = tmp_path / name
    path.write_bytes(content(name))
    size = path.stat().st_size
    answer, taken = peak(path, FILES[name][1])
    assert FILES[name][2] in answer
    times = 25 if name.endswith(".mid") else 10  # symusic alone takes ten times a file of nothing but notes
    assert taken <= max(LEAST, times * size) + OWN, f"{taken / size:.1f} times the size of the file"


@pytest.mark.parametrize(("steps", "answer"), [(200_000, "read"), (230_000, "DEEPRNN_MAX_MEMORY")])
def test_a_few_long_notes_take_no_more_than_any_small_file(tmp_path, steps, answer):
    """A roll has a byte for every key and step, however short the file that it comes from."""
    took = {}
    for length in (4, steps):
        ends = [(120 * length * (key == 21), bytes((0x90, key, 0))) for key in range(21, 109)]
        path = tmp_path / f"{length}.mid"
        path.write_bytes(midi_file([[*((0, bytes((0x90, key, 80))) for key in range(21, 109)), *ends]]))
        told, took[length] = peak(path, DEEPRNN_MAX_FRAMES="1000000")
    assert answer in told
    assert took[steps] - took[4] <= LEAST + OWN  # beside the modules that both files load


def test_keys_are_text(tmp_path):
    """Numbers can be chosen so that all have one hash, which makes a dict of them quadratic in time."""
    path = tmp_path / "collisions.pickle"
    path.write_bytes(pickle.dumps({number * (2**61 - 1): 0 for number in range(1000)}))
    with pytest.raises(UserError, match="key is an int, not text"):
        load(path)
    memo = b"".join(b"]p%d\n0" % (number * (2**61 - 1)) for number in range(1, 1000))
    path.write_bytes(memo + b"N.")
    with pytest.raises(UserError, match="damaged"):
        load(path)
