"""A layer's whole call by machine code: the input's product in the loop, and sums over all rows where they belong."""

import threading
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("llvmlite")

import deeprnn
from deeprnn.backends import direct
from deeprnn.backends.cpu.jit import layer as layer_module
from deeprnn.backends.cpu.jit import machine, run, sharing, weight_sums
from deeprnn.backends.cpu.jit.lowering import InputProjectionShape
from deeprnn.backends.cpu.jit.weight_sums import WeightSums, serves
from deeprnn.backends.wiring import ParameterSlice, Wiring
from deeprnn.bench.cells import Paced
from deeprnn.cells.deep_transition import DeepTransition

LAYERS: dict[str, Any] = {
    "rnn": lambda: deeprnn.DeepRNN(5, 7),
    "without bias": lambda: deeprnn.DeepRNN(5, 7, bias=False),
    "dts": lambda: deeprnn.DeepRNN(5, 20, intermediate_sizes=19, shortcut="last", input_to="all"),
    "gru": lambda: deeprnn.GRU(5, 18),
    "lstm": lambda: deeprnn.LSTM(5, 33),
    "own step": lambda: deeprnn.Recurrent(Paced(5, 17)),
}
EACH = pytest.mark.parametrize("name", LAYERS)


@pytest.fixture(autouse=True)
def forgetful():
    """No call is known from another test; numbers are the same in every run, for bounds are close to results."""
    direct._calls.clear()
    direct._seen_once.clear()
    torch.manual_seed(0)


NEVER_IN_LOOP = -(2**60)


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.fixture(params=[True, False], ids=["product in the loop", "product before the loop"])
def entering(request, monkeypatch):
    """Both ways of an input."""
    monkeypatch.setattr(layer_module, "SAVED_BY_PRODUCT", NEVER_IN_LOOP)
    monkeypatch.setattr(layer_module, "ROWS_IN_LOOP", 1 if request.param else 1000)


def results(layer: Any, x, *rest):
    """Output, last states, and the gradients of everything that has one."""
    y, state = layer(x, *rest)
    states = state if isinstance(state, tuple) else (state,)
    wanted = [p for p in (x, *layer.parameters()) if p.requires_grad]
    loss = (y * torch.linspace(-1, 1, y.numel()).view_as(y)).sum() + sum(h.sin().sum() for h in states)
    return [y, *states, *torch.autograd.grad(loss, wanted)]


def assert_close(found, truth):
    for a, b in zip(found, truth, strict=True):
        assert float((a.double() - b.double()).norm() / b.double().norm()) < 2e-6


@EACH
def test_it_is_the_reference(name, entering):
    layer, x = LAYERS[name](), torch.randn(9, 11, 5, requires_grad=True)
    truth = LAYERS[name]()
    truth.load_state_dict(layer.state_dict())
    truth.double().backend = "reference"
    expected = results(truth, x.detach().double().requires_grad_())
    for _ in range(3):  # the general path, then the direct one
        assert_close([r.detach() for r in results(layer, x)], [r.detach() for r in expected])
    in_double = results(layer.double(), x.detach().double().requires_grad_())
    assert_close([r.detach() for r in in_double], [r.detach() for r in expected])


@EACH
def test_the_direct_way_has_the_bits_of_the_ordinary_one(name, entering):
    """A process that goes on where another stopped has other first calls."""
    layer, x = LAYERS[name](), torch.randn(6, 3, 5)
    first, second = results(layer, x), results(layer, x)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    with torch.no_grad():
        assert all(torch.equal(layer(x)[0], first[0]) for _ in range(2))
    assert layer(x)[0].grad_fn.name() == "DirectUnrollBackward"


@EACH
@pytest.mark.parametrize("saved", [NEVER_IN_LOOP, -NEVER_IN_LOOP])
def test_a_row_has_the_bits_it_has_in_another_batch(name, saved, monkeypatch):
    """Where the input's product is computed depends on the batch, too."""
    monkeypatch.setattr(layer_module, "SAVED_BY_PRODUCT", saved)
    layer, x = LAYERS[name](), torch.randn(4, 13, 5)
    with torch.no_grad():
        for rows in (slice(5, 8), slice(12, 13), slice(0, 8)):
            assert torch.equal(layer(x)[0][:, rows], layer(x[:, rows].contiguous())[0])


@EACH
def test_threads_change_no_bit(name, entering, threads, monkeypatch):
    monkeypatch.setattr(sharing, "WORK_PER_THREAD", 1)
    layer, x = LAYERS[name](), torch.randn(150, 5, 5)
    found = []
    for count in (1, 2, 3):
        threads(count)
        found.append(results(layer, x))
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


def test_an_output_may_be_changed_in_place():
    layer, x = LAYERS["lstm"](), torch.randn(4, 2, 5)
    for _ in range(2):  # the general path, then the direct one
        found, expected = [], []
        for changes, gradients in ((False, expected), (True, found)):
            y, (h, c) = layer(x)
            loss = (y * 2).sum() + h.mul(3).sum() + c.sum()
            if changes:
                for result in (y, h, c):
                    result.zero_()
            gradients += torch.autograd.grad(loss, list(layer.parameters()))
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("name", ["gru", "lstm", "own step"])
def test_marked_rows_begin_anew(name, entering):
    layer, truth, x = LAYERS[name](), LAYERS[name](), torch.randn(9, 11, 5)
    truth.load_state_dict(layer.state_dict())
    truth.double().backend = "reference"
    marks, g = torch.rand(9, 11) < 0.3, torch.randn_like(layer(x)[0])
    found, expected = (
        torch.autograd.grad((m(y, reset=marks)[0] * g).sum(), list(m.parameters()))
        for m, y in ((layer, x), (truth, x.double()))
    )
    assert_close(found, expected)


@pytest.mark.parametrize("B", [3, 40])
def test_first_states_left_out_are_zeros_in_every_row(B, monkeypatch):
    numbers = np.full(2**16, np.nan, dtype=np.float32)  # 300 numbers of zeros, as a row needs, then garbage
    numbers[:300] = 0.0
    kept = (1200, numbers.ctypes.data, numbers.view(np.uint8))
    monkeypatch.setattr(run, "_ZEROS", [kept])
    layer, x = deeprnn.LSTM(5, 30), torch.randn(4, B, 5)
    zeros = torch.zeros(1, B, 30)
    expected = results(layer, x, (zeros, zeros))
    for _ in range(3):
        assert all(torch.equal(a, b) for a, b in zip(results(layer, x), expected, strict=True))


def test_first_states_and_missing_gradients():
    layer: Any = LAYERS["gru"]()
    x, h = torch.randn(7, 3, 5), torch.randn(1, 3, 18, requires_grad=True)
    twin: Any = nn.GRU(5, 18)
    twin.load_state_dict(layer.state_dict())
    for _ in range(2):
        found, truth = (torch.autograd.grad(m(x, h)[1].sum(), [h, *m.parameters()]) for m in (layer, twin))
        assert_close(found, truth)
        found, truth = (
            torch.autograd.grad(m(x, h.detach())[0][2:].sum(), list(m.parameters())) for m in (layer, twin)
        )
        assert_close(found, truth)
    layer.weight_hh_l0.requires_grad_(False)
    (d,) = torch.autograd.grad(layer(x)[0].sum(), [layer.weight_ih_l0])
    (e,) = torch.autograd.grad(twin(x)[0].sum(), [twin.weight_ih_l0])
    assert_close([d], [e])


@pytest.mark.parametrize("name", ["dts", "lstm", "own step"])
def test_second_derivatives(name):
    layer, truth, x = LAYERS[name](), LAYERS[name](), torch.randn(4, 2, 5, requires_grad=True)
    truth.load_state_dict(layer.state_dict())
    truth.backend = "reference"
    found = []
    for module in (truth, layer, layer):  # the last one directly
        (d,) = torch.autograd.grad(module(x)[0].sin().sum(), [x], create_graph=True)
        found.append(torch.autograd.grad(d.square().sum(), list(module.parameters())))
    assert_close(found[1], found[0])
    assert_close(found[2], found[0])


def test_several_threads_may_call_at_once(threads, monkeypatch):
    monkeypatch.setattr(sharing, "WORK_PER_THREAD", 1)
    layer, x = LAYERS["gru"](), torch.randn(20, 3, 5)
    expected, wrong = results(layer, x), []

    def work() -> None:
        torch.set_num_threads(2)
        for _ in range(5):
            if not all(torch.equal(a, b) for a, b in zip(results(layer, x), expected, strict=True)):
                wrong.append(1)

    workers = [threading.Thread(target=work) for _ in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not wrong


@pytest.mark.parametrize(
    ("H", "I", "T", "B"), [(1, 1, 2, 1), (8, 16, 3, 4), (50, 33, 5, 70), (17, 100, 300, 1), (300, 9, 5, 70)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sums_over_all_rows(H, I, T, B, dtype):
    cell = DeepTransition((H,), ("tanh",), (False,)).cell
    wiring = Wiring(
        cell, ((H, I), (H, H), (H,), (H,)), (0,), (1,), (ParameterSlice(2, 0, H), ParameterSlice(3, 0, H))
    )
    assert serves(wiring)
    sums = WeightSums(wiring, I, dtype)
    delta, x, y, first = (torch.randn(*s, dtype=dtype) for s in ((T, B, H), (T, B, I), (T, B, H), (B, H)))
    marks = torch.rand(T, B) < 0.3
    for reset in (None, marks):
        for state in (None, first):
            before = torch.cat([torch.zeros(1, B, H, dtype=dtype) if state is None else state[None], y[:-1]])
            before = before if reset is None else torch.where(reset.unsqueeze(-1), 0.0, before)
            d = delta.flatten(0, 1).double()
            truth = [d.T @ x.flatten(0, 1).double(), d.T @ before.flatten(0, 1).double(), d.sum(0), d.sum(0)]
            made = [torch.empty(shape, dtype=dtype) for shape in wiring.shapes]
            sums.run(
                delta.data_ptr(), x.data_ptr(), [None if state is None else state.data_ptr()], [y.data_ptr()],
                None if reset is None else reset.data_ptr(), [g.data_ptr() for g in made], T, B,
            )  # fmt: skip
            found, flat = (torch.cat([t.flatten() for t in own]) for own in (made, truth))
            assert float((found.double() - flat).norm() / flat.norm()) < (
                1e-6 if dtype == torch.float32 else 1e-14
            )


def test_parameters_in_two_places_are_left_to_other_ways():
    cell = DeepTransition((4,), ("tanh",), (False,)).cell
    assert not serves(Wiring(cell, ((4, 4),), (0,), (0,), ()))  # W is U
    assert not serves(
        Wiring(cell, ((4, 3), (4, 4), (5,)), (0,), (1,), (ParameterSlice(2, 0, 4),))
    )  # a number of b unused


def test_a_bias_that_covers_part_of_a_stage_stays_outside():
    cell = DeepTransition((4,), ("tanh",), (False,)).cell
    assert InputProjectionShape(3, (4,), ((0, 4),)).fits(cell)
    assert not InputProjectionShape(3, (4,), ((0, 2),)).fits(cell)
    assert not InputProjectionShape(3, (2, 2), ()).fits(cell)


@pytest.mark.parametrize(("vector_bytes", "registers"), [(16, 16), (16, 32), (32, 16)])
def test_narrower_vectors(vector_bytes, registers, monkeypatch):
    if vector_bytes > machine.machine().vector_bytes:
        pytest.skip("this processor has no vectors so wide")
    monkeypatch.setattr(machine, "machine", lambda: machine.Machine(vector_bytes, registers))
    test_sums_over_all_rows(50, 33, 5, 70, torch.float32)


# ---- what is settled once for a shape


@EACH
def test_calls_of_ever_new_lengths(name, monkeypatch):
    """Tables are kept for a few shapes, and all are forgotten then."""
    for module in (run, layer_module, weight_sums):
        monkeypatch.setattr(module, "MOST_CALLS", 2)
    layer, truth = LAYERS[name](), LAYERS[name]()
    truth.load_state_dict(layer.state_dict())
    truth.backend = "reference"
    for steps in (2, 3, 4, 5, 3, 2, 3):
        x = torch.randn(steps, 3, 5, requires_grad=True)
        expected = results(truth, x)
        for _ in range(3):
            assert_close(results(layer, x), expected)


@EACH
def test_first_states_come_and_go(name):
    """Calls of one shape, with states and without, with a gradient of the output, of the last state, or of both."""
    layer, x = LAYERS[name](), torch.randn(6, 3, 5)
    states = layer(x)[1]
    zeros = tuple(map(torch.zeros_like, states)) if isinstance(states, tuple) else torch.zeros_like(states)

    def gradients(given: Any, output: float, last: float) -> tuple[Tensor, ...]:
        y, state = layer(x, *given)
        loss = output * y.sum() if output else 0.0
        loss = loss + (
            last * (state[0] if isinstance(state, tuple) else state).square().sum() if last else 0.0
        )
        return torch.autograd.grad(loss, list(layer.parameters()))

    for output, last in ((1.0, 0.0), (0.0, 1.0), (1.0, 1.0), (0.0, 1.0), (1.0, 0.0)):
        found = [gradients(given, output, last) for given in ((), (zeros,), (), (zeros,))]
        for other in found[1:]:
            assert all(torch.equal(a, b) for a, b in zip(other, found[0], strict=True))


@EACH
def test_parameters_are_read_where_they_lie_now(name):
    layer, truth, x = LAYERS[name](), LAYERS[name](), torch.randn(6, 3, 5)
    truth.backend = "reference"
    for change in ("nothing", "data", "in place", "parameter"):
        for own in list(layer.parameters()):
            if change == "data":
                own.data = torch.randn_like(own) / 3
            elif change == "in place":
                own.detach().mul_(0.5)
        if change == "parameter":
            for part in layer.modules():
                for key, own in list(part._parameters.items()):
                    if own is not None:
                        setattr(part, key, torch.nn.Parameter(torch.randn_like(own) / 3))
        truth.load_state_dict(layer.state_dict())
        for _ in range(3):
            assert_close(results(layer, x), results(truth, x))


@EACH
def test_nothing_of_a_call_lies_in_the_memory_of_another(name):
    layer, x = LAYERS[name](), torch.randn(6, 3, 5)
    layer(x)
    first = results(layer, x)
    kept = [r.clone() for r in first]
    for _ in range(3):
        for r in results(layer, torch.randn(6, 3, 5)):
            r.detach().fill_(7.0)
    assert all(torch.equal(a, b) for a, b in zip(first, kept, strict=True))


def test_a_gradient_is_a_tensor_of_its_own():
    layer, x = LAYERS["gru"](), torch.randn(6, 3, 5)
    for _ in range(3):
        layer.zero_grad()
        layer(x)[0].sum().backward()
    for p in layer.parameters():
        assert p.grad.untyped_storage().nbytes() == p.numel() * p.element_size()
