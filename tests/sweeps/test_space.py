"""Spaces: what they hold, what they refuse, and in whose words."""

from __future__ import annotations

from datetime import date

import pytest

from deeprnn.errors import UserError
from deeprnn.sweeps.space import UNSEARCHED, Choice, Range, read_space
from deeprnn.sweeps.spec import load_spec, packaged, read_spec
from deeprnn.training.recipe import Recipe, field_names, to_toml
from tests.sweeps.toys import spec


def test_draws_stay_in_their_ranges_and_follow_from_their_number():
    space = read_space(
        {
            "optimiser.rate": "log:0.001..1",
            "regulariser.weight_noise": "uniform:0..0.2",
            "schedule.patience": "int:1..3",
            "model.hidden": [[5], [7]],
            "optimiser": {"name": ["sgd", "adam"]},  # a table in place of a dotted name
        },
        Recipe(),
    )
    points = [space.draw(0, number) for number in range(300)]
    assert all(0.001 <= p["optimiser.rate"] <= 1 for p in points)
    assert {p["schedule.patience"] for p in points} == {1, 2, 3}
    assert {tuple(p["model.hidden"]) for p in points} == {(5,), (7,)}
    assert {p["optimiser.name"] for p in points} == {"sgd", "adam"}
    assert 100 < sum(p["optimiser.rate"] < 0.0316 for p in points) < 200  # evenly in the logarithm
    assert space.draw(0, 17) == points[17] != space.draw(1, 17)


def test_a_whole_number_field_has_whole_numbers_in_any_range():
    space = read_space({"model.hidden": "log:8..64"}, Recipe())
    assert space.dimensions["model.hidden"] == Range(8, 64, log=True, whole=True)
    assert all(isinstance(space.draw(0, n)["model.hidden"], int) for n in range(20))


def test_in_a_grid_what_trains_together_lies_together():
    space = read_space({"optimiser.rate": [0.1, 0.2], "model.hidden": [[5], [7]]}, Recipe())
    shapes = [point["model.hidden"] for point in space.grid()]
    assert shapes == [[5], [5], [7], [7]]
    assert space.grid_size == 4


@pytest.mark.parametrize(
    ("space", "sentence"),
    [
        ({}, "no \\[space\\]"),
        ({"optimiser.rat": [1.0]}, "did you mean 'optimiser.rate'"),
        ({"model.hiden": [[1]]}, "did you mean 'model.hidden'"),
        ({"optimiser.rate": []}, "is empty"),
        ({"optimiser.rate": "log:1..0.1"}, "is empty"),
        ({"optimiser.rate": "log:0..1"}, "begins above zero"),
        ({"optimiser.rate": "log:nan..inf"}, "must be numbers"),
        ({"optimiser.rate": "uniform:-1..1"}, "optimiser.rate must be above zero"),
        ({"optimiser.rate": "1..2..3"}, "is no range"),
        ({"optimiser.rate": 0.5}, "is one value"),
        ({"optimiser.rate": [0.1, "fast"]}, "must be a number, got 'fast'"),
        ({"optimiser.rate": [0.1, 0.1]}, "lists a value twice"),
        ({"optimiser.rate": [1, 0.5, 1.0]}, "lists a value twice"),
        ({"model.hidden": [5, [5]]}, "lists a value twice"),
        ({"optimiser.rate": [0.1, date(2020, 1, 1)]}, "must be a number, got datetime"),
        ({"optimiser.rate": [0.1], "optimiser": {"rate": [0.2]}}, "optimiser.rate is given twice"),
        ({"model.kind": ["rnn", "dts"]}, "only names the model"),
        ({"save.seconds": [1.0, 2.0]}, "nothing that is learnt"),
        ({"evaluation.test": [True, False]}, "no trial of a search sees"),
        ({"data.name": ["jsb", "bach"]}, "different data"),
        ({"transpositions": [[0], [6]]}, "search over data.random_transpose"),
        ({"optimiser.name": ["adam", "adm"]}, "did you mean 'adam'"),
        ({"model.hidden": [[10], [0]]}, "hidden"),
        ({"model.unit": ["tanh", "tan"]}, "tanh"),
        ({"seeds": [[1], [2]]}, "mean"),
        ({"optimiser": {"rate": {"deep": 1}}}, "is one value"),
        ({"schedule.patience": "int:1.5..3"}, "whole numbers"),
        ({f"data.f{i}": [1] for i in range(99)}, "99 fields"),
    ],
)
def test_a_bad_space_is_refused_in_a_sentence(space, sentence):
    with pytest.raises(UserError, match=sentence):
        read_space(space, Recipe())


def test_fields_that_only_go_together_are_accepted_together():
    space = {"schedule.name": ["cosine", "paper"], "stop.epochs": [2, 3]}
    assert read_space(space, Recipe()).dimensions["stop.epochs"] == Choice((2, 3))


@pytest.mark.parametrize(
    ("tables", "sentence"),
    [
        ({"recpe": "x"}, "did you mean 'recipe'"),
        ({"space": {"optimiser.rate": [1.0]}}, "names its recipe"),
        ({"recipe": "quick/jsb-dst"}, "did you mean"),
        ({"recipe": "quick/jsb-dts", "trials": 0}, "trials must be"),
        ({"recipe": "quick/jsb-dts", "trials": 10**9}, "trials must be"),
        ({"recipe": "quick/jsb-dts", "trials": True}, "trials must be"),
        ({"recipe": "quick/jsb-dts", "sampler": "tpee"}, "did you mean 'tpe'"),
        ({"recipe": "quick/jsb-dts", "space": [1]}, "is a table"),
        ({"recipe": "quick/jsb-dts", "override": {"stop.epoch": 3}}, "did you mean 'stop.epochs'"),
        ({"recipe": "quick/jsb-dts", "override": {"rates": [1.0, 2.0]}}, "search over optimiser.rate"),
        ({"recipe": "quick/jsb-dts", "override": {"transpositions": [0, 6]}}, "data.random_transpose"),
        (
            {"recipe": "quick/jsb-dts", "override": {"optimiser": {"rate": 5.0}}},
            "in .space. and in .override.",
        ),
        (
            {"recipe": "quick/jsb-dts", "override": {"seeds": [1], "stop": {"epochs": 1}, "stop.epochs": 2}},
            "stop.epochs is given twice",
        ),
        (
            {"recipe": "quick/jsb-dts", "sampler": "grid", "space": {"optimiser.rate": "log:0.1..1"}},
            "no end of",
        ),
    ],
)
def test_a_bad_file_is_refused_in_a_sentence(tables, sentence):
    with pytest.raises(UserError, match=sentence):
        read_spec({"space": {"optimiser.rate": [0.1]}, **tables})


def test_the_papers_grids_are_packaged_and_can_be_read():
    names = packaged()
    assert len(names) == 20
    for name in names:
        assert load_spec(name).sampler == "grid"
    jsb = load_spec("paper/jsb/rnn")
    assert [p["model.hidden"] for p in jsb.space.grid()] == [[100], [200], [400], [600], [800]]
    assert load_spec("paper/jsb/dots").trials == 125


def test_a_sweeps_file_comes_back_as_it_was(tmp_path):
    which = spec(
        {"optimiser.rate": "log:0.01..1", "model.hidden": [[5], [6]], "schedule.patience": "int:1..4"}
    )
    (tmp_path / "recipe.toml").write_text(to_toml(which.recipe))
    (tmp_path / "sweep.toml").write_text(which.to_toml("recipe.toml"))
    assert load_spec(tmp_path) == which
    assert not which.difference(load_spec(tmp_path))
    changed = spec({"optimiser.rate": "log:0.01..2"})
    assert which.difference(changed) == "space.optimiser.rate"


def test_every_field_that_is_not_searched_exists():
    assert set(UNSEARCHED) <= set(field_names())
