"""The code on docs/guide/models.md runs, block after block."""

from __future__ import annotations

import re
from pathlib import Path

from deeprnn.cells.functions import UNITS
from deeprnn.model import units

PAGE = Path(__file__).parents[1] / "docs" / "guide" / "models.md"


def test_the_blocks_of_the_page_run(monkeypatch):
    monkeypatch.setattr(units, "ELEMENTWISE", dict(units.ELEMENTWISE))
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.S | re.M)
    assert len(blocks) > 10
    names: dict = {}
    for number, block in enumerate(blocks, 1):
        exec(compile(block, f"models.md, block {number}", "exec"), names)
    assert names["logits"].shape == (3, 6, 2, 5)


def test_every_unit_and_builder_is_on_the_page():
    text = PAGE.read_text(encoding="utf-8")
    for name in (*UNITS, *(f"{pooled}:N" for pooled in units.POOLED)):
        assert f"`{name}`" in text
    for builder in (
        "rnn",
        "dt_rnn",
        "dts_rnn",
        "do_rnn",
        "dot_rnn",
        "dots_rnn",
        "stacked_rnn",
        "stacked_dts_rnn",
    ):
        assert f"| `{builder}` |" in text
