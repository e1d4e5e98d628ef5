"""Songs from a JSON file, frame by frame.

`json.loads` makes an object of 64 bytes out of every `[]`. Here it reads one frame at a time, which becomes
bits at once; only the lists around the frames are walked by hand.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

from deeprnn.data.limits import read_bytes
from deeprnn.data.music import SPLITS, Grid, Songs
from deeprnn.data.notelists import SongCollector
from deeprnn.errors import UserError

_SPACE = re.compile(r"[ \t\n\r]*")
_SCALAR = re.compile(r"[^\s,\[\]{}]{1,64}")
_LONGEST_FRAME = 32_768  # characters, indentation included
_LONGEST_OTHER = 65_536
_TYPES = {"[": "list", '"': "text", "{": "dict"}


def read_json_songs(path: Path, grid: Grid) -> dict[str, Songs]:
    """Songs by split from `{"train": [[[60, 64], ...], ...], ...}`; other entries are left out."""
    data = read_bytes(path)
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not readable JSON: {error.reason} at byte {error.start}") from None
    del data
    return _Walker(text, path, grid).splits()


class _Walker:
    """A place in a text, and what is expected there."""

    def __init__(self, text: str, path: Path, grid: Grid) -> None:
        self.text, self.path, self.grid, self.at = text, path, grid, 0

    def splits(self) -> dict[str, Songs]:
        if self.peek() != "{":
            kind = _TYPES.get(self.peek(), "number or nothing")
            raise UserError(f"{self.path} holds a {kind}; expected splits {', '.join(SPLITS)}")
        songs: dict[str, Songs] = {}
        for _ in self.items("{", "}"):
            key = self.key()
            if key in SPLITS:
                songs[key] = self.songs(key)
            else:
                self.skip(key)
        if self.peek():
            self.fail("nothing more was expected")
        return songs

    def songs(self, split: str) -> Songs:
        collector = SongCollector(self.grid, f"{self.path}, {split}", len(self.text))
        for _ in self.items("[", "]"):
            collector.add(self.frame() for _ in self.items("[", "]"))
        return collector.songs()

    def frame(self) -> Any:
        """A list of numbers, or a number or null alone."""
        if self.peek() == "[":
            end = self.text.find("]", self.at, self.at + _LONGEST_FRAME) + 1
            if not end:
                self.fail(f"a frame does not end within {_LONGEST_FRAME:,} characters")
        elif match := _SCALAR.match(self.text, self.at):
            end = match.end()
        else:
            self.fail("a frame was expected")
        try:
            frame = json.loads(self.text[self.at : end])
        except (ValueError, RecursionError) as error:
            self.fail(f"a frame is no list of numbers ({error})")
        self.at = end
        return frame

    def key(self) -> str:
        if self.peek() != '"':
            self.fail("a name in quotation marks was expected")
        key = self.decode(self.text, "a name")
        self.expect(":")
        return key

    def skip(self, key: str) -> None:
        """Pass an entry that is no split, which may be a remark but nothing large."""
        self.peek()
        start, self.at = self.at, 0
        what = f"the entry {key[:40]!r}, which is no split and may have {_LONGEST_OTHER:,} characters,"
        self.decode(self.text[start : start + _LONGEST_OTHER], what, start)
        self.at += start

    def decode(self, text: str, what: str, start: int = 0) -> Any:
        try:
            value, self.at = json.JSONDecoder().raw_decode(text, self.at)
        except (ValueError, RecursionError) as error:
            self.at = start
            self.fail(f"{what} cannot be read ({error})")
        return value

    def items(self, opening: str, closing: str) -> Iterator[None]:
        """Stop at each element of a list or dict; whoever asked reads it and moves on."""
        if self.peek() != opening:
            kind = _TYPES.get(self.peek())
            self.fail(f"expected a {_TYPES[opening]}, found " + (f"a {kind}" if kind else "something else"))
        self.at += 1
        if self.peek() == closing:
            self.at += 1
            return
        while True:
            yield
            if self.peek() == closing:
                self.at += 1
                return
            self.expect(",")

    def peek(self) -> str:
        """The next character that is no white space; empty at the end."""
        self.at = _SPACE.match(self.text, self.at).end()  # type: ignore[union-attr]
        return self.text[self.at : self.at + 1]

    def expect(self, character: str) -> None:
        if self.peek() != character:
            self.fail(f"{character!r} was expected")
        self.at += 1

    def fail(self, reason: str) -> NoReturn:
        raise UserError(f"{self.path} is not readable JSON of songs: {reason}, at character {self.at:,}")
