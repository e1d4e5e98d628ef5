"""Links between the project's pages lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_relative_links_resolve(page):
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.S | re.M)
    links = re.findall(r"\]\(([^)\s]+)\)", text)
    missing = [
        link
        for link in links
        if not re.match(r"[a-z]+:|#", link) and not (page.parent / link.partition("#")[0]).exists()
    ]
    assert not missing


def test_the_promises_of_reliability_are_held_by_something_that_exists():
    from tests.torture import driver

    text = (ROOT / "docs" / "reliability.md").read_text(encoding="utf-8")
    rows = [line for line in text.partition("## The last full run")[0].splitlines() if line.startswith("| ")]
    holders = " ".join(row.split("|")[2] for row in rows if "held by" not in row)
    attacks = {attack.name for attack in driver.attacks()}
    named = set(re.findall(r"\*([^*]+)\*", holders))
    assert named
    for name in named:
        assert any(attack.startswith(name.rstrip("… ")) for attack in attacks), name
    assert all((ROOT / path).exists() for path in re.findall(r"`(tests/[^`]+)`", holders))
    held = {attack for attack in attacks if any(attack.startswith(name.rstrip("… ")) for name in named)}
    assert held == attacks, f"{attacks - held} hold no promise"
