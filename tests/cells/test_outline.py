"""A cell's outline is looked at in every call: where it stays equal, the fingerprint must."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import deeprnn
from deeprnn.cells import plans
from deeprnn.cells.fingerprint import fingerprint, hook_of, outline

T, B, I, H = 5, 2, 3, 4
REQUEST = plans.PlanRequest(torch.float32, torch.float32, "cpu")


def made() -> Any:
    """A cell of a class of its own, which may be changed."""

    class Own(deeprnn.Cell):
        factor = 1.0

        def __init__(self) -> None:
            super().__init__()
            self.input_size, self.hidden_size, self.gain, self.word = I, H, 1.0, "a"
            self.U, self.W = nn.Linear(I, H), nn.Linear(H, H)
            self.pace, self.plain = nn.Parameter(torch.zeros(H)), torch.ones(H)
            self.register_buffer("scale", torch.ones(H))
            self.unused = None

        def step(self, x: Tensor, h: Tensor) -> Tensor:
            return self.bent(torch.tanh(self.U(x) + self.W(h)) * self.gain * self.scale * self.plain)

        def bent(self, a: Tensor) -> Tensor:
            return a * self.factor * self.pace.sigmoid()

    torch.manual_seed(0)
    return Own()


def set_data(cell: Any, path: str, data: Tensor) -> None:
    cell.get_parameter(path).data = data


def add_base(cell: Any) -> None:
    class Between(deeprnn.Cell):
        def extra(self) -> None: ...

    type(cell).__bases__ = (Between,)


def new_code(cell: Any) -> None:
    type(cell).bent.__code__ = (lambda self, a: a * 2).__code__


CHANGES: dict[str, Callable[[Any], Any]] = {
    "a number": lambda c: setattr(c, "gain", 2.0),
    "a number's type": lambda c: setattr(c, "gain", 1),
    "a truth value for a number": lambda c: setattr(c, "gain", True),
    "a word": lambda c: setattr(c, "word", "b"),
    "a new attribute": lambda c: setattr(c, "more", 1),
    "an attribute gone": lambda c: delattr(c, "word"),
    "training": lambda c: c.eval(),
    "a part's training": lambda c: c.U.eval(),
    "a part's setting": lambda c: setattr(c.U, "in_features", 7),
    "a function of its own": lambda c: c.__dict__.update(bent=lambda a: a),
    "a class's function": lambda c: setattr(type(c), "bent", lambda self, a: a * 2),
    "a class's new function": lambda c: setattr(type(c), "other", lambda self, a: a * 2),
    "a function's code": new_code,
    "a class's number": lambda c: setattr(type(c), "factor", 2.0),
    "a class's property": lambda c: setattr(type(c), "factor", property(lambda self: 2.0)),
    "a parent": add_base,
    "another class": lambda c: setattr(c, "__class__", type("Other", (type(c),), {})),
    "a part": lambda c: setattr(c, "W", nn.Linear(H, H, bias=False)),
    "a part of another class": lambda c: setattr(c, "W", nn.Sequential(nn.Linear(H, H))),
    "a part that another is": lambda c: setattr(c, "U", c.W),
    "a part gone": lambda c: setattr(c, "W", None),
    "one weight for two": lambda c: setattr(c.W, "bias", c.U.bias),
    "a parameter gone": lambda c: setattr(c.U, "bias", None),
    "a parameter's type": lambda c: set_data(c, "U.bias", torch.zeros(H, dtype=torch.float64)),
    "a parameter's shape": lambda c: set_data(c, "U.bias", torch.zeros(1)),
    "a plain tensor's shape": lambda c: setattr(c, "plain", torch.ones(1)),
    "a buffer's type": lambda c: setattr(c, "scale", torch.ones(H, dtype=torch.int64)),
    "another type everywhere": lambda c: c.double(),
    "a parameter for a number": lambda c: setattr(c, "gain", torch.ones(())),
    "a hook": lambda c: c.register_forward_hook(lambda *_: None),
    "a part's hook": lambda c: c.U.register_forward_pre_hook(lambda *_: None),
    "a hook for gradients": lambda c: c.U.register_full_backward_hook(lambda *_: None),
    "a computed weight": lambda c: nn.utils.parametrizations.weight_norm(c.U),
    "a computed weight, the old way": lambda c: torch.nn.utils.weight_norm(c.U),
    "a list": lambda c: setattr(c, "history", []),
}


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("name", CHANGES)
def test_what_changes_the_fingerprint_changes_the_outline(name):
    cell = made()
    before, known = outline(cell), fingerprint(cell)
    assert before is not None
    assert before == outline(cell)
    CHANGES[name](cell)
    assert fingerprint(cell) != known or hook_of(cell) is not None
    assert outline(cell) != before


def test_a_hook_on_all_modules_leaves_no_outline():
    cell = made()
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        assert outline(cell) is None
    finally:
        handle.remove()
    assert outline(cell) is not None


@pytest.mark.parametrize("value", [[1.0], {"gain": 1.0}, len, nn.Linear, lambda a: a, object()])
def test_what_can_change_and_stay_the_same_object_has_no_outline(value):
    cell = made()
    cell.__dict__["held"] = value
    assert outline(cell) is None


def test_numbers_that_change_keep_the_plan():
    cell = made()
    first = plans.plan_of(cell, REQUEST)
    with torch.no_grad():
        cell.U.weight.mul_(2)
        cell.U.weight = nn.Parameter(torch.ones(H, I))
    assert plans.plan_of(cell, REQUEST) is first


def test_a_plan_goes_with_the_function_that_it_was_made_of():
    """Another function may get its address: the cell is read again."""
    cell = made()
    first = plans.plan_of(cell, REQUEST)
    cache = plans._by_cell[cell]
    assert cache.last
    type(cell).bent = lambda self, a: a
    gc.collect()
    assert not cache.last
    assert plans.plan_of(cell, REQUEST) is not first


def test_what_comes_back_is_the_plan_from_before():
    cell, x = made(), torch.randn(T, B, I)
    layer, found = deeprnn.Recurrent(cell), []
    for gain in (1.0, 2.0, 1, 1.0):
        cell.gain = gain
        found.append([layer(x)[0] for _ in range(3)])
        assert all(torch.equal(y, found[-1][0]) for y in found[-1])
    torch.testing.assert_close(found[2][0], found[0][0])
    assert torch.equal(found[3][0], found[0][0])
    assert not torch.allclose(found[1][0], found[0][0])
