"""Recipes: read, refused, overridden, and every packaged one trained for two steps."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from deeprnn.data.music import Grid, MusicData, Songs
from deeprnn.data.text import TextData
from deeprnn.errors import UserError
from deeprnn.model import paper
from deeprnn.model.specs import Dropout
from deeprnn.training.loop import Trainer
from deeprnn.training.pretrain import first_stage
from deeprnn.training.recipe import Recipe, field_names, load_recipe, override, packaged, parse_value, to_toml
from deeprnn.training.schedule import Schedule
from deeprnn.training.transfer import Source

PAPER = [name for name in packaged() if name.startswith("paper/")]


def test_the_23_cells_have_a_recipe_each_with_table_1s_sizes():
    assert sorted(PAPER) == sorted(f"paper/{c.data}/{c.model}" for c in paper.CELLS)
    for cell in paper.CELLS:
        recipe = load_recipe(f"paper/{cell.data}/{cell.model}")
        assert (recipe.data.name, recipe.model.kind) == (cell.data, cell.model)
        if cell.model != "dots-star":
            size, categorical = paper.INPUTS[cell.data], cell.data.startswith("ptb")
            assert recipe.model.spec(size, categorical, Dropout()) == paper.spec(cell.data, cell.model)


def test_the_papers_settings_stand_in_its_recipes():
    betas = {"nottingham": 2330, "musedata": 1475, "jsb": 100}
    for name in PAPER:
        recipe = load_recipe(name)
        data, model = name.split("/")[1:]
        if model == "dots-star":
            assert recipe.regulariser.weight_noise == 0
            assert recipe.regulariser.dropout_output > 0
            assert not recipe.pretrain.recipe
            continue
        assert recipe.optimiser.clip == 1
        firmer = data == "nottingham" and model in ("rnn", "dots", "srnn")  # better on validation
        assert recipe.regulariser.weight_noise == (0 if data == "ptb-char" else 0.13 if firmer else 0.075)
        first = {"dots": f"paper/{data}/dts", "srnn": f"paper/{data}/rnn"}.get(model, "")
        if name == "paper/ptb-word/srnn":  # its levels are twice the RNN's size and want more weight decay
            first = "first/ptb-word/rnn-400"
        if name == "paper/nottingham/srnn":  # from an RNN with the weight noise that it was chosen with
            first = "first/nottingham/rnn"
        assert recipe.pretrain.recipe == first
        if data in betas:
            assert (recipe.schedule.name, recipe.schedule.beta) == ("paper", betas[data])
            assert recipe.data.chunk == (50 if data == "jsb" else 200)
            assert (recipe.optimiser.name, recipe.data.lanes) == ("sgd", 1)
        else:  # departures that the table names: one lane of plain SGD would take days
            decays = data == "ptb-word" or model == "dots"
            assert recipe.optimiser.name == ("adamw" if decays else "adam")
            assert recipe.schedule.name == "cosine"
            expected = {"ptb-char": (0.01, 0.001), "ptb-word": (0.1, 0.1)}[data]
            assert (recipe.init.input_std, recipe.init.output_std) == expected


def stand_in(recipe: Recipe) -> MusicData | TextData:
    """A little data of the right kind; words keep 10,000 symbols, for the sake of the large softmax."""
    rng = np.random.default_rng(0)
    name = recipe.data.name
    if recipe.data.level in ("char", "word") or name.startswith("ptb"):
        word = recipe.data.level == "word" or name == "ptb-word"
        size = 10_000 if word else 50
        ids = rng.integers(0, size, 40).astype(np.int16)
        splits = {"train": ids, "valid": ids[:9], "test": ids[:9]}
        return TextData(name, "word" if word else "char", splits, [str(i) for i in range(size)])
    songs = Songs.pack([(rng.random((n, 88)) < 0.05).astype(np.uint8) for n in (9, 7, 8, 6)])
    return MusicData(name, {"train": songs, "valid": songs[:1], "test": songs[:1]}, Grid())


def smaller(recipe: Recipe, times: int = 10) -> Recipe:
    """The same model with every layer narrower: 24 million parameters take a test seconds."""
    model = recipe.model
    sizes = {
        name: [n // times for n in getattr(model, name)]
        for name in ("hidden", "intermediate", "output_hidden")
    }
    changes = {f"model.{name}": value for name, value in sizes.items()}
    return override(recipe, {**changes, "model.embedding": model.embedding // times})


@pytest.mark.parametrize("name", packaged())
def test_every_recipe_trains_two_steps(name):
    recipe = override(load_recipe(name), {"data.chunk": 5, "data.lanes": 1, "optimiser.precision": "fp32"})
    recipe = smaller(recipe) if name.startswith("beyond/ptb") else recipe
    data = stand_in(recipe)
    stage = first_stage(recipe)
    source = None if stage is None else [Source(Trainer(stage, data).parameters(0))]
    trainer = Trainer(recipe, data, pretrained=source)
    before = trainer.updater.parameters.clone()
    plan = trainer.plans(1)[0]
    for index in range(2):
        trainer.updater.update([plan[index]])
        trainer.check_finite()
    moved = trainer.layout.views((trainer.updater.parameters - before)[0])
    still = {n for n, v in moved.items() if not v.abs().max() > 0}
    assert not still, f"never moved: {still}"
    assert isinstance(trainer.schedule, Schedule)
    assert torch.isfinite(trainer.updater.parameters).all()


def test_unknown_fields_are_named_with_the_nearest(tmp_path):
    path = tmp_path / "my.toml"
    path.write_text("[optimiser]\nrte = 1.0\n")
    with pytest.raises(
        UserError, match=r"my.toml: .*'optimiser.rte' \(did you mean 'optimiser.rate'\?\): known are"
    ):
        load_recipe(path)
    path.write_text("[optimizer]\nrate = 1.0\n")
    with pytest.raises(UserError, match=r"'optimizer' \(did you mean 'optimiser'\?\)"):
        load_recipe(path)
    path.write_text("[optimiser\n")
    with pytest.raises(UserError, match="not valid TOML"):
        load_recipe(path)
    with pytest.raises(UserError, match=r"did you mean 'paper/jsb/dots'"):
        load_recipe("paper/jsb/dot")


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("optimiser.rte", "optimiser.rate"),
        ("stop.epoch", "stop.epochs"),
        ("dropout", "regulariser.dropout_input"),
    ],
)
def test_an_unknown_field_is_told_the_nearest_one_and_not_all_sixty(name, nearest):
    with pytest.raises(UserError) as refusal:
        override(Recipe(), {name: 1})
    assert f"did you mean {nearest!r}" in str(refusal.value)
    assert len(str(refusal.value)) < 400


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\xff\xfe[data]\n", r"not UTF-8 text \(byte 1 is 0xff\)"),
        (b"seeds = [" + b"9" * 5000 + b"]\n", "thousands of digits"),
        (b"seeds = [0x" + b"f" * 5000 + b"]\n", "'seeds' must be below 2.63, got a number of 20,000 bits"),
        (b"seeds = " + b"[" * 3000 + b"]" * 3000, "nested too deeply"),
        (b"#" * 2**23, "that is no recipe"),
        (b"[init]\nbias = 1e308\n", "'init.bias' must be within 3.4e.38 of zero"),
        (b"x" * 9000 + b" = 1", r"unknown recipe field 'xxx.*\(9,002 characters\)"),
    ],
)
def test_a_file_that_is_no_recipe_is_refused_in_one_sentence(tmp_path, content, message):
    path = tmp_path / "my.toml"
    path.write_bytes(content)
    with pytest.raises(UserError, match=message) as refusal:
        load_recipe(path)
    assert "my.toml" in str(refusal.value)
    assert len(str(refusal.value)) < 400


@pytest.mark.parametrize("text", ["²..³", "9" * 5000, "[" * 3000, "1..²", "9" * 5000 + ".." + "9" * 5000])
def test_a_value_that_no_number_can_be_is_text_and_named_by_its_field(text):
    assert parse_value(text) == text
    with pytest.raises(UserError, match="'seeds' must be a whole number, got"):
        override(Recipe(), {"seeds": parse_value(text)})


@pytest.mark.parametrize("text", ["1..99999999999", "5..1", "3,1..99999999999"])
def test_a_range_is_of_countable_numbers(text):
    with pytest.raises(UserError, match="at most 100,000 numbers"):
        parse_value(text)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("optimiser.rate", "high", "'optimiser.rate' must be a number, got 'high'"),
        ("data.chunk", 2.5, "'data.chunk' must be a whole number, got 2.5"),
        ("data.chunk", 0, "data.chunk must be at least 1, got 0"),
        ("model.hidden", ["big"], "'model.hidden' must be a whole number"),
        ("schedule.name", "cosinus", r"did you mean 'cosine'"),
        ("schedule.restore_best", 1, "must be true or false"),
        ("optimiser.rate", -1.0, "above zero"),
        ("optimiser.rate", float("nan"), "above zero"),
        ("seeds", [1, 1], "distinct"),
        ("schedule.name", "cosine", "needs stop.epochs"),
        ("optimiser", 3, r"unknown recipe field 'optimiser'"),
        ("optimiser.rate.x", 3, r"unknown recipe field 'optimiser.rate.x'"),
        ("regulariser.dropout_output", 1.0, "below 1"),
        ("regulariser.weight_noise", float("inf"), "weight_noise must be not negative and finite, got inf"),
        ("schedule.beta", 0.0, "schedule.beta must be above zero"),
        ("schedule.factor", 0.5, "schedule.factor must be at least 1"),
        ("optimiser.betas", [2.0, 3.0], "optimiser.betas must be two numbers, at least 0 and below 1"),
        ("optimiser.momentum", 1.5, "optimiser.momentum must be at least 0 and below 1"),
        ("init.output_bias", float("nan"), "init.output_bias must be finite"),
        ("save.seconds", -1.0, "save.seconds must be not negative"),
        ("data.order_seed", -1, "data.order_seed must be not negative"),
        ("seeds", [2**70], "below 2"),
        ("stop.epochs", 10**400, "below 2"),
        ("optimiser.rate", 10**400, "within 3.4e.38"),
        ("stop.epochs", 1e300, "below 2"),
        ("rates", [1.0, 1.00000001], "rates must differ"),
    ],
)
def test_ill_typed_and_ill_chosen_values(name, value, message):
    def use() -> None:
        recipe = override(Recipe(), {name: value})
        recipe.model.spec(3, False, recipe.regulariser.dropout)

    with pytest.raises(UserError, match=message):
        use()


def test_members_with_orders_of_their_own_have_one_lane():
    changes = {"seeds": [1, 2], "data.order": "own", "data.lanes": 4}
    with pytest.raises(UserError, match=r"data.order='own' in a population needs data.lanes=1, got 4"):
        override(Recipe(), changes)
    assert override(Recipe(), {**changes, "seeds": [1]}).data.lanes == 4


def test_any_name_can_be_written(tmp_path):
    path = tmp_path / "recipe.toml"
    for name in ("🎵 songs", 'a "b" \\ c', "tab\there\x7f"):
        recipe = override(Recipe(), {"data.name": name})
        path.write_text(to_toml(recipe), encoding="utf-8")
        assert load_recipe(path) == recipe


def test_a_resolved_recipe_is_written_whole_and_reads_back_equal(tmp_path):
    for name in packaged():
        recipe = override(load_recipe(name), {"seeds": [3, 4], "rates": [1.0, 0.25]})
        path = tmp_path / "recipe.toml"
        path.write_text(to_toml(recipe))
        assert load_recipe(path) == recipe
    assert {"optimiser.rate", "data.name", "seeds"} <= set(field_names())


@pytest.mark.parametrize(
    ("text", "value"),
    [("0.5", 0.5), ("1..4", [1, 2, 3, 4]), ("1,2", [1, 2]), ("[400, 400]", [400, 400]), ("true", True),
     ("sgd", "sgd"), ("1e-3", 0.001), ("lp:2", "lp:2"), ("a/b.toml", "a/b.toml"), ('"7"', "7")],
)  # fmt: skip
def test_values_from_the_command_line(text, value):
    assert parse_value(text) == value


def test_short_and_long_names_of_packaged_recipes():
    a = load_recipe("paper/jsb/dots")
    assert a == load_recipe("recipes/paper/jsb/dots.toml") == load_recipe("recipes/paper/jsb/dots")
