"""Tables as text: columns set out with spaces for a terminal, Markdown for documents."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def aligned(lines: Sequence[Sequence[str]]) -> str:
    """Columns set out with spaces."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(text.ljust(w) for text, w in zip(line, widths, strict=True)).rstrip() for line in lines
    )


def markdown_table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of Markdown, without a line's end behind its last row."""
    rule = "|---" * len(headings) + "|"
    head, *lines = (f"| {' | '.join(cells)} |" for cells in (headings, *rows))
    return "\n".join([head, rule, *lines])
