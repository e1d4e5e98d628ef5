"""How fast data comes in: 1,000 generated MIDI files imported, and every set found loaded.

    python benchmarks/data.py [--files 1000] [--json]

Each measurement runs in a fresh process, so that its peak memory is its own; the memory of importing the
libraries alone is shown first. Times of sets are for the first and the second load in one process: the
operating system may hold the files in memory already.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any


def main() -> int:
    """Run every measurement and print a table or JSON."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--files", type=int, default=1000, help="how many MIDI files to import")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--only", help=argparse.SUPPRESS)  # a child process: one measurement as JSON
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.only:
        print(json.dumps(measure(arguments.only, arguments.folder)))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        make_files(Path(folder), arguments.files)
        rows = [child("libraries"), child("midi", folder)]
        rows += [child(name) for name in found_sets()]
    result = {"machine": platform.machine(), "cores": os.cpu_count(), "rows": rows}
    print(json.dumps(result, indent=2) if arguments.json else table(rows))
    return 0


def found_sets() -> list[str]:
    """The named sets whose files are on this machine."""
    from deeprnn.data import names
    from deeprnn.data.sources import SOURCES, find_file

    return [n for n in names() if n == "bach" or all(find_file(file) for file in SOURCES[n].files)]


def make_files(folder: Path, count: int) -> None:
    """Songs of about 500 notes in three tracks, a little off the grid, from a fixed seed."""
    import symusic

    draw = random.Random(0)
    for number in range(count):
        score = symusic.Score(480)
        for program in (0, 24, 40):
            track = symusic.Track("part", program, False)
            now = 0
            for _ in range(170):
                length = draw.choice((120, 240, 240, 480, 480, 960))
                off = draw.choice((0, 0, 0, 5, -5)) if now else 0
                track.notes.append(symusic.Note(now + off, length, draw.randint(36, 84), 80))
                now += length
            score.tracks.append(track)
        score.dump_midi(folder / f"{number:05d}.mid")


def child(what: str, folder: str = "") -> dict[str, Any]:
    """One measurement in a process of its own."""
    command = [sys.executable, __file__, "--only", what, "--folder", folder]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return json.loads(done.stdout)


def measure(what: str, folder: str) -> dict[str, Any]:
    """Seconds, sizes and peak memory of one thing."""
    import numpy  # noqa: F401 - part of what every measurement starts from

    from deeprnn.data import load
    from deeprnn.data.importing import import_path

    row: dict[str, Any] = {"what": what}
    start = time.perf_counter()
    if what == "midi":
        data, report = import_path(Path(folder))
        seconds = time.perf_counter() - start
        size = sum(path.stat().st_size for path in Path(folder).iterdir())
        row |= {"files": report.accepted, "notes": report.losses.notes, "file_megabytes": size / 1e6}
        row |= {"seconds": seconds, "files_per_second": report.accepted / seconds}
    elif what != "libraries":
        data = load(what)
        row["seconds"] = time.perf_counter() - start
        start = time.perf_counter()
        data = load(what)
        row["again_seconds"] = time.perf_counter() - start
    if what != "libraries":
        row["data_megabytes"] = sum(part.nbytes for part in data.splits.values()) / 1e6
    row["peak_megabytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return row


def table(rows: list[dict[str, Any]]) -> str:
    """The rows for a person."""
    lines = [f"{'':<12} {'seconds':>8} {'again':>8} {'files/s':>8} {'data MB':>8} {'peak MB':>8}"]
    for row in rows:
        cells = [row.get(key) for key in ("seconds", "again_seconds", "files_per_second", "data_megabytes")]
        formats = ("8.3f", "8.3f", "8.0f", "8.2f")
        shown = [format(v, f) if v is not None else " " * 8 for v, f in zip(cells, formats, strict=True)]
        lines.append(f"{row['what']:<12} {' '.join(shown)} {row['peak_megabytes']:8.0f}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
