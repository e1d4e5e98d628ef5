"""A layer's whole call as recorded launches: the kernels' own sources, emulated, beside torch.nn and the reference.

Recordings are replayed with other tensors than they were made with, so an address that is missed shows.
"""

from __future__ import annotations

import ctypes
import shutil
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from benchmarks.rehearsal import rehearsal
from torch import nn

import deeprnn
from deeprnn.backends import direct, registry
from deeprnn.backends.cuda import driver, input_projection
from deeprnn.backends.cuda.gemm import outer_products, row_products
from deeprnn.backends.cuda.recording import NotRecordable, Recorder
from deeprnn.backends.cuda.recurrence import launch, max_abs_scan
from deeprnn.backends.protocol import DirectBackend
from tests.backends.emulated import emulated_kernel
from tests.backends.hopper_emulation import Blocks, needs_half
from tests.backends.small_emulation import Small

T, B, I, H = 9, 3, 8, 64
LAYERS = {
    "rnn": lambda: deeprnn.DeepRNN(I, H),
    "without bias": lambda: deeprnn.DeepRNN(I, H, bias=False),
    "dts": lambda: deeprnn.DeepRNN(I, H, intermediate_sizes=72, shortcut="last", input_to="all"),
    "gru": lambda: deeprnn.GRU(I, H),
    "lstm": lambda: deeprnn.LSTM(I, H),
}  # fmt: skip


class Recordable:
    """An emulated kernel with what `driver.Kernel` has for recordings."""

    def __init__(self, kernel):
        self.kernel = kernel

    def launch(self, grid, threads, arguments, device, rows=1, stream=None):
        if driver._thread.recorder is not None:
            return driver._thread.recorder.launched(self, grid, rows, threads, arguments)
        return self.kernel.launch(grid, threads, arguments, device, rows, stream)

    def prepare_call(self, grid, rows, threads, parameters):
        def run():
            return self.kernel.launch(grid, threads, [parameters], None, rows) or 0

        return driver.PreparedCall(run, (), SimpleNamespace(), "")


class Library:
    """The driver's copies and fills, on the CPU."""

    @staticmethod
    def cuMemcpyDtoDAsync_v2(to, source, size, stream):
        ctypes.memmove(to.value, source.value, size.value)
        return 0

    @staticmethod
    def cuMemsetD32Async(to, value, count, stream):
        ctypes.memset(to.value, value.value, 4 * count.value)
        return 0


@pytest.fixture(scope="module")
def kernels():
    """Compiled once for all tests: columns or width, and what else decides."""
    if shutil.which("g++") is None:
        pytest.skip("the emulation needs g++")
    needs_half()

    @lru_cache
    def tall(columns, device):
        shared = {"split_columns": 2 * 128 * 128, "outer": outer_products.shared(columns), "collect": 0}
        source, macros = "gemm/outer_products.cu", outer_products.macros(columns)
        return [Recordable(Blocks(source, n, macros, b)) for n, b in shared.items()]

    @lru_cache
    def rows(width, inner, device):
        given = row_products.macros(width, inner), row_products.shared(width, inner)
        names = "split", "rows_times"
        return [Recordable(Blocks("gemm/short_rows.cu", name, *given)) for name in names]

    @lru_cache
    def scan(jobs, device, arch):
        return Recordable(Small("recurrence/max_abs_scan.cu", "max_abs_scan", {"JOBS": jobs}))

    return tall, rows, scan, lru_cache(lambda *given: Recordable(emulated_kernel(*given)))


@pytest.fixture
def emulated(kernels, monkeypatch):
    """Layers on the CPU as on an H200, by emulated kernels, from few rows on; gives a list of recorded calls."""
    tall, rows, scan, loop = kernels
    recorded = []
    right = direct._call_of
    monkeypatch.setattr(direct, "_call_of", lambda *given: recorded.append(right(*given)) or recorded[-1])
    with rehearsal():
        monkeypatch.setattr(driver, "library", Library)
        monkeypatch.setattr(outer_products, "kernels", tall)
        monkeypatch.setattr(outer_products, "TILES", range(64, 65))
        monkeypatch.setattr(row_products, "kernels", rows)
        monkeypatch.setattr(launch, "load_kernel", loop)
        monkeypatch.setattr(max_abs_scan, "load_kernel", scan)
        monkeypatch.setattr(input_projection, "FEWEST_ROWS", 8)
        yield recorded


def gradients_of(layer, x, states, upstream):
    """Output, last states, and all gradients."""
    y, last = layer(x) if states is None else layer(x, states)
    last = list(last) if isinstance(last, tuple) else [last]
    given = [x, *layer.parameters()] if x.requires_grad else list(layer.parameters())
    results = [y, *last]
    pairs = [(r, g) for r, g in zip(results, upstream, strict=False) if g is not None]
    found = torch.autograd.grad([r for r, _ in pairs], given, [g for _, g in pairs], retain_graph=True)
    return [*results, *found]


@pytest.mark.parametrize("name", LAYERS)
def test_a_recorded_call_is_the_layers(name, emulated):
    torch.manual_seed(0)
    layer = LAYERS[name]()
    several = name == "lstm"
    for turn in range(2):  # the second time with other tensors at other addresses
        x = torch.randn(T, B, I, requires_grad=turn == 1)
        states = None
        if turn == 1:
            states = [torch.randn(1, B, H) for _ in range(1 + several)]
            states = tuple(states) if several else states[0]
            with torch.no_grad():
                for p in layer.parameters():
                    p.copy_(torch.randn(p.shape) / 8)
        upstream = [
            torch.randn(T, B, H),
            *(torch.randn(1, B, H) if turn else None for _ in range(1 + several)),
        ]
        count = len(emulated)
        ordinary = gradients_of(layer, x, states, upstream)
        assert len(emulated) == count, "the first call of a shape is an ordinary one"
        found = gradients_of(layer, x, states, upstream)
        assert len(emulated) == count + 1
        assert emulated[-1] is not None, "the fast path was not taken"
        assert all(torch.equal(a, b) for a, b in zip(ordinary, found, strict=True))
        with torch.no_grad():
            plain = layer(x.detach(), states)[0]
        assert torch.equal(plain, found[0])
        layer.backend = "reference"
        truth = gradients_of(layer, x, states, upstream)
        layer.backend = "auto"
        for a, b in zip(found, truth, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_a_batch_first_layer_takes_the_short_way(emulated):
    layer = deeprnn.DeepRNN(I, H, batch_first=True)
    truth = nn.RNN(I, H, batch_first=True)
    truth.load_state_dict(layer.state_dict())
    x = torch.randn(B, T, I)
    for _ in range(2):
        torch.testing.assert_close(layer(x), truth(x), rtol=1e-4, atol=1e-5)
    assert emulated[-1] is not None


def test_a_parameter_without_gradient_gets_none(emulated):
    layer, x = deeprnn.DeepRNN(I, H), torch.randn(T, B, I)
    layer.bias_ih_l0.requires_grad_(False)
    layer(x)
    layer(x)[0].sum().backward()
    assert emulated[-1] is not None
    assert layer.bias_ih_l0.grad is None
    assert layer.bias_hh_l0.grad is not None
    truth = nn.RNN(I, H)
    truth.load_state_dict(layer.state_dict())
    truth(x)[0].sum().backward()
    torch.testing.assert_close(layer.weight_hh_l0.grad, truth.weight_hh_l0.grad, rtol=1e-4, atol=1e-4)


def test_the_gradient_of_a_gradient(emulated):
    layer, x = deeprnn.DeepRNN(I, H), torch.randn(T, B, I, requires_grad=True)
    penalties = []
    for backend in ("auto", "reference"):
        layer.backend = backend
        layer(x)
        (d,) = torch.autograd.grad(layer(x)[0].square().sum(), x, create_graph=True)
        penalties.append(torch.autograd.grad(d.square().sum(), [x, *layer.parameters()]))
    assert emulated[0] is not None
    for a, b in zip(*penalties, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


def test_an_output_changed_in_place_is_refused_as_elsewhere(emulated):
    layer, x = deeprnn.DeepRNN(I, H), torch.randn(T, B, I)
    layer(x)
    y = layer(x)[0]
    y.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


# ---- who takes the general path


def test_whatever_is_not_plain_takes_the_ordinary_way(emulated, monkeypatch):
    layer, x = deeprnn.DeepRNN(I, H), torch.randn(T, B, I)
    taken = []
    monkeypatch.setattr(direct, "DirectUnroll", SimpleNamespace(apply=lambda *a: taken.append(1) or [x, x]))

    def short(given_layer, *given):
        taken.clear()
        try:
            given_layer(*given)
            given_layer(*given)
        except (RuntimeError, deeprnn.errors.UserError):
            assert not taken
        return bool(taken)

    class Own(deeprnn.DeepRNN):
        pass

    assert short(layer, x)
    assert not short(layer, x[:, 0])
    assert not short(layer, x[..., :4])
    assert not short(layer, x, torch.zeros(1, B, H, requires_grad=True))
    assert not short(layer, x, torch.zeros(1, B + 1, H))
    assert not short(Own(I, H), x)
    assert not short(deeprnn.DeepRNN(I, H, num_layers=2), x)
    assert not short(deeprnn.DeepRNN(I, H, bidirectional=True), x)
    assert not short(deeprnn.DeepRNN(I, H, backend="reference"), x)
    assert not short(deeprnn.DeepRNN(I, H, intermediate_sizes=64), x)  # input to the first layer alone
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert not short(layer, x)
    layer.weight_hh_l0 = nn.Parameter(torch.randn(H, H).mT)
    assert not short(layer, x)
    layer.weight_hh_l0 = nn.Parameter(torch.randn(H, H + 1))
    assert not short(layer, x)
    normed = nn.utils.parametrizations.weight_norm(deeprnn.DeepRNN(I, H), "weight_hh_l0")
    assert not short(normed, x)


def test_a_hook_on_all_modules_takes_a_cell_the_ordinary_way(emulated):
    layer, x = deeprnn.GRU(I, H), torch.randn(T, B, I)
    assert layer._call_directly(x, None) is None
    assert layer._call_directly(x, None) is not None
    handle = nn.modules.module.register_module_forward_hook(lambda *a: None)
    try:
        assert layer._call_directly(x, None) is None
    finally:
        handle.remove()


# ---- recordings


def test_an_operation_of_torch_cannot_be_recorded():
    x: Any = Recorder(torch.device("cpu")).stand_in((2, 3))
    for operation in (lambda: torch.cat([x, x]), lambda: x.sum(), lambda: torch.zeros_like(x), lambda: x.mT):
        with pytest.raises(NotRecordable):
            operation()


def test_addresses_are_told_from_numbers(monkeypatch):
    launched = []

    class Kernel:
        def prepare_call(self, grid, rows, threads, parameters):
            return driver.PreparedCall(
                lambda: launched.append(list(parameters)) or 0, (), SimpleNamespace(), ""
            )

    monkeypatch.setattr(driver, "_raw_device", lambda: 0)
    monkeypatch.setattr(driver, "ensure_context", lambda device: None)
    recorder = Recorder(torch.device("cpu"))
    x, h = recorder.stand_in((4, 3)), recorder.stand_in((3,))
    y, kept, scratch = x.new_empty(4, 3), x.new_empty(100), x.new_empty(7)
    later = x.narrow(0, 2, 1).data_ptr()
    words = (later, 2**40, -1, h.data_ptr(), y.data_ptr(), kept.data_ptr() + 8, scratch.data_ptr(), 0)
    kernel: Any = Kernel()
    recorder.launched(kernel, 1, 1, 32, [(ctypes.c_int64 * len(words))(*words)])
    recording = recorder.finish([y], [kept])
    for base in (1000, 5000):
        recording.replay([base, base + 1, base + 2, base + 3], None)
        assert launched[-1][:6] == [base + 24, 2**40, -1, base + 1, base + 2, base + 3 + 8]
    assert (recording.workspace_bytes, recording.scratch_bytes) == (512, 512)


def test_a_table_of_tiles_is_not_taken_for_addresses():
    recorder = Recorder(torch.device("cpu"))
    x = recorder.stand_in((4, 3))
    wanted = (outer_products.SumBlock(0, 512, 0, 4096),)
    _, blank = outer_products._layout(wanted, (512,), 4096, 4096, 64, 1, 132, 0)
    job = outer_products._Job.from_buffer_copy(blank)
    job.matrices[0].x = x.data_ptr()
    kernel: Any = SimpleNamespace()
    recorder.launched(kernel, 1, 1, 32, [job])
    recording = recorder.finish([])
    assert (
        max(right for _, right in job.tile) >= 256
    )  # beside three others in a word it reaches into the topmost byte
    assert recording.addresses == [(0, 0, 0)]
    assert recording.template.tobytes() == bytes(blank)


def test_the_short_way_is_asked_for_where_a_backend_has_one():
    served = {
        device: any(isinstance(registry.load_backend(name), DirectBackend) for name in names)
        for device, names in registry.PREFERENCE.items()
    }
    assert served == {device: device in direct.DEVICES for device in registry.PREFERENCE}
