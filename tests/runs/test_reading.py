"""Regular files alone, bounded, nothing followed and nothing waited for."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from deeprnn.errors import UserError
from deeprnn.runs.reading import DEEPEST, open_regular, read_json, read_regular, regular


def test_a_regular_file_is_read_to_its_bound(tmp_path: Path):
    path = tmp_path / "a.json"
    path.write_bytes(b"x" * 10)
    assert read_regular(path, 10) == b"x" * 10
    with pytest.raises(UserError, match=r"a\.json is larger than 9 bytes"):
        read_regular(path, 9)
    status = regular(path)
    assert status is not None
    assert status.st_size == 10


@pytest.mark.parametrize("kind", ["pipe", "link", "dangling", "device", "folder"])
def test_anything_else_is_refused_at_once(tmp_path: Path, kind: str):
    path = tmp_path / "a"
    (tmp_path / "real").write_text("{}")
    make = {
        "pipe": lambda: os.mkfifo(path),
        "link": lambda: path.symlink_to(tmp_path / "real"),
        "dangling": lambda: path.symlink_to(tmp_path / "nowhere"),
        "device": lambda: path.symlink_to("/dev/zero"),
        "folder": path.mkdir,
    }
    make[kind]()
    assert regular(path) is None
    for read in (open_regular, lambda p: read_regular(p, 10), lambda p: read_json(p, 10)):
        with pytest.raises(UserError, match=r"link|regular"):
            read(path)


def test_what_is_missing_is_an_os_error(tmp_path: Path):
    assert regular(tmp_path / "none") is None
    with pytest.raises(FileNotFoundError):
        read_regular(tmp_path / "none", 10)


@pytest.mark.parametrize(
    ("levels", "fits"), [(DEEPEST, True), (DEEPEST + 1, False), (700, False), (10**5, False)]
)
@pytest.mark.parametrize("pair", ["[]", "{}"])
def test_json_is_nested_no_deeper_than_a_walk_can_go(tmp_path: Path, levels: int, fits: bool, pair: str):
    path = tmp_path / "a.json"
    opening = "[" if pair == "[]" else '{"a":'
    path.write_text(opening * levels + "1" + pair[1] * levels)
    if fits:
        assert json.dumps(read_json(path, 10**6)) == path.read_text().replace(":", ": ")
    else:
        with pytest.raises(UserError, match=r"nested|cannot be read"):
            read_json(path, 10**7)


@pytest.mark.parametrize("content", [b"", b"{", b"\xff", b"1" * 5000, b"NaNa"])
def test_what_is_no_json_is_told(tmp_path: Path, content: bytes):
    path = tmp_path / "a.json"
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"a\.json cannot be read"):
        read_json(path, 10**6)
