"""The CPU backend beyond the grid: bits, functions one by one, transformations, threads, the cache, empty calls."""

from __future__ import annotations

import inspect
import logging
import math
import threading

import pytest
import torch
from torch.func import functional_call, vmap
from torch.nn import functional

from deeprnn.backends import cpu, plain
from deeprnn.backends.call import Case, Inputs
from deeprnn.backends.choose import why_not
from deeprnn.backends.unrolling import unroll
from deeprnn.cells.deep_transition import DeepTransition
from deeprnn.cells.description import CellDescription, Output, Preactivation, Rows, Stage
from deeprnn.cells.expressions import apply, leaf
from deeprnn.cells.functions import FUNCTIONS
from tests.backends import cells_by_hand, grid
from tests.backends.random_cells import Shape, cast, random_cell, random_inputs

DTS = DeepTransition((20, 33), ("tanh", "sigmoid"), (False, True)).cell
LSTM = cells_by_hand.lstm(33)
BOTH = pytest.mark.parametrize("cell", [DTS, LSTM], ids=["dts", "lstm"])


@pytest.fixture(params=["machine code", "plain"])
def path(request, monkeypatch):
    if request.param == "plain":
        monkeypatch.setattr(cpu, "PATH", "plain")
    else:
        pytest.importorskip("llvmlite")
    return request.param


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def inputs_for(cell, T=6, B=3, P=None, reset=False, dtype=torch.float32, seed=0) -> Inputs:
    return cast(random_inputs(cell, Shape(T, B, P, reset), seed), dtype)


def results(cell, inputs: Inputs) -> list[torch.Tensor]:
    """Outputs, delta and the gradients of the first states, straight from the backend."""
    case = Case(cell, torch.device("cpu"), inputs.states[0].dtype)
    stored = cpu.BACKEND.forward(case, inputs, keep=True)
    gradients = [x.sin() for x in stored[: len(cell.outputs)]]
    found = cpu.BACKEND.backward(case, gradients, stored, inputs._replace(A=None))
    return [*stored, found.delta, *found.states]


def rows_of(inputs: Inputs, rows: slice) -> Inputs:
    """Part of a batch."""
    assert inputs.A is not None
    reset = None if inputs.reset is None else inputs.reset[:, rows]
    return inputs._replace(A=inputs.A[:, rows], states=[x[rows] for x in inputs.states], reset=reset)


# ---- bits do not depend on company


@BOTH
def test_a_member_has_the_bits_it_has_alone(cell, path):
    inputs = inputs_for(cell, P=4)
    together = results(cell, inputs)
    for p in range(4):
        # Tensors of its own, as a model alone has: some processors' products round by where their operands begin.
        own = Inputs.of(cell, [x.clone() for x in inputs.member(p).tensors])
        alone = results(cell, own)
        assert all(torch.equal(x[p], y) for x, y in zip(together, alone, strict=True))


@BOTH
def test_a_row_has_the_bits_it_has_in_another_batch(cell):
    pytest.importorskip("llvmlite")
    inputs = inputs_for(cell, B=11, reset=True)
    whole, part = unroll(cell, inputs), unroll(cell, rows_of(inputs, slice(4, 6)))
    assert all(torch.equal(x[:, 4:6], y) for x, y in zip(whole, part, strict=True))


@BOTH
@pytest.mark.parametrize("B", [1, 12, 40])
def test_threads_and_the_way_they_share_change_no_bit(cell, B, monkeypatch, threads):
    pytest.importorskip("llvmlite")
    from deeprnn.backends.cpu.jit import sharing

    monkeypatch.setattr(sharing, "WORK_PER_THREAD", 1)
    inputs = inputs_for(cell, T=5, B=B, reset=True)
    found = []
    for count, rows_from, choice in ((1, 0, 0), (2, 0, 0), (2, 10**9, 0), (2, 10**9, -1), (3, 10**9, 0)):
        threads(count)
        monkeypatch.setattr(sharing, "ROWS_PER_THREAD", rows_from)
        monkeypatch.setattr(sharing.MeasuredChoice, "pick", lambda self, ways, choice=choice: ways[choice])
        found.append(results(cell, inputs))
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


def test_a_short_call_reads_weights_as_they_are_with_the_same_bits(monkeypatch):
    pytest.importorskip("llvmlite")
    from deeprnn.backends.cpu.jit import sharing

    inputs = inputs_for(LSTM, T=1, B=2)
    unpacked = unroll(LSTM, inputs)
    monkeypatch.setattr(sharing, "UNPACKED_PASSES", 0)
    assert all(torch.equal(x, y) for x, y in zip(unpacked, unroll(LSTM, inputs), strict=True))


def test_several_threads_may_call_at_once(monkeypatch, threads):
    pytest.importorskip("llvmlite")
    from deeprnn.backends.cpu.jit import sharing

    monkeypatch.setattr(sharing, "WORK_PER_THREAD", 1)
    inputs = inputs_for(DTS, T=30, B=2)
    truth, wrong = results(DTS, inputs), []

    def work(number: int) -> None:
        torch.set_num_threads(2)
        for _ in range(5):
            if not all(torch.equal(a, b) for a, b in zip(results(DTS, inputs), truth, strict=True)):
                wrong.append(number)

    workers = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not wrong


# ---- functions one by one

POSITIVE = ("log", "sqrt", "power", "power_log", "lp")
VARIADIC = {"maximum": 3, "minimum": 3, "lp": 4}


def arity(name: str) -> int:
    """How many arguments a function takes, told by its row of the table."""
    return VARIADIC.get(name) or len(inspect.signature(FUNCTIONS[name].bounds).parameters)


def pointwise_cell(name: str, size: int) -> CellDescription:
    """One function of as many entries as it takes."""
    count = arity(name)
    entries = tuple(Preactivation((), Rows(i * size)) for i in range(count))
    out = apply(name, *(leaf("preactivation", i) for i in range(count)))
    return CellDescription((size,), (Stage(size, entries, (out,)),), (Output(0, 0),), (), count * size)


def sample(name: str, i: int, dtype: torch.dtype) -> torch.Tensor:
    """Arguments of both signs and many magnitudes, or positive ones of order one where others make no sense."""
    generator = torch.Generator().manual_seed(i)
    if name in POSITIVE or name in ("divide", "ratio"):
        x = 0.1 + 2.0 * torch.rand(301, generator=generator, dtype=torch.float64)
        return (x + 1.0 if name == "lp" and i == 0 else x).float().to(dtype)
    x = torch.randn(301, generator=generator, dtype=torch.float64)
    x = x.abs() if name == "log1p" else x
    return (x * 10.0 ** torch.linspace(-6, 1, 301, dtype=torch.float64)).float().to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_functions_value_and_slopes(name, dtype):
    """Against torch's function and its autograd in float64, at every argument."""
    cell = pointwise_cell(name, 301)
    given = [sample(name, i, dtype) for i in range(arity(name))]
    A = torch.cat(given).view(1, 1, -1).requires_grad_()
    (out,) = unroll(cell, Inputs(A, [torch.zeros(1, 301, dtype=dtype)], [], [], []), "cpu")
    (slopes,) = torch.autograd.grad(out.sum(), A)
    exact = [x.double().requires_grad_() for x in given]
    truth = FUNCTIONS[name].torch(*exact)
    truth_slopes = torch.zeros(len(exact) * 301, dtype=torch.float64)
    if truth.requires_grad:
        found = torch.autograd.grad(truth.sum(), exact, materialize_grads=True)
        truth_slopes = torch.cat(found)
    rtol, atol = (2e-6, 1e-9) if dtype == torch.float32 else (1e-14, 1e-16)
    torch.testing.assert_close(out.view(-1).double(), truth.detach(), rtol=rtol, atol=atol)
    last_digit = 2 * torch.finfo(dtype).eps  # a saturated unit's slope is a difference of numbers near one
    torch.testing.assert_close(slopes.view(-1).double(), truth_slopes, rtol=20 * rtol, atol=last_digit)


SPECIAL = [
    -math.inf,
    -1e30,
    -800.0,
    -50.0,
    -1.0,
    -1e-30,
    -0.0,
    0.0,
    1e-30,
    1e-7,
    1.0,
    50.0,
    800.0,
    1e30,
    math.inf,
    math.nan,
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])
@pytest.mark.parametrize("name", [name for name in FUNCTIONS if name not in ("power_log", "lp", "ratio")])
def test_a_function_at_the_ends_of_its_range(name, dtype):
    """Overflow, zero, infinities and NaN as torch has them."""
    count = arity(name)
    columns = torch.cartesian_prod(*[torch.tensor(SPECIAL, dtype=dtype)] * count).view(-1, count)
    n = len(columns)
    A = columns.t().reshape(1, 1, -1)
    (out,) = unroll(pointwise_cell(name, n), Inputs(A, [torch.zeros(1, n, dtype=dtype)], [], [], []), "cpu")
    truth = FUNCTIONS[name].torch(*columns.unbind(1))
    torch.testing.assert_close(out.view(-1), truth, rtol=3e-6, atol=1e-37, equal_nan=True)


# ---- what a cell does


@BOTH
def test_two_halves_equal_the_whole(cell, path):
    inputs = inputs_for(cell, T=8)
    assert inputs.A is not None
    whole = unroll(cell, inputs)
    first = unroll(cell, inputs._replace(A=inputs.A[:3]))
    states = [first[cell.outputs.index(o)][-1] for o in cell.new_states]
    second = unroll(cell, inputs._replace(A=inputs.A[3:], states=states))
    for x, a, b in zip(whole, first, second, strict=True):
        torch.testing.assert_close(torch.cat([a, b]), x)


@BOTH
def test_a_reset_row_forgets_everything_before(cell, path):
    inputs = inputs_for(cell)
    assert inputs.A is not None
    marks = torch.zeros(6, 3, dtype=torch.bool)
    marks[4, 1] = True
    marked, unmarked = unroll(cell, inputs._replace(reset=marks)), unroll(cell, inputs)
    anew = unroll(
        cell, inputs._replace(A=inputs.A[4:, 1:2], states=[x.new_zeros(1, x.shape[1]) for x in inputs.states])
    )
    for x, y, z in zip(marked, unmarked, anew, strict=True):
        torch.testing.assert_close(x[4:, 1:2], z)
        torch.testing.assert_close(x[:, [0, 2]], y[:, [0, 2]])


@BOTH
@pytest.mark.parametrize(("T", "B"), [(0, 3), (4, 0), (0, 0)])
def test_empty_sequences_and_batches(cell, path, T, B):
    inputs = inputs_for(cell, T=T, B=B)
    assert inputs.A is not None
    leaves = [inputs.A, *inputs.states, *inputs.matrices]
    for x in leaves:
        x.requires_grad_()
    outputs = unroll(cell, inputs)
    assert [x.shape for x in outputs] == [(T, B, n) for n in plain.stored_sizes(cell, False)]
    found = torch.autograd.grad(sum(x.sum() for x in outputs), leaves)  # type: ignore[arg-type]
    assert [g.shape for g in found] == [x.shape for x in leaves]
    assert all(g.abs().sum() == 0 for g in found[1:])


@pytest.mark.parametrize("unit", ["relu", "tanh", "sigmoid", "identity"])
def test_nan_is_not_hidden(unit, path):
    cell = DeepTransition((8, 8), (unit, "identity"), (False, False)).cell
    for column in (0, 8):
        inputs = inputs_for(cell, T=2, B=1)
        assert inputs.A is not None
        inputs.A[0, 0, column] = math.nan
        assert unroll(cell, inputs)[1][1].isnan().any(), f"a NaN entering at column {column} was lost"


@pytest.mark.parametrize("cell", [DTS, LSTM, cells_by_hand.gru(5)], ids=["dts", "lstm", "gru"])
def test_an_output_may_be_changed_in_place(cell, path):
    """As after `nn.RNN`: the backward pass needs the states, not what becomes of the user's tensor."""
    inputs = inputs_for(cell)
    assert inputs.A is not None
    inputs.A.requires_grad_()
    place = cell.outputs.index(cell.new_states[0])
    (expected,) = torch.autograd.grad((unroll(cell, inputs)[place] * 0.5).sin().sum(), inputs.A)
    output = unroll(cell, inputs)[place]
    output.mul_(0.5)
    (found,) = torch.autograd.grad(output.sin().sum(), inputs.A)
    assert torch.equal(found, expected)
    functional.dropout(unroll(cell, inputs)[place], inplace=True).sum().backward()


# ---- torch's transformations


def test_a_population_may_share_what_is_not_mapped(path):
    inputs = inputs_for(DTS)
    halved = [torch.stack([w, w * 0.5]) for w in inputs.matrices]
    together = vmap(lambda *W: unroll(DTS, inputs._replace(matrices=list(W))))(*halved)
    alone = unroll(DTS, inputs._replace(matrices=[w * 0.5 for w in inputs.matrices]))
    assert all(torch.equal(x[1], y) for x, y in zip(together, alone, strict=True))


def test_gradients_inside_vmap_equal_gradients_outside(path):
    inputs = inputs_for(LSTM, P=2, dtype=torch.float64)

    def loss(W, A, h, c):
        return unroll(LSTM, Inputs(A, [h, c], [W], [], []))[0].square().sum()

    A, states, (W,) = inputs.A, inputs.states, inputs.matrices
    assert A is not None
    inside = vmap(torch.func.grad(loss))(W, A, *states)
    for p in range(2):
        own = W[p].clone().requires_grad_()
        (outside,) = torch.autograd.grad(loss(own, A[p], *(x[p] for x in states)), own)
        torch.testing.assert_close(inside[p], outside)


@pytest.mark.parametrize("reset", [False, True])
@pytest.mark.parametrize("name", ["dts", "lstm", "gru-published"])
def test_second_derivatives(path, name, reset):
    cell = cells_by_hand.by_name(3)[name]
    inputs = inputs_for(cell, T=3, B=2, dtype=torch.float64, reset=reset)
    assert inputs.A is not None
    count = 1 + len(inputs.states)
    leaves = [x.requires_grad_() for x in (inputs.A, *inputs.states, *inputs.matrices)]

    def f(*x):
        return tuple(
            unroll(cell, inputs._replace(A=x[0], states=list(x[1:count]), matrices=list(x[count:])), "cpu")
        )

    assert torch.autograd.gradcheck(f, leaves)
    assert torch.autograd.gradgradcheck(f, leaves)


def test_it_works_inside_torch_compile(path):
    inputs = inputs_for(LSTM, dtype=torch.float64)
    assert inputs.A is not None
    leaves = [inputs.A.requires_grad_(), inputs.matrices[0].requires_grad_()]

    def step(A, W):
        outputs = unroll(LSTM.text, inputs._replace(A=A * 2, matrices=[W]), "cpu")
        return outputs[0].sin() + outputs[1].sum()

    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    found = torch.autograd.grad(compiled(*leaves).sum(), leaves)
    for got, want in zip(found, torch.autograd.grad(step(*leaves).sum(), leaves), strict=True):
        torch.testing.assert_close(got, want)


def test_a_module_in_a_population(path):
    """The way training uses it: vmap over functional_call, autograd outside."""
    cell = cells_by_hand.by_name(5)["rnn"]

    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.w = torch.nn.Parameter(torch.randn(5, 5) * 0.3)

        def forward(self, a):
            return unroll(cell, Inputs(a, [a.new_zeros(a.shape[1], 5)], [self.w], [], []), "cpu")[0]

    layers = [Layer() for _ in range(3)]
    stacked = {"w": torch.stack([layer.w.detach() for layer in layers]).requires_grad_()}
    a = torch.randn(4, 2, 5)
    vmap(lambda p: functional_call(layers[0], p, (a,)).square().sum())(stacked).sum().backward()
    for p, layer in enumerate(layers):
        layer(a).square().sum().backward()
        assert torch.equal(stacked["w"].grad[p], layer.w.grad)  # type: ignore[index,arg-type]


# ---- processors, compiled code, choices


@pytest.mark.parametrize(("vector_bytes", "registers"), [(32, 16), (16, 32)])
def test_processors_with_narrower_vectors(vector_bytes, registers, monkeypatch):
    """AVX2 and NEON shapes of the same programs; this processor may be wider, the code runs all the same."""
    pytest.importorskip("llvmlite")
    from deeprnn.backends.cpu.jit import machine, run

    if vector_bytes > machine.machine().vector_bytes:
        pytest.skip("this processor has no vectors so wide")
    narrow = machine.Machine(vector_bytes, registers)
    for name in ("forward_program", "backward_program"):  # plans are made anew
        monkeypatch.setattr(run, name, getattr(run, name).__wrapped__)
    monkeypatch.setattr(machine, "machine", lambda: narrow)
    for case in [*grid.cases()[7::67], *grid.cases_of(cells_by_hand.by_name())[1::4]]:
        grid.examine(lambda cell, inputs, precision: unroll(cell, inputs, "cpu", precision), case)


def test_compiled_code_is_found_again_and_damage_is_noticed(monkeypatch, tmp_path):
    pytest.importorskip("llvmlite")
    from deeprnn.backends.cpu.jit import machine, run

    monkeypatch.setenv("DEEPRNN_CACHE", str(tmp_path))
    compiled, compile_text = [], machine.compiled
    monkeypatch.setattr(machine, "compiled", lambda text: compiled.append(1) or compile_text(text))
    for name in ("forward_program", "backward_program"):
        monkeypatch.setattr(run, name, getattr(run, name).__wrapped__)
    inputs = inputs_for(LSTM)

    def in_a_new_process() -> tuple[int, list[torch.Tensor]]:
        monkeypatch.setattr(machine, "_ADDRESSES", {})
        compiled.clear()
        found = results(LSTM, inputs)
        return len(compiled), found

    count, first = in_a_new_process()
    files = sorted((tmp_path / "kernels").iterdir())
    assert count == len(files) > 0
    count, again = in_a_new_process()
    assert count == 0
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    files[0].write_bytes(files[0].read_bytes()[:-1])
    assert in_a_new_process()[0] == 1


def test_stages_that_compute_the_same_share_their_code(monkeypatch, tmp_path):
    """A deep cell costs no more to compile than a shallow one."""
    pytest.importorskip("llvmlite")
    monkeypatch.setenv("DEEPRNN_CACHE", str(tmp_path))

    def files(depth: int) -> int:
        results(cells_by_hand.highway(19, depth), inputs_for(cells_by_hand.highway(19, depth), B=1))
        return len(list((tmp_path / "kernels").glob("*pointwise*")))

    files(4)
    assert files(9) == files(4)


def test_without_llvmlite_the_log_says_what_serves(monkeypatch, caplog):
    monkeypatch.setattr(cpu, "why_not_llvm", lambda: "faster with llvmlite: pip install 'deeprnn[fastcpu]'")
    cpu._log_once.cache_clear()
    with caplog.at_level(logging.INFO, logger="deeprnn"):
        inputs = inputs_for(DTS)
        for _ in range(2):
            found = results(DTS, inputs)
    assert caplog.text.count("fastcpu") == 1
    assert "fastcpu" in cpu.BACKEND.describe(Case(DTS, torch.device("cpu"), torch.float32), 1)
    monkeypatch.undo()
    for got, want in zip(found, results(DTS, inputs), strict=True):
        torch.testing.assert_close(got, want)


def test_a_cell_of_many_weights_is_served_by_plain_calls(monkeypatch, caplog):
    pytest.importorskip("llvmlite")
    inputs = inputs_for(DTS)
    fast = results(DTS, inputs)
    monkeypatch.setattr(cpu, "MOST_WEIGHTS", 1000)
    with caplog.at_level(logging.INFO, logger="deeprnn"):
        plainly = results(DTS, inputs)
    assert "2,409 weights, more than 1,000" in caplog.text
    for a, b in zip(fast, plainly, strict=True):
        torch.testing.assert_close(a, b)


def test_a_processor_llvm_does_not_know_is_served_by_plain_calls(monkeypatch):
    pytest.importorskip("llvmlite")
    from deeprnn.backends.cpu.jit import machine

    def refuse(*arguments):
        raise RuntimeError("unknown target")

    monkeypatch.setattr(machine, "address", refuse)
    machine.why_not.cache_clear()
    try:
        assert "unknown target" in (machine.why_not() or "")
    finally:
        monkeypatch.undo()
        machine.why_not.cache_clear()


def test_an_unknown_path_is_refused(monkeypatch):
    monkeypatch.setattr(cpu, "PATH", "fast")
    with pytest.raises(Exception, match="DEEPRNN_CPU='fast' is unknown: use one of auto, plain"):
        cpu.why_not_machine_code(DTS)


def test_reasons_for_refusing_name_the_remedy():
    def ask(device="cpu", dtype=torch.float32, precision="fp32"):
        return why_not("cpu", DTS.text, device, dtype, precision) or "served"

    assert ask() == "served"
    assert ask(dtype=torch.float64) == "served"
    assert "move them" in ask(device="cuda")
    assert ".float()" in ask(dtype=torch.bfloat16)
    assert "fp32" in ask(precision="bf16")


def test_gradients_may_be_missing_and_streams_may_be_still():
    """What is absent counts as zero; a stream without time is the same at every step."""
    cell = random_cell(3) if random_cell(3).masks else cells_by_hand.leaky(9)
    inputs = inputs_for(cell, seed=4)
    still = inputs._replace(masks=[x[0] if x.dim() == 3 else x for x in inputs.masks])
    moving = still._replace(masks=[x.expand(6, *x.shape) for x in still.masks])
    for a, b in zip(results(cell, still), results(cell, moving), strict=True):
        assert torch.equal(a, b)
    case = Case(LSTM, torch.device("cpu"), torch.float32)
    own = inputs_for(LSTM)
    stored = cpu.BACKEND.forward(case, own, keep=True)
    given = [stored[0].sin(), None]
    zeros = [stored[0].sin(), torch.zeros_like(stored[1])]
    one, other = (cpu.BACKEND.backward(case, g, stored, own._replace(A=None)) for g in (given, zeros))
    assert torch.equal(one.delta, other.delta)
