"""The guide's Python runs as it stands, with a small run in place of its own."""

from __future__ import annotations

import re
from pathlib import Path

from deeprnn.commands.arguments import arguments
from deeprnn.commands.generate import Generate
from deeprnn.generation.copy_check import Passage
from tests.small_runs import small_run

GUIDE = Path(__file__).parents[2] / "docs" / "guide" / "generate.md"


def test_the_guides_python_defines_what_it_uses(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", GUIDE.read_text("utf-8"), re.S)
    assert len(blocks) >= 2
    names: dict[str, object] = {}
    for block in blocks:
        exec(block.replace("runs/demo-dots-nade-1", str(small_run("music").path)), names)
    assert (tmp_path / "out" / "chorale.mid").is_file()
    assert isinstance(names["passage"], Passage)


def test_the_guide_knows_every_option():
    text = GUIDE.read_text("utf-8")
    typed = [argument.names[-1] for argument in arguments(Generate) if not argument.positional]
    assert [name for name in typed if name not in text] == []
