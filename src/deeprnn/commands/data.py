"""`deeprnn data check | get | show | import`."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from deeprnn.console import console
from deeprnn.errors import UserError, need

if TYPE_CHECKING:
    from deeprnn.data import MusicData, TextData
    from deeprnn.data.importing import FileReport, Report


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
            _show_check(entries)
        asked = [entry for entry in entries if entry["name"] in self.sets]
        bad = any(entry.get("verified") is False or "error" in entry for entry in entries)
        return 1 if bad or not all(entry["found"] for entry in asked) else 0


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
        for name in SOURCES if self.sets == ("all",) else self.sets:
            with _download_bar(name) as progress:
                results = get(name, progress=progress)
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
    index: int = 0
    """Which song of the split."""
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
        title = f"{data.name}, {self.split} {self.index}: {data.names[self.split][self.index]}"
        grid = data.grid if data.grid else Grid(steps_per_beat=1, low=21, high=20 + data.size)
        if self.png:
            self.png.parent.mkdir(parents=True, exist_ok=True)
            roll_png(self.png, roll, grid, title)
        if self.json:
            frames = [[int(p) + grid.low for p in row.nonzero()[0]] for row in roll[: self.steps]]
            self._print_json(data, {"title": title, "steps": len(roll), "frames": frames})
            return
        shown = min(self.steps, len(roll))
        console().print(
            f"{title}\n{shown} of {len(roll)} steps, {grid.steps_per_beat} per beat", markup=False
        )
        console().print(roll_as_text(roll, grid, self.steps), markup=False)
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

    Every file is accepted, or skipped with the reason. A file's split follows from a hash of its content,
    so it stays when files are added; names or folders called train, valid and test override that.
    `deeprnn train PATH` reads the same files the same way; --out keeps the result in one .npz file.
    """

    path: Annotated[Path, tyro.conf.Positional]
    """A file or folder."""
    kind: Literal["auto", "music", "char", "word"] = "auto"
    """How to read it; auto takes a folder with MIDI files as music and text as characters."""
    steps_per_beat: int = 4
    """Grid steps per beat (quarter note) for MIDI."""
    low: int = 21
    """Lowest MIDI number kept."""
    high: int = 108
    """Highest MIDI number kept."""
    drums: bool = False
    """Keep drum tracks as pitches instead of dropping them."""
    transpose: bool = False
    """Move every song to C major or C minor."""
    minimum: int = 1
    """Least count of a vocabulary entry in the training text; rarer ones become <unk>."""
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

        if self.max_megabytes is not None:
            os.environ["DEEPRNN_MAX_BYTES"] = str(self.max_megabytes * 2**20)
        grid = Grid(self.steps_per_beat, self.low, self.high)
        options = Options(self.kind, grid, self.drums, self.transpose, self.minimum)
        options.progress = lambda paths: progress_bar(paths, "Reading files")
        data, report = import_path(self.path, options)
        if self.out:
            if self.out.suffix != ".npz":
                raise UserError(f"--out {self.out} must end in .npz")
            save_npz(self.out, data)
        if self.json:
            print(json.dumps(_import_json(data, report, self.out), indent=2))
        else:
            _show_import(data, report, self.out)
        return 0


def _show_check(entries: list[dict[str, Any]]) -> None:
    table = need("rich.table", extra="cli").Table(box=None, pad_edge=False)
    for heading in ("set", "split", "songs", "frames/tokens", "density", "size", "sha256"):
        numeric = heading in ("songs", "frames/tokens", "density")
        table.add_column(heading, justify="right" if numeric else "left", no_wrap=True)
    notes = []
    for entry in entries:
        for row in _check_rows(entry):
            table.add_row(*row)
        if not entry["found"]:
            notes.append(f"{entry['name']}: {entry['get']}")
        if "error" in entry:
            notes.append(f"{entry['name']}: {entry['error']}")
        if count := entry.get("duplicates_across_splits"):
            notes.append(f"{entry['name']}: {count} songs occur in two splits")
    console().print(table)
    for note in notes:
        console().print(note, markup=False)


def _check_rows(entry: dict[str, Any]) -> list[tuple[str, ...]]:
    """A line per split; the set's name and checks stand on the first."""
    if not entry["found"]:
        return [(entry["name"], "not found")]
    if "error" in entry:
        return [(entry["name"], "unreadable", "", "", "", "", _verified(entry))]
    size = f"{entry['pitches']} pitches" if "pitches" in entry else f"{entry['vocabulary']:,} types"
    rows = []
    for split, count in (entry.get("frames") or entry["tokens"]).items():
        songs = f"{entry['sequences'][split]:,}" if "sequences" in entry else ""
        density = f"{entry['notes_per_frame'][split]:.2f}" if "notes_per_frame" in entry else ""
        name, *checks = (entry["name"], size, _verified(entry)) if not rows else ("", "", "")
        rows.append((name, split, songs, f"{count:,}", density, *checks))
    return rows


def _verified(entry: dict[str, Any]) -> str:
    return {True: "verified", False: "DIFFERS", None: "packaged"}[entry.get("verified")]


def _slashed(counts: dict[str, int]) -> str:
    return " / ".join(f"{count:,}" for count in counts.values())


def _show_import(data: MusicData | TextData, report: Report, out: Path | None) -> None:
    from deeprnn.data.checking import describe

    screen = console()
    for file in report.files:
        screen.print(_file_line(file), markup=False)
    skipped = len(report.files) - report.accepted
    screen.print(f"\n{report.accepted:,} files accepted, {skipped:,} skipped", markup=False)
    for reason, count in report.reasons().most_common(10):
        screen.print(f"  {count:,} × {reason}", markup=False)
    if report.losses.notes:
        screen.print(f"of {report.losses.notes:,} notes: {report.losses}", markup=False)
    facts = describe(data)
    for key in ("sequences", "frames", "tokens"):
        if key in facts:
            screen.print(f"{key}, train / valid / test: {_slashed(facts[key])}", markup=False)
    if "vocabulary" in facts:
        unknown = _slashed(getattr(data, "unknown", {}))
        screen.print(f"vocabulary: {facts['vocabulary']:,}; read as <unk>: {unknown}", markup=False)
    for first, second in report.duplicates:
        screen.print(f"warning: {second} holds the same as {first}", markup=False)
    for warning in report.warnings:
        screen.print(f"warning: {warning}", markup=False)
    if out:
        screen.print(f"written: {out}", markup=False)


def _file_line(file: FileReport) -> str:
    if not file.accepted:
        return f"skipped   {file.path}: {file.reason}"
    remarks = ([str(file.losses)] if file.losses and str(file.losses) != "nothing lost" else []) + file.notes
    return (
        f"accepted  {file.path} -> {file.split} ({file.size:,}){': ' if remarks else ''}{'; '.join(remarks)}"
    )


def _import_json(data: MusicData | TextData, report: Report, out: Path | None) -> dict[str, Any]:
    from deeprnn.data.checking import describe

    files = []
    for file in report.files:
        entry = {"path": file.path, "accepted": file.accepted}
        if file.accepted:
            entry |= {"split": file.split, "size": file.size, "notes": file.notes}
            entry |= {"losses": file.losses.to_dict()} if file.losses else {}
        else:
            entry["reason"] = file.reason
        files.append(entry)
    return {
        "name": data.name,
        **describe(data),
        "files": files,
        "accepted": report.accepted,
        "skipped": len(report.files) - report.accepted,
        "losses": report.losses.to_dict(),
        "duplicates": [list(pair) for pair in report.duplicates],
        "warnings": report.warnings,
        "out": str(out) if out else None,
    }


class _download_bar:
    """A progress bar for one set's download on stderr, nothing where that is no terminal."""

    def __init__(self, name: str) -> None:
        self.bar = need("rich.progress", extra="cli").Progress(
            "[progress.description]{task.description}",
            need("rich.progress", extra="cli").BarColumn(),
            need("rich.progress", extra="cli").DownloadColumn(),
            console=console(stderr=True),
            disable=not console(stderr=True).is_terminal,
        )
        self.task = self.bar.add_task(name, total=None)

    def __enter__(self):
        self.bar.start()
        return self.update

    def __exit__(self, *exception: object) -> None:
        self.bar.stop()

    def update(self, done: int, total: int | None) -> None:
        self.bar.update(self.task, completed=done, total=total)
