"""The demo, made small: both models, the comparison, the files."""

from __future__ import annotations

import pytest

from deeprnn.commands import demo
from deeprnn.training.recipe import load_recipe, override, to_toml


def test_the_demo_trains_compares_and_writes_its_files(tmp_path, monkeypatch, capsys):
    pytest.importorskip("music21")
    small = {"model.hidden": 8, "stop.epochs": 1, "data.lanes": 32}
    names = []
    for name in demo.RECIPES:
        recipe = override(load_recipe(name), small)
        path = tmp_path / f"{recipe.model.kind}.toml"
        path.write_text(to_toml(recipe))
        names.append(str(path))
    monkeypatch.setattr(demo, "RECIPES", tuple(names))
    assert demo.Demo(out=tmp_path / "out", runs=tmp_path / "runs", device="cpu").run() == 0
    shown = capsys.readouterr().out
    assert "one-gram (no memory)" in shown
    assert "DOT(S)-RNN" in shown
    assert "What to try next" in shown
    for kind in ("mid", "wav", "png"):
        assert (tmp_path / "out" / f"chorale.{kind}").stat().st_size > 100
