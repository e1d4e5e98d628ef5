"""What `deeprnn data` prints: tables, reports and the download bar."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from deeprnn.console import console, show_rows
from deeprnn.errors import need

if TYPE_CHECKING:
    from deeprnn.data import MusicData, TextData
    from deeprnn.data.importing import FileReport, Report


def show_check(entries: list[dict[str, Any]]) -> None:
    """A table of sets, and below it a line for each that is missing, unreadable or has duplicates."""
    headings = ("set", "split", "songs", "frames/tokens", "density", "size", "sha256")
    rows: list[tuple[str, ...]] = []
    notes = []
    for entry in entries:
        rows += [(*row, *[""] * (len(headings) - len(row))) for row in _check_rows(entry)]
        if not entry["found"]:
            notes.append(f"{entry['name']}: {entry['get']}")
        if "error" in entry:
            notes.append(f"{entry['name']}: {entry['error']}")
        if count := entry.get("duplicates_across_splits"):
            notes.append(f"{entry['name']}: {count} songs occur in two splits")
    numbers = ("songs", "frames/tokens", "density")
    show_rows(headings, rows, right=numbers, spare=("size", "density"))
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


def show_import(data: MusicData | TextData, report: Report, out: Path | None) -> None:
    """A line per file, then the summary."""
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


def import_json(data: MusicData | TextData, report: Report, out: Path | None) -> dict[str, Any]:
    """An import's report as plain data."""
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


class DownloadBar:
    """What a download does, on stderr: sentences as it goes, and on a terminal a progress bar."""

    def __init__(self, name: str) -> None:
        rich = need("rich.progress", extra="cli")
        screen = console(stderr=True)
        columns = (rich.TextColumn("{task.description}"), rich.BarColumn(), rich.DownloadColumn())
        self.bar = rich.Progress(*columns, console=screen, disable=not screen.is_terminal)
        self.task = self.bar.add_task(name, total=None)
        self.name = name

    def __enter__(self) -> DownloadBar:
        self.bar.start()
        return self

    def tell(self, sentence: str) -> None:
        self.bar.console.print(f"{self.name}: {sentence}", markup=False)

    def __exit__(self, *exception: object) -> None:
        self.bar.stop()

    def __call__(self, done: int, total: int | None) -> None:
        self.bar.update(self.task, completed=done, total=total)
