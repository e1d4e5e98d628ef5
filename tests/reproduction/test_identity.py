"""An entry's identity: every field that changes training changes it, and what it leaves out changes nothing."""

from __future__ import annotations

import dataclasses
import json
import typing
from pathlib import Path
from typing import Any

import pytest

from deeprnn.errors import UserError
from deeprnn.reproduction.entries import read_ledger
from deeprnn.reproduction.identity import EXEMPT, identity
from deeprnn.reproduction.plan import recipe_for, stage_of
from deeprnn.training.loop import Trainer
from deeprnn.training.recipe import Recipe, override
from tests.reproduction.toys import small_songs

ROOT = Path(__file__).parents[2]
LIVE = Recipe.from_dict(
    {
        "model": {
            "kind": "dots",
            "hidden": [6],
            "intermediate": [5],
            "output_hidden": [4],
            "unit": "relu",
            "output": "nade",
        },
        "optimiser": {"name": "adamw"},
        "evaluation": {"streams": 2},
        "stop": {"epochs": 3},
    }
)
"""of a model and a way of scoring that read every field"""
READERS = {
    "beta": "paper",
    "patience": "paper",
    "restore_best": "paper",
    "factor": "halving",
    "minimum": "halving",
    "floor": "cosine",
}
"""fields of the schedule that only some schedules read, and one that does"""
IDLE = {
    "paper": ("model.nade_size", "model.output_unit", "init.output_hidden_std", "init.rectifier_bias",
              "schedule.factor", "schedule.minimum", "schedule.floor", "evaluation.chunk", "evaluation.width",
              "save.seconds", "save.updates"),
    "cosine": ("schedule.beta", "schedule.patience", "schedule.restore_best", "schedule.factor"),
    "halving": ("schedule.beta", "schedule.floor"),
}  # fmt: skip
"""fields that a plain RNN under a schedule does not read"""


def fields() -> list[str]:
    """Every field of a recipe by reflection, as `section.field`."""
    hints = typing.get_type_hints(Recipe)
    out = []
    for part in dataclasses.fields(Recipe):
        inner = hints[part.name]
        out += (
            [f"{part.name}.{f.name}" for f in dataclasses.fields(inner)]
            if dataclasses.is_dataclass(inner)
            else [part.name]
        )
    return out


def another(recipe: Recipe, name: str) -> Any:
    """A value that the field does not have, found from its type."""
    section, _, key = name.rpartition(".")
    owner = getattr(recipe, section) if section else recipe
    now, hint = getattr(owner, key), typing.get_type_hints(type(owner))[key]
    if typing.get_origin(hint) is typing.Literal:
        return next(choice for choice in typing.get_args(hint) if choice != now)
    if isinstance(now, bool):
        return not now
    if isinstance(now, int):
        return now + 1
    if isinstance(now, float):
        return 1.5 if name == "schedule.factor" else now / 2 or 0.125
    if isinstance(now, str):
        return {"model.cell": "gru", "model.output_unit": "tanh"}.get(name, f"{now}x")
    inner = typing.get_args(hint)[0]
    if name == "optimiser.betas":
        return [0.8, 0.99]
    return {int: [3, 4], float: [0.5, 0.25], str: ["a=1"]}[inner]


@pytest.mark.parametrize("name", [n for n in fields() if n != "pretrain.recipe"])
def test_no_field_that_changes_training_is_left_out(name: str):
    base = override(LIVE, {"schedule.name": READERS.get(name.partition(".")[2], LIVE.schedule.name)})
    changed = override(base, {name: another(base, name)})
    assert changed != base
    exempt = name in EXEMPT or name.partition(".")[0] in EXEMPT
    assert (identity(changed) == identity(base)) == exempt, (
        f"{name}: say in EXEMPT why it does not count, or hash it"
    )
    first = override(base, {"model.kind": "dts", "model.output_hidden": []})
    second = override(LIVE, {"pretrain.recipe": "paper/jsb/dts"})
    if name not in ("model.output_unit", "init.output_hidden_std"):  # a first stage has no deep output
        altered = override(first, {name: another(first, name)})
        assert (identity(second, altered) == identity(second, first)) == exempt, f"{name} of the first stage"


def test_the_first_stage_counts_by_what_it_is_not_by_its_name():
    recipe = recipe_for("jsb/dots")
    stage = stage_of(recipe)
    assert stage is not None
    renamed = override(recipe, {"pretrain.recipe": "first/jsb/dts"})
    assert identity(renamed, stage) == identity(recipe, stage) != identity(recipe)
    assert identity(recipe, override(stage, {"regulariser.weight_noise": 0.13})) != identity(recipe, stage)
    assert identity(override(recipe, {"pretrain.rate": 0.2}), stage) != identity(recipe, stage)


def test_every_exemption_names_something_and_gives_a_reason():
    sections = {f.name for f in dataclasses.fields(Recipe)}
    assert all(name in sections or name in fields() for name in EXEMPT)
    assert all(len(reason) > 20 for reason in EXEMPT.values())


@pytest.mark.parametrize("schedule", IDLE)
def test_what_an_identity_ignores_changes_no_bit(schedule: str):
    plain = {
        "data": {"name": "jsb", "chunk": 8},
        "model": {"hidden": [4]},
        "stop": {"epochs": 2},
        "seeds": [3],
    }
    base = override(Recipe.from_dict(plain), {"schedule.name": schedule})
    changed = override(base, {name: another(base, name) for name in IDLE[schedule]})
    assert identity(changed) == identity(base)
    outcomes = []
    for recipe in (base, changed):
        trainer = Trainer(recipe, small_songs())
        trainer.train([])
        outcomes.append((trainer.results(), {k: v.tolist() for k, v in trainer.parameters(0).items()}))
    assert json.dumps(outcomes[0]) == json.dumps(outcomes[1])


@pytest.mark.parametrize(
    "model",
    [
        {"model.output": "nade", "model.nade_size": 5},
        {
            "model.output": "nade",
            "model.nade_size": 5,
            "model.output_hidden": [4],
            "regulariser.dropconnect": 0.3,
        },
        {
            "model.cell": "lstm",
            "optimiser.name": "adamw",
            "optimiser.average": "ema",
            "optimiser.average_decay": 0.9,
        },
        {
            "model.input_hidden": [4],
            "model.hidden": [4, 4],
            "model.unit": "relu",
            "model.input_to_levels": "all",
        },
    ],
)
def test_no_model_reads_what_its_identity_ignores(model: dict[str, Any]):
    """The fields are found by asking for the identity, so that a new one cannot be forgotten here."""
    plain = {
        "data": {"name": "jsb", "chunk": 8},
        "model": {"hidden": [4]},
        "stop": {"epochs": 2},
        "seeds": [3],
    }
    base = override(Recipe.from_dict(plain), model)

    def outcome(recipe: Recipe) -> str:
        trainer = Trainer(recipe, small_songs())
        trainer.train([])
        return json.dumps((trainer.results(), {k: v.tolist() for k, v in trainer.parameters(0).items()}))

    wanted, ignored = outcome(base), []
    for name in fields():
        if name in EXEMPT or name.partition(".")[0] in EXEMPT:
            continue
        try:
            changed = override(base, {name: another(base, name)})
        except UserError:
            continue
        if identity(changed) == identity(base):
            ignored.append(name)
            assert outcome(changed) == wanted, name
    assert "schedule.floor" in ignored
    assert "evaluation.width" in ignored


def test_every_entry_of_the_ledger_is_named_by_its_identity():
    entries = read_ledger(ROOT / "results" / "runs")
    assert len(entries) >= 255
    for entry in entries:
        cut = f"-cut-off-{entry.epochs}" if entry.cut_off else ""
        assert entry.path.name == f"{entry.data}-{entry.model}-{entry.identity}-seed-{entry.seed}{cut}.json"
