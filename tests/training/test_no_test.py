"""evaluation.test = false: a search's run never scores the test part, whoever asks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from deeprnn.cli import main
from deeprnn.errors import UserError
from deeprnn.generation.primers import run_data
from deeprnn.reproduction.cells import rows
from deeprnn.reproduction.entries import identity, read_entry, read_ledger
from deeprnn.reproduction.html.gather import predict
from deeprnn.reproduction.run import plan_of, reproduce
from deeprnn.reproduction.runner import Settings
from deeprnn.runs.folder import Run
from deeprnn.runs.summary import summary
from deeprnn.training import loading
from deeprnn.training.loop import Trainer
from deeprnn.training.recipe import load_recipe
from deeprnn.training.session import run_recipe
from tests.reproduction.toys import TINY, made_up_songs
from tests.small_runs import text_file
from tests.training import toys


class Poisoned:
    """Stands for a test part: whoever looks at it is found out."""

    def __getattribute__(self, name: str) -> Any:
        raise AssertionError(f"the test part was read: {name}")

    def __len__(self) -> int:
        raise AssertionError("the test part was read")

    __iter__ = __getitem__ = __array__ = __bool__ = __len__  # type: ignore[assignment]


def poisoned(data):
    data.splits["test"] = Poisoned()
    return data


@pytest.mark.parametrize("make", [toys.music, toys.text])
def test_no_part_of_a_run_reads_the_test_part(tmp_path, make):
    recipe = toys.recipe(data__name="toy", evaluation__test=False, seeds=[1, 2])
    with pytest.raises(AssertionError, match="was read"):
        run_recipe(toys.recipe(), tmp_path / "other", data=poisoned(make()))  # the poison works
    results = run_recipe(recipe, tmp_path / "run", data=poisoned(make()))
    for home in (tmp_path / "run" / "seed-1", tmp_path / "run" / "seed-2"):
        for path in home.rglob("*.json*"):
            assert '"test"' not in path.read_text().replace('"test": false', "")
        assert summary(Run(home))["test"] is None
        assert summary(Run(home))["valid"] is not None
    assert [sorted(r) for r in results] == [["best_epoch", "train", "valid"]] * 2
    again = run_recipe(recipe, tmp_path / "run", data=poisoned(make()))  # a finished run taken up again
    assert again == results


def test_the_trainer_by_itself_obeys_too():
    trainer = Trainer(toys.recipe(evaluation__test=False, stop__epochs=1), poisoned(toys.music()))
    trainer.train()
    assert "test" not in trainer.results()[0]
    assert "test" not in trainer.data.splits


def test_the_command_line_obeys_and_nothing_shows_a_number_later(tmp_path, capsys):
    words = ["--level", "char", "--epochs", "1", "--hidden", "4", "--out", str(tmp_path), "--name", "r"]
    ledger = tmp_path / "ledger"
    assert main(["train", str(text_file()), "--no-test", *words, "--ledger", str(ledger), "--quiet"]) == 0
    run = tmp_path / "r"
    assert load_recipe(run / "recipe.toml").evaluation.test is False
    assert "test" not in Run(run).info["result"]
    assert main(["evaluate", str(run)]) == 2
    assert "evaluation.test=false" in capsys.readouterr().err
    assert main(["evaluate", str(run), "--dynamic", "0.1"]) == 2
    assert main(["evaluate", str(run), "--split", "valid", "--json"]) == 0
    capsys.readouterr()
    (entry,) = read_ledger(ledger)
    assert not entry.has_test
    assert main(["report", str(run), "--html", str(tmp_path / "page.html")]) == 0
    assert predict(Run(run)).symbols  # of the validation part: that of the test part is gone
    capsys.readouterr()
    assert main(["runs", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["test"] is None


@pytest.mark.parametrize("make", [toys.music, toys.text])
def test_what_is_generated_is_not_compared_with_the_test_part(tmp_path, monkeypatch, capsys, make):
    """The copy check and the musical statistics take what the model has not seen from elsewhere."""
    recipe = toys.recipe(data__name="toy", data__level="char", evaluation__test=False)
    run_recipe(recipe, tmp_path / "run", data=make())
    monkeypatch.setattr(loading, "load_data", lambda part: poisoned(make()))
    run = Run(tmp_path / "run")
    assert "test" not in run_data(run).splits
    capsys.readouterr()
    assert main(["generate", str(run.path), "--length", "12", "--out", str(tmp_path / "out")]) == 0
    assert "copy check" in capsys.readouterr().err


def test_a_search_s_runs_fill_no_cell_and_are_not_taken_for_scored_ones(tmp_path: Path):
    settings = Settings(("jsb/rnn",), seeds=1, overrides=(*TINY, "evaluation.test=false"), root=tmp_path / "runs",
                        ledger=tmp_path / "ledger")  # fmt: skip
    said: list[str] = []
    with made_up_songs():
        loading._load(None).splits["test"] = Poisoned()  # type: ignore[arg-type]
        assert reproduce(settings, said.append).status == 0
    assert any("finished, valid" in line for line in said)
    assert not any("test" in line.lower() for line in said)
    (entry,) = read_ledger(tmp_path / "ledger")
    assert not any(row.entries for row in rows([entry]))
    scored = Settings(
        ("jsb/rnn",), seeds=1, overrides=TINY, root=tmp_path / "runs", ledger=tmp_path / "ledger"
    )
    assert [job.name for job in plan_of(scored).jobs] == ["jsb/rnn"]


def test_an_entry_that_contradicts_itself_is_refused(tmp_path: Path):
    settings = Settings(
        ("jsb/rnn",), seeds=1, overrides=TINY, root=tmp_path / "runs", ledger=tmp_path / "ledger"
    )
    with made_up_songs():
        reproduce(settings, lambda text: None)
    (path,) = (tmp_path / "ledger").glob("*.json")
    raw = json.loads(path.read_text())
    raw["recipe"]["evaluation"]["test"] = False  # a number that should not be there
    path.write_text(json.dumps(raw))
    with pytest.raises(UserError, match=r"evaluation\.test is false, but there is a result"):
        read_entry(path)


def test_new_fields_are_part_of_the_identity():
    base = toys.recipe(model__input_hidden=[8])
    others = [
        toys.recipe(),
        toys.recipe(model__input_hidden=[9]),
        toys.recipe(model__input_hidden=[8], regulariser__commutative=0.1),
        toys.recipe(model__input_hidden=[8], evaluation__test=False),
        toys.recipe(model__input_hidden=[8], data__order="own"),
    ]
    assert len({identity(r) for r in (base, *others)}) == 6
