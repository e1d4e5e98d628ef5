"""`deeprnn data check | get | show | import`."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from deeprnn.commands.data_views import DownloadBar, import_json, show_check, show_import
from deeprnn.commands.reading import Reading
from deeprnn.console import console
from deeprnn.errors import UserError

if TYPE_CHECKING:
    from deeprnn.data import MusicData, TextData


@dataclass(frozen=True)
class DataCheck:
    """Show which data sets are found, with counts per split, and verify their sha256.

    Density is the number of notes that sound in a frame, on average.

    Sets are looked for in $DEEPRNN_DATA, then in the cache folder ($DEEPRNN_CACHE, or deeprnn/ in the
    user's cache folder). Without names, all sets are checked.
    """

    sets: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="NAME...")] = ()
    """Sets to check: jsb, nottingham, musedata, piano-midi, ptb-char, ptb-word, bach."""
    json: bool = False
    """Print one JSON document instead of a table."""

    def run(self) -> int:
        from deeprnn.data import names
        from deeprnn.data.checking import check

        unknown = sorted(set(self.sets) - set(names()))
        if unknown:
            raise UserError(f"no data set is named {', '.join(unknown)}: use one of {', '.join(names())}")
        entries = [check(name) for name in self.sets or names()]
        if self.json:
            print(json.dumps({"sets": entries}, indent=2))
        else:
            show_check(entries)
        named = [entry for entry in entries if entry["name"] in self.sets]
        bad = any(entry.get("verified") is False or "error" in entry for entry in entries)
        return 1 if bad or not all(entry["found"] for entry in named) else 0


@dataclass(frozen=True)
class DataGet:
    """Download data sets from their public addresses into the cache folder.

    An interrupted download continues where it stopped; each file is verified by sha256 and put in place
    only when whole. $DEEPRNN_MIRROR names another server that holds the same files.
    """

    sets: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="NAME...")]
    """Sets to download: jsb, nottingham, musedata, piano-midi, ptb-char, ptb-word, or `all`."""

    def run(self) -> int:
        from deeprnn.data.download import get
        from deeprnn.data.sources import SOURCES

        if not self.sets:
            raise UserError(f"name the sets to download: {', '.join(SOURCES)}, or all")
        if "bach" in self.sets:
            raise UserError("bach needs no download: it comes with `pip install 'deeprnn[bach]'`")
        for name in SOURCES if "all" in self.sets else self.sets:
            with DownloadBar(name) as progress:
                results = get(name, progress=progress, tell=progress.tell)
            for place, fresh in results:
                console().print(f"{name}: {'downloaded' if fresh else 'already at'} {place}", markup=False)
        return 0


@dataclass(frozen=True)
class DataShow:
    """Look at a data set: a piano roll in characters or as an image, or a sample of text."""

    data: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="NAME_OR_PATH")]
    """A set's name, or a file or folder."""
    split: str = "train"
    """train, valid or test."""
    index: int = 1
    """Which song of the split, counted from 1, as in `generate --primer test:1`."""
    png: Path | None = None
    """Write the piano roll to this image file."""
    steps: int = 96
    """How many steps to show on the screen."""
    transpose: bool = False
    """Move songs to C major or C minor (bach and MIDI files)."""
    json: bool = False
    """Print one JSON document: what is shown, with the set's counts."""

    def run(self) -> int:
        from deeprnn.data import MusicData, load

        if self.steps < 1:
            raise UserError(f"--steps {self.steps} must be at least 1")
        data = load(self.data, **({"transpose": True} if self.transpose else {}))
        if isinstance(data, MusicData):
            self._show_music(data)
        else:
            self._show_text(data)
        return 0

    def _show_music(self, data: MusicData) -> None:
        from deeprnn.data.music import Grid
        from deeprnn.data.show import choose_song, roll_as_text, roll_png

        roll = choose_song(data, self.split, self.index)
        title = f"{data.name}, {self.split}:{self.index}, {data.names[self.split][self.index - 1]}"
        grid = data.grid if data.grid else Grid(steps_per_beat=1, low=21, high=20 + data.size)
        if self.png:
            roll_png(self.png, roll, grid, title)
        if self.json:
            frames = [[int(p) + grid.low for p in row.nonzero()[0]] for row in roll[: self.steps]]
            self._print_json(data, {"title": title, "steps": len(roll), "shown": frames})
            return
        shown = min(self.steps, len(roll))
        console().print(
            f"{title}\n{shown} of {len(roll)} steps, {grid.steps_per_beat} per beat", markup=False
        )
        width = console().width if console().is_terminal else None
        console().print(roll_as_text(roll, grid, self.steps, width), markup=False)
        if self.png:
            console().print(f"image: {self.png}", markup=False)

    def _show_text(self, data: TextData) -> None:
        from deeprnn.data.show import text_sample

        if self.png:
            raise UserError(f"--png draws piano rolls; {data.name} is text")
        sample = text_sample(data, self.split, self.steps * 10)
        if self.json:
            self._print_json(data, {"title": f"{data.name}, {self.split}", "text": sample})
            return
        console().print(f"{data.name}, {self.split}: vocabulary of {data.size:,}\n", markup=False)
        console().print(sample, markup=False)

    def _print_json(self, data: MusicData | TextData, shown: dict[str, Any]) -> None:
        from deeprnn.data.checking import describe

        print(json.dumps({"name": data.name, **describe(data), **shown, "png": self.png and str(self.png)}))


@dataclass(frozen=True)
class DataImport:
    """Read your own files and report on each: MIDI or text, a file or folder, .mat .pickle .npz .json.

    Every file is accepted, or skipped with the reason. Many files are split by a hash of their content, so
    that each stays where it is when others are added, few by their lengths; names or folders called train,
    valid and test override that.
    `deeprnn train PATH` reads the same files the same way; --out keeps the result in one .npz file.
    """

    path: Annotated[Path, tyro.conf.Positional]
    """A file or folder."""
    kind: Literal["auto", "music", "char", "word"] = "auto"
    """How to read it; auto takes a folder with MIDI files as music and text as characters."""
    reading: Annotated[Reading, tyro.conf.arg(name="")] = field(default_factory=Reading)
    out: Path | None = None
    """Write the data to this .npz file."""
    max_megabytes: int | None = None
    """Read files larger than the limit of 512 MiB (also $DEEPRNN_MAX_BYTES)."""
    json: bool = False
    """Print one JSON document instead of tables."""

    def run(self) -> int:
        from deeprnn.data import Grid
        from deeprnn.data.files import progress_bar
        from deeprnn.data.importing import Options, import_path
        from deeprnn.data.rolls import save_npz

        if self.max_megabytes is not None and self.max_megabytes < 1:
            raise UserError(f"--max-megabytes {self.max_megabytes} must be at least 1")
        if self.max_megabytes is not None:
            os.environ["DEEPRNN_MAX_BYTES"] = str(self.max_megabytes * 2**20)
        reading = self.reading
        limits = {name: getattr(reading, name) for name in ("steps_per_beat", "low", "high")}
        limits = {name: value for name, value in limits.items() if value is not None}
        grid = Grid(**limits) if limits else None  # files with a grid of their own keep it
        options = Options(self.kind, grid, reading.drums, reading.transpose, reading.minimum)
        options.progress = lambda paths: progress_bar(paths, "Reading files")
        data, report = import_path(self.path, options)
        if self.out:
            if self.out.suffix != ".npz":
                raise UserError(f"--out {self.out} must end in .npz")
            save_npz(self.out, data)
        if self.json:
            print(json.dumps(import_json(data, report, self.out), indent=2))
        else:
            show_import(data, report, self.out)
        return 0
