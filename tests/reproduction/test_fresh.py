"""A rerun with a ledger of its own, which seeds it has, and what it says beside the published ledger."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from deeprnn.cli import main
from deeprnn.errors import UserError
from deeprnn.model import paper
from deeprnn.reproduction import cells
from deeprnn.reproduction.clean_scores import read_scores
from deeprnn.reproduction.compare import chance, compare
from deeprnn.reproduction.entries import read_ledger
from deeprnn.reproduction.identity import identity
from deeprnn.reproduction.plan import recipe_for, spans, stage_of
from deeprnn.reproduction.run import parse_seeds, plan_of
from deeprnn.reproduction.runner import Settings
from tests.reproduction.ledger import entry, write
from tests.reproduction.toys import TINY, made_up_songs

ROOT = Path(__file__).parents[2]


def test_a_fresh_toy_rerun_is_compared_with_the_published(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(
        cells, "model_spec", lambda recipe: paper.spec("jsb", recipe.model.kind)
    )  # toys fill cells
    published, runs = tmp_path / "published", tmp_path / "runs"
    call = ["reproduce", "--only", "jsb/dots", "jsb/dts", "--device", "cpu", "--override", *TINY]
    with made_up_songs():
        assert (
            main([*call, "--seeds", "3", "--ledger", str(published), "--runs", str(tmp_path / "first")]) == 0
        )
        before = {path: path.read_bytes() for path in published.iterdir()}
        capsys.readouterr()
        fresh = [*call, "--fresh", "--seeds", "11..12", "--runs", str(runs), "--published", str(published)]
        assert main([*fresh, "--clean"]) == 0
    out = capsys.readouterr().out
    assert {path: path.read_bytes() for path in published.iterdir()} == before, (
        "the published ledger is only read"
    )
    entries = read_ledger(runs / "ledger")
    assert sorted((e.model, e.seed) for e in entries) == [
        ("dots", 11),
        ("dots", 12),
        ("dts", 11),
        ("dts", 12),
    ]
    assert "2 cells: 2 agree, 0 differ, 0 cannot be judged" in out
    scored = read_scores(runs / "clean.json")
    assert {row.entry for row in scored} == {e.path.name for e in entries}
    assert [row.whole for row in scored] == pytest.approx([e.value() for e in entries], rel=1e-6)
    dots = next(e for e in entries if e.model == "dots")
    assert [stage["epochs"] for stage in dots.stages] == [3, 3]
    assert dots.total("updates") == sum(s["updates"] for s in dots.stages) == 2 * dots.curve[-1]["step"] > 0
    assert isinstance(dots.command, str)
    assert main(["report", "--ledger", str(runs / "ledger"), "--against", str(published), "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert [(c["model"], c["rerun_seeds"], c["same_recipe"]) for c in listed] == [
        ("dts", [11, 12], True),
        ("dots", [11, 12], True),
    ]


def test_clean_scores_need_runs(capsys: pytest.CaptureFixture[str]):
    assert main(["reproduce", "--only", "jsb", "--clean", "--device", "cpu"]) == 2
    assert "--clean is for --fresh" in capsys.readouterr().err


def test_a_rerun_that_is_off_is_said_to_differ(tmp_path: Path):
    write(tmp_path / "old", *(entry("jsb", "rnn", s, 8.3 + s / 100) for s in (1, 2, 3, 4, 5)))
    for value, verdict in ((8.33, "agrees"), (8.9, "differs")):
        write(tmp_path / verdict, entry("jsb", "rnn", 77, value))
        (found,) = compare(read_ledger(tmp_path / verdict), read_ledger(tmp_path / "old"))
        assert found.verdict == verdict
        assert found.difference == pytest.approx(value - 8.33)


def test_what_cannot_be_judged_is_not_judged(tmp_path: Path):
    write(tmp_path / "old", entry("jsb", "rnn", 1, 8.3))
    write(tmp_path / "new", entry("jsb", "rnn", 7, 8.3), entry("jsb", "dts", 7, 8.3))
    found = compare(read_ledger(tmp_path / "new"), read_ledger(tmp_path / "old"))
    assert [c.verdict for c in found] == ["too few seeds", "not published"]


def test_one_new_seed_is_held_against_the_spread_of_the_published():
    stats = pytest.importorskip("scipy.stats")
    old, new = [8.30, 8.32, 8.29, 8.35, 8.31], 8.40
    t = (new - stats.tmean(old)) / (stats.tstd(old) * (1 + 1 / 5) ** 0.5)
    assert chance([new], old) == pytest.approx(2 * stats.t.sf(t, 4), rel=1e-9)
    assert chance([8.4, 8.5], old) == pytest.approx(
        stats.ttest_ind([8.4, 8.5], old, equal_var=False).pvalue, rel=1e-9
    )


def test_words_of_seeds():
    assert parse_seeds("5") == 5
    assert parse_seeds("11..15") == (11, 12, 13, 14, 15)
    assert parse_seeds("3,7") == (3, 7)
    assert parse_seeds("77..77") == (77,)
    for wrong in ("0", "x", "1.5", "true", "-3", "5..1", "1..99999"):
        with pytest.raises(UserError):
            parse_seeds(wrong)
    assert spans((1, 2, 3, 7)) == "1..3, 7"


def test_a_fresh_ledger_is_not_the_published_one(tmp_path: Path):
    with pytest.raises(UserError, match="ledger of its own"):
        plan_of(Settings(ledger=tmp_path, published=tmp_path, root=tmp_path))


def test_the_packaged_recipes_are_those_of_the_table():
    for row in cells.rows(read_ledger(ROOT / "results" / "runs")):
        recipe = recipe_for(f"{row.cell.data}/{row.cell.model}")
        assert row.entries[0].identity == identity(recipe, stage_of(recipe)), f"{row.cell}"
