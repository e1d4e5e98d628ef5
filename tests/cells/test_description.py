"""A description that no backend could run is refused when it is made."""

from __future__ import annotations

import json

import pytest

from deeprnn.cells.deep_transition import DeepTransition, recognise
from deeprnn.cells.description import (
    CellDescription,
    Output,
    Preactivation,
    Product,
    Rows,
    Stage,
    Vector,
    from_text,
)
from deeprnn.cells.expressions import Expression, apply, leaf
from deeprnn.errors import UserError


def cell_with(out: Expression) -> CellDescription:
    entries = Preactivation((Product(0, Vector("state", 0)),), Rows(0)), Preactivation((), Rows(4))
    return CellDescription((4,), (Stage(4, entries, (out,)),), (Output(0, 0),), ((4, 4),), 8)


@pytest.mark.parametrize(
    ("out", "words"),
    [
        (Expression("nosuch", (leaf("preactivation", 0),)), "unknown function 'nosuch': known are add, "),
        (apply("tanh", Expression("nosuch", (leaf("state", 0),))), "unknown function 'nosuch'"),
        (leaf("nosuch", 0), "unknown leaf 'nosuch': known are preactivation, "),
        (Expression("tanh", (leaf("state", 0), leaf("state", 0))), "gives tanh 2 arguments, it takes 1"),
        (Expression("select", (leaf("state", 0),)), "gives select 1 arguments, it takes 3"),
    ],
)  # fmt: skip
def test_unknown_functions_and_wrong_arguments_are_refused(out, words):
    with pytest.raises(ValueError, match=words):
        cell_with(out)


def test_text_with_an_unknown_function_is_refused():
    text = cell_with(apply("tanh", leaf("preactivation", 0))).text
    assert json.loads(text)
    with pytest.raises(ValueError, match="unknown function 'nosuch'"):
        from_text(text.replace('"tanh"', '"nosuch"'))


def test_a_transition_of_an_unknown_unit_is_refused():
    with pytest.raises(UserError, match=r"unknown unit 'nosuch': known are sigmoid, .*, lp"):
        DeepTransition((4,), ("nosuch",), (False,))
    with pytest.raises(UserError, match="unknown unit 'add'"):  # of two numbers
        DeepTransition((4,), ("add",), (False,))
    with pytest.raises(UserError, match="'tanh' does not pool 2 linear maps: maxout and lp do"):
        DeepTransition((4,), ("tanh",), (False,), (2,))


@pytest.mark.parametrize(
    "out",
    [
        leaf("preactivation", 0) + leaf("preactivation", 1),
        apply("tanh", leaf("preactivation", 0) * leaf("preactivation", 1)),
        apply("mix", 0.5, leaf("preactivation", 0), leaf("preactivation", 1)),
        apply("tanh", leaf("preactivation", 0)),
    ],
)
def test_other_cells_are_not_taken_for_transitions(out):
    assert recognise(cell_with(out)) is None
