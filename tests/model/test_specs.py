"""Specs: frozen, hashable, the same after JSON, and exacting about what they are given."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deeprnn.errors import UserError
from deeprnn.model.models import assemble
from deeprnn.model.operator_specs import PlusSpec, PredictSpec
from deeprnn.model.specs import Dropout, ModelSpec

SIZE = st.integers(1, 9)
UNIT = st.sampled_from(["sigmoid", "tanh", "relu", "identity", "maxout:2", "lp:3"])


@st.composite
def any_model(draw) -> ModelSpec:
    return assemble(
        input_size=draw(SIZE),
        output_size=draw(SIZE),
        hidden_sizes=draw(st.lists(SIZE, min_size=1, max_size=3)),
        intermediate=draw(st.lists(SIZE, max_size=3)),
        output_hidden=draw(st.lists(SIZE, max_size=2)),
        input_mlp=draw(st.lists(SIZE, max_size=2)),
        shortcut=draw(st.sampled_from(["none", "last", "all"])),
        input_to=draw(st.sampled_from(["first", "last", "all"])),
        unit=draw(UNIT),
        output_unit=draw(UNIT),
        output=draw(st.sampled_from(["bernoulli", "categorical"])),
        output_from=draw(st.sampled_from(["top", "all"])),
        input_to_levels=draw(st.sampled_from(["first", "all"])),
        bias=draw(st.booleans()),
        dropout=Dropout(state=draw(st.floats(0, 0.9)), per_sequence=draw(st.booleans())),
    )


@settings(max_examples=60, deadline=None)
@given(any_model())
def test_a_spec_survives_json(spec):
    again = ModelSpec.from_dict(json.loads(json.dumps(spec.to_dict())))
    assert again == spec
    assert hash(again) == hash(spec)


@settings(max_examples=60, deadline=None)
@given(any_model())
def test_shapes_of_a_level_agree(spec):
    for level in spec.levels:
        assert (
            level.depth == len(level.sizes) == len(level.units) == len(level.shortcuts) == len(level.inputs)
        )
        assert level.sizes[-1] == level.hidden_size
        assert not level.shortcuts[0]
        assert any(level.inputs)
        assert [w // u.pool for w, u in zip(level.widths, level.unit_specs, strict=True)] == list(level.sizes)


@pytest.mark.parametrize(("shortcut", "flags"), [("none", "000"), ("last", "001"), ("all", "011")])
def test_where_shortcuts_go(shortcut, flags):
    spec = PlusSpec(2, 3, (4, 5), shortcut=shortcut)
    assert "".join(str(int(s)) for s in spec.shortcuts) == flags


@pytest.mark.parametrize(("place", "flags"), [("first", "100"), ("last", "001"), ("all", "111")])
def test_where_the_input_enters(place, flags):
    spec = PlusSpec(2, 3, (4, 5), input_to=place)
    assert "".join(str(int(s)) for s in spec.inputs) == flags


def test_a_shallow_transition_has_no_room_for_a_shortcut():
    assert PlusSpec(2, 3, shortcut="last").shortcuts == (False,)
    assert PlusSpec(2, 3, input_to="last").inputs == (True,)


def test_one_unit_serves_all_layers_and_a_list_each():
    assert PlusSpec(2, 3, (4,), units=("tanh",)).units == ("tanh", "tanh")
    assert PlusSpec(2, 3, (4,), units="relu").units == ("relu", "relu")  # type: ignore[arg-type]
    assert PlusSpec(2, 3, (4,), units=("tanh", "maxout")).units == ("tanh", "maxout:2")
    assert PlusSpec(2, 3, (4,), units=("tanh", "maxout:2")).widths == (4, 6)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: PlusSpec(0, 3), "input_size must be a whole number of at least 1, got 0"),
        (lambda: PlusSpec(2, True), "hidden_size"),
        (lambda: PlusSpec(2, 2**31), "hidden_size must be at most 2,147,483,647, got 2,147,483,648"),
        (lambda: PredictSpec(2, 3, sizes=(10**5000,)), r"sizes\[0\] must be at most .*, got far more"),
        (lambda: PlusSpec(2, 3.0), "got 3.0"),
        (lambda: PlusSpec(2, 3, (4, -1)), r"intermediate_sizes\[1\].*got -1"),
        (lambda: PlusSpec(2, 3, 4), r"intermediate_sizes must be a list.*got 4"),
        (lambda: PlusSpec(2, 3, None), "intermediate_sizes"),
        (lambda: PlusSpec(2, 3, "44"), "intermediate_sizes"),
        (lambda: PlusSpec(2, 3, input_mlp_sizes=(0,)), "input_mlp_sizes"),
        (lambda: PlusSpec(2, 3, units=("tanh", "tanh")), "1 layers need 1 units"),
        (lambda: PlusSpec(2, 3, units=None), "units"),
        (lambda: PlusSpec(2, 3, units=("thanh",)), "did you mean 'tanh'"),
        (lambda: PlusSpec(2, 3, shortcut=True), "shortcut must be one of none, last, all, got True"),
        (lambda: PlusSpec(2, 3, input_to="none"), "input_to"),
        (lambda: PredictSpec(2, 0), "output_size"),
        (lambda: PredictSpec(2, 3, sizes=(0,)), "sizes"),
        (lambda: PredictSpec(2, 3, shortcut=True), "shortcut=True needs"),
        (lambda: Dropout(state=1.0), "dropout.state must be at least 0 and below 1, got 1.0"),
        (lambda: Dropout(input=float("nan")), "dropout.input"),
        (lambda: Dropout(output="0.5"), "dropout.output.*'0.5'"),
        (lambda: Dropout(per_sequence=1), "per_sequence.*got 1"),
        (lambda: PlusSpec(2, 3, bias="no"), "bias must be True or False, got 'no'"),
        (lambda: PlusSpec(2, 3, skip_size=-1), "skip_size.*got -1"),
        (lambda: PredictSpec(2, 3, bias=0), "bias.*got 0"),
        (lambda: ModelSpec((), PredictSpec(2, 3)), "at least one level"),
    ],
)
def test_the_thing_the_value_and_the_remedy_are_named(make, words):
    with pytest.raises(UserError, match=words):
        make()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"outptu": "categorical"}, "unknown field 'outptu'.*did you mean 'output'"),
        ({"levels": [{"input_size": 2}]}, "PlusSpec: field 'hidden_size' is missing"),
        ({"levels": [{"input_size": 2, "hidden_size": 3, "depth": 2}]}, "unknown field 'depth'"),
        ({"predict": {}}, "PredictSpec: field 'input_size' is missing"),
        ({"predict": 3}, "PredictSpec: a table of named fields"),
        ({"levels": 3}, "levels must be a list"),
        ({"levels": [3]}, "PlusSpec: a table of named fields"),
        ({"dropout": 0.5}, "Dropout: a table of named fields"),
    ],
)
def test_data_that_is_no_spec_is_refused(change, words):
    data = assemble(input_size=2, output_size=3, hidden_sizes=(4,)).to_dict()
    with pytest.raises(UserError, match=words):
        ModelSpec.from_dict({**data, **change})
    with pytest.raises(UserError, match="model: a table of named fields"):
        ModelSpec.from_dict([data])  # type: ignore[arg-type]


def test_symbols_follow_the_kind_of_output_unless_told():
    sizes = {"input_size": 5, "output_size": 5, "hidden_sizes": (3,)}
    assert assemble(output="categorical", **sizes).symbols
    assert not assemble(output="bernoulli", **sizes).symbols
    assert not assemble(output="categorical", symbols=False, **sizes).symbols
