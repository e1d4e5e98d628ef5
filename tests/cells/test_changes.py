"""A step is read once: whatever could make it another step is noticed, and whatever it does besides is done."""

from __future__ import annotations

import gc
import logging
import random
import weakref
from collections import deque
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import deeprnn
from deeprnn.cells import plans

T, B, I, H = 5, 2, 3, 4
SCALE = 1.0
SHIFT = torch.zeros(H)
GAINS = [torch.ones(H)]
LAYER = nn.Linear(H, H)
SEEN: list[Tensor] = []
CALLS = 0


class Config:
    gain = 1.0


def helper(a: Tensor) -> Tensor:
    return a * SCALE


def imported(m: Any, a: Tensor) -> Tensor:
    import tests.cells.test_changes as here

    return a * here.SCALE


class Base(deeprnn.Cell):
    """A cell whose step is given by each test: `rule(cell, tanh(U x + W h))`."""

    rule: Callable[[Any, Tensor], Tensor]

    def __init__(self, **attributes: Any) -> None:
        super().__init__()
        self.input_size, self.state_sizes = I, (H,)
        self.U, self.W = nn.Linear(I, H), nn.Linear(H, H)
        for name, value in attributes.items():
            setattr(self, name, value)

    def step(self, x: Tensor, h: Tensor) -> Tensor:
        return self.rule(torch.tanh(self.U(x) + self.W(h)))

    def twice(self, a: Tensor) -> Tensor:
        return 2 * a


def cell_of(rule: Callable[[Any, Tensor], Tensor], **attributes: Any) -> Base:
    torch.manual_seed(0)
    return type("Own", (Base,), {"rule": rule})(**attributes)


def by_hand(cell: Base, x: Tensor) -> Tensor:
    h, steps = torch.zeros(B, H), []
    for row in x:
        h = cell(row, h)
        steps.append(h)
    return torch.stack(steps)


@pytest.fixture
def x() -> Tensor:
    return torch.randn(T, B, I, generator=torch.Generator().manual_seed(1))


def set_global(name: str, value: Any) -> Callable[[Base], None]:
    return lambda cell: globals().__setitem__(name, value)


class Gate(nn.Module):
    size = 1.0

    def forward(self, a: Tensor) -> Tensor:
        return self.size * a


class Scaled:
    def __call__(self, a: Tensor) -> Tensor:
        return SCALE * a


class Slots:
    __slots__ = ("factor",)


def _slots(factor: float) -> Slots:
    found = Slots()
    found.factor = factor
    return found


FACTOR = "factor"
CHANGES: dict[str, tuple[Callable[[Any, Tensor], Tensor], dict[str, Any], Callable[[Any], None]]] = {
    "a number": (lambda m, a: a * m.k, {"k": 1.0}, lambda m: setattr(m, "k", 2.0)),
    "a list": (lambda m, a: a * m.k[0], {"k": [1.0]}, lambda m: m.k.__setitem__(0, 2.0)),
    "a deque": (lambda m, a: a * m.k[0], {"k": deque([1.0])}, lambda m: m.k.__setitem__(0, 2.0)),
    "an object": (lambda m, a: a * m.k.factor, {"k": SimpleNamespace(factor=1.0)}, lambda m: setattr(m.k, FACTOR, 2.0)),
    "an object with slots": (lambda m, a: a * m.k.factor, {"k": _slots(1.0)}, lambda m: setattr(m.k, FACTOR, 2.0)),
    "an array": (lambda m, a: a * float(m.k[0]), {"k": np.ones(2)}, lambda m: m.k.__setitem__(0, 2.0)),
    "a function": (lambda m, a: m.k(a), {"k": torch.tanh}, lambda m: setattr(m, "k", torch.relu)),
    "what it was called with": (
        lambda m, a: m.k(a),
        {"k": partial(torch.mul, other=1.0)},
        lambda m: setattr(m, "k", partial(torch.mul, other=2.0)),
    ),
    "a tensor": (lambda m, a: a * m.k, {"k": torch.ones(H)}, lambda m: setattr(m, "k", torch.full((H,), 2.0))),
    "a number of the class": (lambda m, a: a * m.size, {}, lambda m: setattr(type(m), "size", 2.0)),
    "a list of the class": (lambda m, a: a * m.widths[0], {}, lambda m: m.widths.__setitem__(0, 2.0)),
    "a module in a list": (
        lambda m, a: m.k[0](a),
        {"k": [nn.Linear(H, H)]},
        lambda m: setattr(m.k[0], "weight", nn.Parameter(torch.eye(H))),
    ),
    "a part": (lambda m, a: m.k(a), {"k": nn.Tanh()}, lambda m: setattr(m, "k", nn.ReLU())),
    "a part's class": (lambda m, a: m.k(a), {"k": Gate()}, lambda m: setattr(Gate, "size", 2.0)),
    "a part's forward": (lambda m, a: m.k(a), {"k": Gate()}, lambda m: setattr(m.k, "forward", torch.relu)),
    "a global number": (lambda m, a: a * SCALE, {}, set_global("SCALE", 2.0)),
    "a global of a helper": (lambda m, a: helper(a), {}, set_global("SCALE", 2.0)),
    "a helper": (lambda m, a: helper(a), {}, set_global("helper", lambda a: 2 * a)),
    "a helper's code": (
        lambda m, a: helper(a), {}, lambda m: setattr(helper, "__code__", (lambda a: 3 * a).__code__),
    ),
    "a global tensor": (lambda m, a: a + SHIFT, {}, set_global("SHIFT", torch.ones(H))),
    "a tensor in a list": (
        lambda m, a: a * m.k[0], {"k": [torch.ones(H)]}, lambda m: m.k.__setitem__(0, torch.zeros(H)),
    ),
    "a tensor in a tuple": (
        lambda m, a: a * m.k[0], {"k": (torch.ones(H),)}, lambda m: setattr(m, "k", (torch.zeros(H),)),
    ),
    "a tensor of an object": (
        lambda m, a: a * m.k.t, {"k": SimpleNamespace(t=torch.ones(H))}, lambda m: setattr(m.k, "t", torch.zeros(H)),
    ),
    "a tensor in a global list": (lambda m, a: a * GAINS[0], {}, lambda m: GAINS.__setitem__(0, torch.zeros(H))),
    "a number of a global class": (lambda m, a: a * Config.gain, {}, lambda m: setattr(Config, "gain", 2.0)),
    "the weight of a global module": (
        lambda m, a: LAYER(a), {}, lambda m: setattr(LAYER, "weight", nn.Parameter(torch.eye(H))),
    ),
    "a global of an imported module": (imported, {}, set_global("SCALE", 2.0)),
    "a global of a callable object": (lambda m, a: m.k(a), {"k": Scaled()}, set_global("SCALE", 2.0)),
    "a setting of a module in a list": (
        lambda m, a: m.k[0](a), {"k": [nn.LeakyReLU(0.1)]}, lambda m: setattr(m.k[0], "negative_slope", 0.5),
    ),
    "a tensor of two names": (
        lambda m, a: m.k(a), {"k": nn.Linear(H, H)}, lambda m: setattr(m.k, "weight", m.W.weight),
    ),
}  # fmt: skip
"""what a step reads: the rule, the cell's attributes, and a change"""


@pytest.fixture
def unharmed(monkeypatch):
    """Classes and globals of this file are as before when a test is over."""
    monkeypatch.setattr(Base, "size", 1.0, raising=False)
    monkeypatch.setattr(Base, "widths", [1.0], raising=False)
    monkeypatch.setattr(Gate, "size", 1.0)
    monkeypatch.setattr(helper, "__code__", helper.__code__)
    monkeypatch.setattr(Config, "gain", 1.0)
    monkeypatch.setitem(globals(), "LAYER", nn.Linear(H, H))
    monkeypatch.setitem(globals(), "GAINS", [torch.ones(H)])
    for name in ("SCALE", "SHIFT", "helper"):
        monkeypatch.setitem(globals(), name, globals()[name])


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_noticed(name, x, unharmed):
    rule, attributes, change = CHANGES[name]
    cell = cell_of(rule, **deepcopy(attributes))  # a change of a list stays in the list
    layer = deeprnn.Recurrent(cell)
    before = layer(x)[0]
    torch.testing.assert_close(before, by_hand(cell, x))
    assert not plans.plan_of(cell, plans.PlanRequest(torch.float32, torch.float32, "cpu")).reason
    change(cell)
    after = layer(x)[0]
    assert not torch.equal(before, after)
    torch.testing.assert_close(after, by_hand(cell, x))


def test_a_weight_that_two_names_shared_is_read_anew_when_they_part(x):
    cell = cell_of(lambda m, a: m.k(a), k=nn.Linear(H, H))
    cell.k.weight = cell.W.weight
    layer = deeprnn.Recurrent(cell)
    layer(x)
    cell.k.weight = nn.Parameter(torch.eye(H))
    torch.testing.assert_close(layer(x)[0], by_hand(cell, x))


def test_a_variable_of_a_closure_is_noticed(x):
    def made():
        k = 1.0

        def change():
            nonlocal k
            k = 2.0

        return (lambda m, a: a * k), change

    rule, change = made()
    cell = cell_of(rule)
    layer = deeprnn.Recurrent(cell)
    layer(x)
    change()
    torch.testing.assert_close(layer(x)[0], by_hand(cell, x))


@pytest.mark.parametrize("of_class", [False, True], ids=["attribute", "class"])
def test_a_function_at_the_address_of_an_earlier_one_is_another(of_class, x):
    """Python gives the memory of a function that is gone to the next one."""
    cell = cell_of(lambda m, a: m.k(a), k=torch.tanh)
    layer = deeprnn.Recurrent(cell)

    def scaled(k: float) -> Callable[..., Tensor]:
        return (lambda m, a: a * k) if of_class else (lambda a: a * k)

    for k in range(8):
        setattr(type(cell) if of_class else cell, "rule" if of_class else "k", scaled(float(k)))
        torch.testing.assert_close(layer(x)[0], by_hand(cell, x))


COMPILED = ("a number", "a list", "an object", "a function", "a part", "a tensor")


@pytest.mark.parametrize("name", COMPILED)
def test_a_change_is_noticed_by_compiled_code(name, x, unharmed):
    rule, attributes, change = CHANGES[name]
    cell = cell_of(rule, **deepcopy(attributes))  # a change of a list stays in the list
    torch._dynamo.reset()
    compiled = torch.compile(deeprnn.Recurrent(cell), fullgraph=True, backend="eager")
    before = compiled(x)[0]
    change(cell)
    after = compiled(x)[0]
    assert not torch.equal(before, after)
    torch.testing.assert_close(after, by_hand(cell, x))


def test_a_step_of_a_dictionary_and_of_a_new_class_is_noticed_by_compiled_code(x):
    cell = cell_of(lambda m, a: a * m.k["k"], k={"k": 1.0})
    torch._dynamo.reset()
    compiled = torch.compile(deeprnn.Recurrent(cell), fullgraph=True, backend="eager")
    compiled(x)
    cell.k["k"] = 2.0
    torch.testing.assert_close(compiled(x)[0], by_hand(cell, x))
    type(cell).step = lambda self, x, h: torch.relu(self.U(x) + self.W(h))
    torch.testing.assert_close(compiled(x)[0], by_hand(cell, x))


# ---- what a step does besides


def counting(m: Any, a: Tensor) -> Tensor:
    m.count += 1
    return a / m.count


def remembering(m: Any, a: Tensor) -> Tensor:
    m.kept.append(a.detach())
    return a


def noting(m: Any, a: Tensor) -> Tensor:
    m.notes.steps += 1
    return a * m.notes.steps


def moving(m: Any, a: Tensor) -> Tensor:
    m.mean = 0.9 * m.mean + 0.1 * a.mean()
    return a - m.mean


def hidden(m: Any, a: Tensor) -> Tensor:
    new = a if m.before is None else a + m.before
    m.before = new
    return new


def scaling(m: Any, a: Tensor) -> Tensor:
    m.k *= 2
    return a * float(m.k[0])


class Calls:
    def __init__(self) -> None:
        self.count = 0

    def __call__(self, a: Tensor) -> Tensor:
        self.count += 1
        return a / self.count


class CountingModule(nn.Module, Calls):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    forward = Calls.__call__


EFFECTS: dict[str, tuple[Callable[[Any, Tensor], Tensor], Callable[[], dict[str, Any]], str]] = {
    "a counter": (counting, lambda: {"count": 0}, "changes self.count"),
    "a history": (remembering, lambda: {"kept": []}, "changes self.kept"),
    "an object": (noting, lambda: {"notes": SimpleNamespace(steps=0)}, "changes self.notes.steps"),
    "a moving average": (moving, lambda: {"mean": nn.Buffer(torch.zeros(()))}, "changes self.mean"),
    "a state on the module": (hidden, lambda: {"before": None}, "changes self.before"),
    "an array": (scaling, lambda: {"k": np.ones(2)}, "changes self.k"),
    "Python's random numbers": (lambda m, a: a * random.random(), dict, "Python's random"),
    "numpy's random numbers": (lambda m, a: a * float(np.random.rand()), dict, "numpy.random"),
    "a generator of its own": (lambda m, a: a * m.r.random(), lambda: {"r": random.Random(0)}, "changes self.r"),
    "a callable object": (lambda m, a: m.k(a), lambda: {"k": Calls()}, "changes self.k.count"),
    "a module in a list": (lambda m, a: m.k[0](a), lambda: {"k": [CountingModule()]}, "changes self.k.count"),
    "an iterator": (lambda m, a: a / next(m.k), lambda: {"k": iter(range(1, 100))}, "self.k is an iterator"),
    "a generator of torch's": (
        lambda m, a: a * torch.rand(H, generator=m.r),
        lambda: {"r": torch.Generator().manual_seed(0)},
        "changes self.r",
    ),
    "a generator of numpy's": (
        lambda m, a: a * m.r.random(), lambda: {"r": np.random.default_rng(0)}, "changes self.r",
    ),
}  # fmt: skip


def seeded() -> None:
    random.seed(0)
    np.random.seed(0)


@pytest.mark.parametrize("name", EFFECTS)
def test_a_step_that_does_something_is_called_and_says_so(name, x, caplog):
    rule, attributes, word = EFFECTS[name]
    cell, twin = cell_of(rule, **attributes()), cell_of(rule, **attributes())
    layer = deeprnn.Recurrent(cell)
    type(cell).__qualname__ = f"Own with {name}"
    with caplog.at_level(logging.WARNING, logger="deeprnn"):
        for _ in range(4):
            seeded()
            found = layer(x)[0]
            seeded()
            torch.testing.assert_close(found, by_hand(twin, x))
    assert any(word in r.getMessage() for r in caplog.records), caplog.text


def test_reading_a_step_leaves_no_trace(x):
    """Neither in what it changes, nor in the random numbers of others."""
    cell = cell_of(remembering, kept=[])
    seeded()
    state, arrays = random.getstate(), np.random.get_state()[1].copy()
    deeprnn.Recurrent(cell)(x)
    assert len(cell.kept) == T
    assert all(type(h) is Tensor and h.shape == (B, H) for h in cell.kept)
    drawing = cell_of(lambda m, a: a * random.random() * np.random.rand() if a.requires_grad else a)
    with torch.no_grad():
        deeprnn.Recurrent(drawing)(x)
    assert random.getstate() == state
    assert np.array_equal(np.random.get_state()[1], arrays)


def counting_globally(m: Any, a: Tensor) -> Tensor:
    global CALLS
    CALLS += 1
    return a / CALLS


def counting_in_a_closure() -> tuple[Callable[[Any, Tensor], Tensor], Callable[[], int]]:
    calls = 0

    def rule(m: Any, a: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return a / calls

    return rule, lambda: calls


def counting_for_the_class(m: Any, a: Tensor) -> Tensor:
    type(m).calls += 1
    return a / type(m).calls


CLOSURE, calls_in_the_closure = counting_in_a_closure()
OUTSIDE: dict[str, tuple[Callable[[Any, Tensor], Tensor], Callable[[Any], int], str]] = {
    "a global list": (lambda m, a: (SEEN.append(a.detach()), a)[1], lambda m: len(SEEN), "the global SEEN"),
    "a global number": (counting_globally, lambda m: CALLS, "the global CALLS"),
    "a variable of a closure": (CLOSURE, lambda m: calls_in_the_closure(), "calls of a closure"),
    "the class": (counting_for_the_class, lambda m: type(m).calls, "Own.calls"),
}


@pytest.mark.parametrize("name", OUTSIDE)
def test_what_a_step_does_outside_its_cell_is_done_once_a_step(name, x):
    rule, count, word = OUTSIDE[name]
    cell = cell_of(rule)
    type(cell).calls = 0
    before = count(cell)
    layer = deeprnn.Recurrent(cell)
    assert word in layer.explain()
    assert count(cell) == before  # reading it has left no trace
    for _ in range(3):
        layer(x)
    assert count(cell) == before + 3 * T
    assert all(type(a) is Tensor and a.shape == (B, H) for a in SEEN)


def test_a_step_that_prints_is_called(x, capsys):
    def printing(m: Any, a: Tensor) -> Tensor:
        print("mean", a.shape)
        return a

    layer = deeprnn.Recurrent(cell_of(printing))
    assert "calls print" in layer.explain()
    layer(x)
    assert capsys.readouterr().out == f"mean {torch.Size([B, H])}\n" * T


WRONG: dict[str, Callable[[Any, Tensor], Any]] = {
    "too many units": lambda m, a: torch.cat([a, a], 1),
    "one unit": lambda m, a: a[:, :1],
    "two states": lambda m, a: (a, a),
    "a dictionary": lambda m, a: {"h": a},
    "nothing": lambda m, a: None,
    "a number": lambda m, a: 1.0,
    "another dimension": lambda m, a: a[:, None],
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_no_new_state_is_refused(name, x):
    layer = deeprnn.Recurrent(cell_of(WRONG[name]))
    with pytest.raises(deeprnn.UserError, match=r"must return its 1 new state\(s\), \(B, n\) with n = 4"):
        layer(x)


def test_a_complex_state_is_refused(x):
    layer = deeprnn.Recurrent(cell_of(lambda m, a: torch.complex(a, a)))
    with pytest.raises(deeprnn.UserError, match="returns a complex state, and states are real"):
        layer(x)


def test_a_step_that_takes_its_states_as_one_argument_is_refused():
    class Packed(deeprnn.Cell):
        def __init__(self):
            super().__init__()
            self.input_size, self.state_sizes = I, (H, H)
            self.c = nn.LSTMCell(I, H)

        def step(self, x, state):
            return self.c(x, state)

    told = r"Packed.step\(x, state\) does not fit its 2 state\(s\) of 4, 4 units: .* step\(self, x, h1, h2\)"
    with pytest.raises(deeprnn.UserError, match=told):
        deeprnn.Recurrent(Packed())


def test_something_computed_at_the_first_call_is_fused_from_the_second(x):
    def cached(m: Any, a: Tensor) -> Tensor:
        if m.mask is None:
            m.mask = torch.arange(H) < 2
        return a * m.mask

    cell = cell_of(cached, mask=None)
    layer = deeprnn.Recurrent(cell)
    first, second = layer(x)[0], layer(x)[0]
    torch.testing.assert_close(first, second)
    assert not plans.plan_of(cell, plans.PlanRequest(torch.float32, torch.float32, "cpu")).reason


@pytest.mark.filterwarnings("ignore")
def test_quantized_products_are_called(x):
    cell = cell_of(lambda m, a: a)
    quantized = torch.ao.quantization.quantize_dynamic(deeprnn.Recurrent(cell), {nn.Linear})
    torch.testing.assert_close(quantized(x)[0], by_hand(quantized.cells[0], x))
    torch.testing.assert_close(quantized(x)[0], by_hand(cell, x), rtol=0, atol=0.05)


def test_an_attribute_that_changes_at_every_call_is_named(x, caplog):
    cell = cell_of(lambda m, a: a * m.temperature, temperature=1.0)
    type(cell).__qualname__ = "Annealed"
    request = plans.PlanRequest(torch.float32, torch.float32, "cpu")
    with caplog.at_level(logging.WARNING, logger="deeprnn"):
        for _ in range(plans.MOST_PLANS + 1):
            cell.temperature *= 0.99
            plans.plan_of(cell, request)
    assert "self.temperature" in caplog.text
    assert "register_buffer" in caplog.text
    assert len(plans._by_cell[cell].entries) <= plans.MOST_PLANS


def scaled_by(cell: Base) -> Callable[[Tensor], Tensor]:
    return lambda a: a * cell.k


def test_an_output_that_is_a_module_is_called(x):
    cell = cell_of(lambda m, a: a, output=nn.Linear(H, 7))
    y, h = deeprnn.Recurrent(cell)(x)
    torch.testing.assert_close(y, cell.output(by_hand(cell, x)))
    assert h.shape == (1, B, H)


@pytest.mark.parametrize("name", ["sizes", "initial_state", "step"])
def test_a_method_cannot_be_hidden_by_an_attribute(name):
    with pytest.raises(deeprnn.UserError, match=rf"self\.{name} is a method of deeprnn\.Cell"):
        cell_of(lambda m, a: a, **{name: nn.Parameter(torch.zeros(H))})


def test_what_is_known_of_a_cell_does_not_keep_it_alive(x):
    cell = cell_of(lambda m, a: m.act(m.same(a)), k=2.0)
    cell.act, cell.same, cell.me = scaled_by(cell), cell.twice, {"me": cell}
    layer = deeprnn.Recurrent(cell)
    layer(x)
    key = plans.plan_of(cell, plans.PlanRequest(torch.float32, torch.float32, "cpu")).key
    gone = weakref.ref(cell)
    assert key in plans.PLANS
    del cell, layer
    gc.collect()
    assert gone() is None
    assert key not in plans.PLANS
