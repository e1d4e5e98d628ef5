"""`deeprnn data audit`: what stands in two splits of a data set."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

if TYPE_CHECKING:
    from deeprnn.data.audit import Audit

LISTED = 12
"""near-duplicates that are printed; JSON has all"""


@dataclass(frozen=True)
class DataAudit:
    """Look for pieces that stand in two splits: the same, in another key, or with small edits.

    Songs are compared with all songs of the other split, transposed as they may be, and so are their melodies alone;
    texts line by line, and by the n-grams they share. `deeprnn evaluate RUN --clean` scores a run without what this
    finds. For example: `deeprnn data audit nottingham`, `deeprnn data audit songs/ --out audit.json`.
    """

    data: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="NAME_OR_PATH")]
    """A set's name, or a file or folder."""
    similarity: float = 0.8
    """Share of frames or words, of the longer piece, that must agree."""
    out: Path | None = None
    """Write the whole report to this JSON file."""
    json: bool = False
    """Print the whole report as one JSON document."""

    def run(self) -> int:
        """Compare and print."""
        import json

        from deeprnn import __version__
        from deeprnn.data import load
        from deeprnn.data.audit import audit
        from deeprnn.files import write_json
        from deeprnn.runs.provenance import commit

        result = audit(load(self.data), self.similarity)
        command = f"deeprnn data audit {self.data} --similarity {self.similarity:g}"
        provenance = {"command": command, "version": __version__, "commit": commit()}
        if self.out:
            write_json(self.out, {**result.to_dict(), **provenance})
        if self.json:
            print(json.dumps({**result.to_dict(), **provenance}, ensure_ascii=False))
        else:
            show_audit(result)
            if self.out:
                print(f"\nall of it: {self.out}")
        return 0


def show_audit(result: Audit) -> None:
    """A paragraph for each pair of splits."""
    from deeprnn.console import console

    piece, symbol = ("songs", "frames") if result.kind == "music" else ("lines", "symbols")
    for pair in result.to_dict()["comparisons"]:
        kinds = ", ".join(f"{count} {kind}" for kind, count in pair["by_kind"].items())
        lines = [
            f"{result.name}, {pair['split']} in {pair['other']}: {pair['near_duplicates']:,} of {pair['pieces']:,} "
            f"{piece} have a near-duplicate{f' ({kinds})' if kinds else ''}, "
            f"{100 * pair['symbols_of_near_duplicates'] / max(1, pair['symbols']):.2f} % of the {symbol}"
        ]
        lines += [f"  {name}: {100 * share:.2f} % are there, too" for name, share in pair["shared"].items()]
        if result.kind == "music":
            lines.append(
                f"  the same melody, whatever stands below it: {len(pair.get('same_melody', ()))} songs"
            )
        if pair.get("lines_too_short"):
            lines.append(
                f"  not compared: {pair['lines_too_short']:,} lines of fewer than five words, or very long"
            )
        lines += [f"  {_line(match)}" for match in pair["matches"][:LISTED]]
        if len(pair["matches"]) > LISTED:
            lines.append(f"  … and {len(pair['matches']) - LISTED} more: --json or --out has all")
        console().print("\n".join(lines), markup=False, soft_wrap=True)


def _line(match: dict[str, Any]) -> str:
    key = f", {match['semitones']:+d} semitones" if match["semitones"] else ""
    piece, other = match["name"][:50], match["other_name"][:50]
    if match["kind"] == "contained":
        return f"contained: {100 * match['contained']:.0f} % of {piece!r} lies in {other!r}{key}"
    return f"{match['kind']}: {piece!r} is {100 * match['similarity']:.0f} % {other!r}{key}"
