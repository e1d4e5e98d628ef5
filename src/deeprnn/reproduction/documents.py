"""Sections of Markdown files that are made from runs: whatever stands between two markers is rewritten.

    update_document("README.md", Sources())     # <!-- results:begin --> … <!-- results:end -->, and so on

A test rebuilds every such section of the project's documents, and fails where one says anything else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from deeprnn.errors import UserError
from deeprnn.files import write_atomically
from deeprnn.reproduction import clean_scores, replications, tables
from deeprnn.reproduction.entries import FOLDER, read_ledger
from deeprnn.reproduction.study import goals

DOCUMENTS = ("README.md", "docs/guide/reproduction.md", "docs/audit.md", "docs/beyond.md")
"""the project's own that have such sections"""


@dataclass(frozen=True)
class Sources:
    """Folders that sections are made from."""

    ledger: Path = FOLDER
    replications: Path = replications.FOLDER
    studies: Path = goals.STUDIES


def _replications(sources: Sources) -> str:
    reruns = replications.read_replications(sources.replications)
    return replications.markdown(reruns, read_ledger(sources.ledger), tables.TITLES)


def _replicated(sources: Sources) -> str:
    reruns = replications.read_replications(sources.replications)
    return replications.sentence(reruns, read_ledger(sources.ledger))


def _clean(sources: Sources) -> str:
    reruns = replications.read_replications(sources.replications)
    rows = replications.clean_of_cells(reruns, read_ledger(sources.ledger))
    return clean_scores.markdown(rows, tables.TITLES)


SECTIONS: Mapping[str, Callable[[Sources], str]] = {
    "results": lambda sources: tables.markdown(read_ledger(sources.ledger)),
    "replicated": _replicated,
    "replications": _replications,
    "clean": _clean,
    "beyond": lambda sources: goals.markdown(goals.PLAN, sources.studies),
}
"""name of a section -> its text"""


def rebuilt(text: str, sources: Sources) -> str:
    """A document with all of its sections made anew."""
    for name in sections_of(text):
        text = with_section(text, name, SECTIONS[name](sources))
    return text


def sections_of(text: str) -> list[str]:
    """The sections that a document has a marker of."""
    return [name for name in SECTIONS if marker(name, "begin") in text or marker(name, "end") in text]


def update_document(path: str | Path, sources: Sources) -> bool:
    """Rewrite the sections of a Markdown file; whether anything changed."""
    path = Path(path)
    if not path.is_file():
        raise UserError(f"no file {path}: --readme takes a Markdown file that has {_markers()}")
    old = path.read_text(encoding="utf-8")
    if not sections_of(old):
        raise UserError(f"{path} has no section to rewrite: it needs {_markers()}")
    new = rebuilt(old, sources)
    if new != old:
        write_atomically(path, new)
    return new != old


def _markers() -> str:
    begin, end = marker("results", "begin"), marker("results", "end")
    return f"a line {begin} and, after it, a line {end} (or one of {', '.join(SECTIONS)})"


def with_section(text: str, name: str, section: str) -> str:
    """A document with the part between the two markers of `name` replaced."""
    begin, end = marker(name, "begin"), marker(name, "end")
    start, stop = text.find(begin), text.find(end)
    if start < 0 or stop < start or text.count(begin) != 1 or text.count(end) != 1:
        raise UserError(f"the document needs one line {begin} and, after it, one line {end}")
    return f"{text[: start + len(begin)]}\n{section}{text[stop:]}"


def marker(name: str, which: str) -> str:
    """The comment that begins or ends a section."""
    return f"<!-- {name}:{which} -->"
