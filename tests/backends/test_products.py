"""Weight gradients in fp16 parts: what serves and in which chunks anywhere, the products themselves on a GPU."""

from __future__ import annotations

from contextlib import nullcontext
from functools import lru_cache
from typing import Any

import pytest
import torch

from deeprnn.backends import gradients
from deeprnn.backends.cuda import planning, products
from tests.backends.hopper_emulation import needs_half
from tests.backends.small_emulation import EMULATED, Small

GPU = pytest.mark.gpu
SIZES, SHORTCUTS = (136, 64, 200), (False, True, False)


def draw(steps: int, batch: int, members: int = 0, device: str = "cuda", reset: bool = True) -> Any:
    """dA, h, z, h0, reset of a transition with three layers; columns of very different size."""
    lead = (members,) if members else ()
    total, hidden = sum(SIZES), SIZES[-1]
    scale = 10.0 ** torch.randint(-6, 6, (total,), device=device)
    dA = torch.randn(*lead, steps, batch, total, device=device) * scale
    h, z = (torch.rand(*lead, steps, batch, n, device=device) for n in (hidden, total - hidden))
    h0 = torch.randn(*lead, batch, hidden, device=device)
    marks = torch.rand(steps, batch, device=device) < 0.2
    return [dA, h, z, h0, marks if reset else None]


def worst_row(found, expected) -> float:
    """Largest relative error of any row of any gradient: rows differ by twelve orders of magnitude."""
    pairs = [(x, y) for a, b in zip(found, expected, strict=True) for x, y in zip(a, b, strict=True)]
    return max(float(((x.double() - y).norm(dim=-1) / y.norm(dim=-1)).max()) for x, y in pairs)


@pytest.mark.parametrize("rows", [1, 15, 200, 512, 513, 3200, 50944, 51200])
def test_chunks_cover_all_rows_and_waste_few(rows):
    count, each = products.chunks(rows)
    assert count * each >= rows
    assert each <= products.CHUNK
    assert each % 16 == 0
    assert count * each - rows < 16 * count


def test_only_large_products_without_a_gradient_on_a_gpu_are_taken_over(monkeypatch):
    dA, h, z, h0, _ = draw(40, 32, device="cpu")
    assert not products.serves(dA, h, z, h0, SIZES)
    dA, h, z, h0 = (x.to("meta") for x in (dA, h, z, h0))
    monkeypatch.setattr(products, "DEVICE", "meta")
    monkeypatch.setattr(products, "able", lambda device: True)
    assert products.serves(dA, h, z, h0, SIZES)
    assert not products.serves(dA[:2], h[:2], z[:2], h0, SIZES)
    assert not products.serves(dA, h, z, h0, (137, 63, 200))
    assert not products.serves(*(x.double() for x in (dA, h, z, h0)), sizes=SIZES)
    dA.requires_grad_()
    assert not products.serves(dA, h, z, h0, SIZES)
    with torch.no_grad():
        assert products.serves(dA, h, z, h0, SIZES)


def test_products_whose_partial_sums_would_fill_the_card_are_left_to_torch(monkeypatch):
    monkeypatch.setattr(products, "DEVICE", "meta")
    monkeypatch.setattr(products, "able", lambda device: True)
    for hidden, serves in ((1024, True), (8192, False)):
        shapes = (200, 256, hidden), (200, 256, hidden), (200, 256, 0), (256, hidden)
        assert products.serves(*(torch.empty(s, device="meta") for s in shapes), sizes=(hidden,)) == serves


def test_operands_begin_where_a_kernel_may_read_four_numbers_at_once():
    flat = torch.arange(65.0)
    apart = flat[1:].view(8, 8)
    assert apart.data_ptr() % 16 != 0
    found = products._ready(apart)
    assert found.data_ptr() % 16 == 0
    assert torch.equal(found, apart)
    assert products._ready(flat) is flat


@pytest.mark.parametrize("members", [0, 3])
def test_the_operator_promises_the_shapes_of_the_plain_products(members):
    args = draw(5, 2, members, "cpu")
    runs = gradients.runs_of(SHORTCUTS)
    plain = gradients._products(*args, sizes=SIZES, runs=runs)
    bounds = [bound for run in runs for bound in (run[0], run[-1] + 1)]
    meta = [x.to("meta") for x in args]
    promised = products.weight_products(*meta, list(SIZES), bounds)
    assert [x.shape for x in promised] == [x.shape for x in plain]


@pytest.fixture
def emulated(monkeypatch, tmp_path):
    """The kernels compiled for the CPU; the tensor cores' products by float64, which is exact for them."""

    def product(a, b, out_dtype):
        assert a.dtype == b.dtype == torch.float16
        return (a.double() @ b.double()).to(out_dtype)

    needs_half()
    kernel = lru_cache(lambda name, device: Small(tmp_path, "products.cu", name))
    monkeypatch.setattr(products, "_kernel", kernel)
    monkeypatch.setattr(products, "device_of", lambda index: planning.Device())
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    for name in ("mm", "bmm"):
        monkeypatch.setattr(torch, name, product)


@EMULATED
@pytest.mark.parametrize(
    ("steps", "batch", "members", "reset"), [(70, 9, 0, True), (31, 5, 2, True), (9, 4, 0, False)]
)
def test_the_emulated_kernels(steps, batch, members, reset, emulated):
    args = draw(steps, batch, members, "cpu", reset)
    if members:
        args[4] = torch.rand(members, steps, batch) < 0.3
    runs = gradients.runs_of(SHORTCUTS)
    bounds = [bound for run in runs for bound in (run[0], run[-1] + 1)]
    found = products._weight_products(*args, sizes=SIZES, runs=bounds)
    wide = [x.double() if i < 4 else x for i, x in enumerate(args)]
    assert worst_row([found], [gradients._products(*wide, sizes=SIZES, runs=runs)]) < 1e-6


@GPU
@pytest.mark.parametrize(("steps", "batch", "members"), [(40, 32, 0), (70, 33, 0), (40, 30, 3), (200, 64, 0)])
@pytest.mark.parametrize("reset", [False, True])
def test_gradients_are_as_accurate_as_fp32_row_by_row(steps, batch, members, reset):
    args = draw(steps, batch, members, reset=reset)
    assert products.serves(*args[:4], sizes=SIZES)
    found = gradients.weight_gradients(*args, sizes=SIZES, shortcuts=SHORTCUTS)
    wide = [x.double() if i < 4 else x for i, x in enumerate(args)]
    expected = gradients.weight_gradients(*wide, sizes=SIZES, shortcuts=SHORTCUTS)
    assert worst_row(found, expected) < 2e-6


@GPU
def test_a_first_state_that_is_part_of_something_longer():
    args = draw(40, 32)
    flat = torch.randn(32 * SIZES[-1] + 1, device="cuda")
    args[3] = flat[1:].view(32, SIZES[-1])
    found = gradients.weight_gradients(*args, sizes=SIZES, shortcuts=SHORTCUTS)
    wide = [x.double() if i < 4 else x for i, x in enumerate(args)]
    assert worst_row(found, gradients.weight_gradients(*wide, sizes=SIZES, shortcuts=SHORTCUTS)) < 2e-6


@GPU
def test_reset_marks_of_each_member():
    args = draw(40, 32, 3)
    args[4] = torch.rand(3, 40, 32, device="cuda") < 0.3
    found = gradients.weight_gradients(*args, sizes=SIZES, shortcuts=SHORTCUTS)
    for p in range(3):
        alone = gradients.weight_gradients(*(x[p] for x in args), sizes=SIZES, shortcuts=SHORTCUTS)
        for a, b in zip(found, alone, strict=True):
            for x, y in zip(a, b, strict=True):
                torch.testing.assert_close(x[p], y, rtol=1e-4, atol=1e-5 * float(y.abs().max()))


@GPU
def test_zeros_infinities_and_nan_come_out_as_in_fp32(monkeypatch):
    args = draw(40, 32)
    dA, _, z, _, _ = args
    dA[..., 5] = 0
    dA[3, 2, 7], dA[3, 2, 150], z[1, 1, 11] = float("inf"), float("nan"), float("-inf")
    dA[..., 20] *= 1e-38
    found = gradients.weight_gradients(*args, sizes=SIZES, shortcuts=SHORTCUTS)
    monkeypatch.setattr(products, "FEWEST_ROWS", 10**9)
    plain = gradients.weight_gradients(*args, sizes=SIZES, shortcuts=SHORTCUTS)
    for a, b in zip(found, plain, strict=True):
        for x, y in zip(a, b, strict=True):
            assert torch.equal(x.isfinite(), y.isfinite())
    assert not found[0][0][5].any()


@GPU
def test_a_second_derivative_takes_the_plain_products():
    args = draw(40, 32)
    args[0].requires_grad_()
    (dW, *_), _ = gradients.weight_gradients(*args, sizes=SIZES, shortcuts=SHORTCUTS)
    assert torch.autograd.grad(dW.sum(), args[0])[0].any()
