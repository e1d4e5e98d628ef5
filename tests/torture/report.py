"""The figures of a run of all attacks, put into a page: python -m tests.torture.report [SUMMARY] [PAGE].

The summary is kept beside the other results, so that the page's figures can be made again.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
MADE, KEPT, PAGE = (
    ROOT / "out" / "torture.json",
    ROOT / "results" / "torture.json",
    ROOT / "docs" / "reliability.md",
)
BEGIN, END = "<!-- torture:begin -->", "<!-- torture:end -->"


def markdown(found: dict[str, Any]) -> str:
    """A sentence, a row for each attack, and the numbers that say more."""
    attacks = sorted(found["attacks"], key=lambda attack: attack["name"])
    lines = [
        f"{found['when'][:10]}, commit {found['commit']}, {found['cores']} cores, Python {found['python']}, seed "
        f"{found['seed']}: {found['cases']:,} cases in {found['seconds'] / 60:.0f} minutes, "
        f"{found['findings']} kinds of findings.",
        "",
        "| attack | cases | everything tried | findings |",
        "|---|--:|---|---|",
    ]
    lines += [_row(attack) for attack in attacks]
    figures = [
        (attack["name"], name, value) for attack in attacks for name, value in attack["figures"].items()
    ]
    lines += ["", "| | |", "|---|---|"]
    lines += [f"| {who}: {name} | {_number(value)} |" for who, name, value in figures]
    return "\n".join(lines)


def _row(attack: dict[str, Any]) -> str:
    kinds, cases = len(attack["findings"]), sum(finding["count"] for finding in attack["findings"])
    told = f"{kinds}, in {cases:,} cases" if kinds else "none"
    return (
        f"| {attack['name']} | {attack['cases']:,} | {'yes' if attack['finished'] else 'a sample'} | {told} |"
    )


def _number(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value)


def put(page: Path, text: str) -> None:
    """Replace what stands between the two markers."""
    before, _, rest = page.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    if not end:
        sys.exit(f"{page} lacks the markers {BEGIN} and {END}")
    page.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}")


def main(made: Path = MADE, page: Path = PAGE) -> None:
    """Keep the summary, rewrite the page."""
    if made != KEPT:
        shutil.copy(made, KEPT)
    put(page, markdown(json.loads(made.read_text())))
    print(f"{page}: figures of {made}")


if __name__ == "__main__":
    main(*(Path(word) for word in sys.argv[1:]))
