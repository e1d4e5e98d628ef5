"""The kernels of Hopper's warpgroup products: how work is cut, the sources emulated, and the real thing on a GPU."""

from __future__ import annotations

from functools import lru_cache

import pytest
import torch

from deeprnn.backends.call import Inputs
from deeprnn.backends.cuda.device import SHARED_LIMIT, Device
from deeprnn.backends.cuda.gemm import outer_products, row_products, weight_sums
from deeprnn.backends.cuda.gemm.outer_products import Left, OuterProducts, SumBlock, tiling
from deeprnn.backends.gradients import matrix_gradients, scatter_to_matrices
from deeprnn.cells.adjoint import adjoint_of
from tests.backends import cells_by_hand
from tests.backends.hopper_emulation import Blocks, needs_half

GPU = pytest.mark.gpu
DTS = (SumBlock(0, 400, 0, 800), SumBlock(400, 800, 400, 800))


# ---- how work is cut


@pytest.mark.parametrize(
    "wanted",
    [
        DTS,
        (SumBlock(0, 88, 0, 800), SumBlock(88, 89, 0, 800)),
        (
            SumBlock(0, 200, 0, 200),
            SumBlock(0, 200, 400, 600),
            SumBlock(200, 300, 203, 330),
            SumBlock(300, 431, 330, 531),
        ),
        (SumBlock(0, 65, 0, 65),),
    ],
)
@pytest.mark.parametrize("count", [130, 3200, 51200])
@pytest.mark.parametrize("members", [1, 5])
def test_every_sum_lies_in_a_tile_and_every_row_in_a_part(wanted, count, members):
    plan = tiling(wanted, count, members, 132)
    assert plan is not None
    blocks = -(-count // outer_products.ROWS)
    assert (plan.splits - 1) * plan.each < blocks <= plan.splits * plan.each
    covered = torch.zeros(1000, 1000, dtype=torch.bool)
    for m, n in plan.tiles:
        assert m % 8 == n % 8 == plan.columns % 8 == 0  # as the parts are swizzled
        covered[m : m + outer_products.WIDTH, n : n + plan.columns] = True
    for w in wanted:
        assert covered[w.left : w.left_end, w.right : w.right_end].all()


def test_the_transition_of_the_paper_keeps_every_processor_busy():
    whole = (
        SumBlock(0, 400, 0, 800),
        SumBlock(489, 889, 400, 800),
        SumBlock(400, 488, 0, 800),
        SumBlock(488, 489, 0, 800),
    )
    for wanted in (DTS, whole):
        plan = tiling(wanted, 51200, 1, 132)
        assert plan is not None
        assert len(plan.tiles) * plan.splits == 132


def test_tiles_of_a_matrix_are_even():
    for columns in (8, 64, 88, 136, 137, 400, 800, 1000):
        for widest in (row_products.WIDEST, row_products.WIDEST_SHORT):
            width = row_products.tile_width(columns, widest)
            assert width % 8 == 0
            assert width <= widest
            assert -(-columns // width) == -(-columns // widest)


def test_no_processor_has_a_round_of_rows_to_itself():
    """200 blocks of rows in four tiles of 200 columns: 66 at once, and two are left over."""
    assert row_products.short_width(800, 200, 1, 132) == 160
    assert row_products.short_width(800, 198, 1, 132) == 200
    assert row_products.short_width(136, 10, 1, 132) == 136
    assert row_products.short_width(800, 200, 30, 132) == 200  # 150 tiles of 160 columns would take two waves


def test_shared_memory_suffices_for_every_tile():
    assert all(outer_products.shared(columns) <= SHARED_LIMIT for columns in outer_products.TILES)
    assert row_products.shared(row_products.WIDEST_SHORT, row_products.MAX_RESIDENT_INNER) <= SHARED_LIMIT
    assert row_products.shared(row_products.WIDEST, 10**4) <= SHARED_LIMIT


# ---- the sources, emulated


@pytest.fixture
def emulated(monkeypatch):
    """Both modules with kernels compiled for the CPU and few processors."""
    needs_half()

    @lru_cache
    def tall_kernels(columns, device):
        shared = {"split_columns": 2 * 128 * 128, "outer": outer_products.shared(columns), "collect": 0}
        return [
            Blocks("gemm/outer_products.cu", n, outer_products.macros(columns), b) for n, b in shared.items()
        ]

    @lru_cache
    def row_kernels(width, inner, device):
        short = inner <= row_products.MAX_RESIDENT_INNER
        source, split = ("gemm/short_rows.cu", "split") if short else ("gemm/long_rows.cu", "split_matrix")
        given = row_products.macros(width, inner), row_products.shared(width, inner)
        return [Blocks(source, name, *given) for name in (split, "rows_times")]

    monkeypatch.setattr(outer_products, "kernels", tall_kernels)
    monkeypatch.setattr(row_products, "kernels", row_kernels)
    for module in (outer_products, row_products):
        monkeypatch.setattr(module, "device_of", lambda index: Device(sm_count=4))
    for cached in (tiling, outer_products._layout):
        cached.cache_clear()
    yield
    for cached in (tiling, outer_products._layout):
        cached.cache_clear()


def previous(h, first, marks):
    """States as each step saw them."""
    seen = torch.cat([first.unsqueeze(-3), h[..., :-1, :, :]], -3)
    return seen if marks is None else seen.masked_fill(marks.unsqueeze(-1), 0)


def outer_sums(left, right, marks, wanted):
    sums = OuterProducts(left, right.shape[-1], marks, wanted)
    sums.split_left()
    return sums.finish(right)


def sums_and_truth(steps, batch, members, width, right, reset, device="cpu"):
    """What `OuterProducts` finds and the same in float64: previous states, inputs, ones; columns of every size."""
    scale = 10.0 ** torch.randint(-6, 6, (right,), device=device)
    d = torch.randn(members, steps, batch, right, device=device) * scale
    d[..., 3] = 0
    d[:, : steps // 2, :, 4] = 0
    d[:, steps // 2 :, :, 5:8] *= 1e6
    h, x = (torch.rand(members, steps, batch, n, device=device) for n in (width, 7))
    h0 = torch.randn(members, batch, width, device=device)
    marks = torch.rand(members, steps, batch, device=device) < 0.2 if reset else None
    wanted = (
        SumBlock(0, width, 0, right),
        SumBlock(width, width + 7, 8, right),
        SumBlock(width + 7, width + 8, 0, right),
    )
    found = outer_sums([Left(h, h0), Left(x), Left(None)], d, marks, wanted)
    before = previous(h, h0, marks).double()
    sides = (before, x.double(), torch.ones_like(x[..., :1]).double())
    truth, sizes = [], []
    for w, side in zip(wanted, sides, strict=True):
        own = d[..., w.right : w.right_end].double().flatten(1, 2).mT
        truth.append(own @ side.flatten(1, 2))
        sizes.append(own.abs() @ side.flatten(1, 2).abs())
    return found, truth, sizes


@pytest.mark.parametrize(("columns", "right", "reset"), [(168, 171, True), (64, 100, False)])
def test_emulated_sums_over_rows(columns, right, reset, emulated, monkeypatch):
    monkeypatch.setattr(outer_products, "TILES", range(columns, columns + 1))
    found, truth, sizes = sums_and_truth(13, 11, 1 if reset else 2, 20, right, reset)
    for f, t, s in zip(found, truth, sizes, strict=True):
        assert float(((f - t).abs() / s.clamp_min(1e-30)).max()) < 3e-7


def test_emulated_sums_are_added_to_those_of_another_chunk(emulated):
    h, d, h0 = torch.rand(1, 20, 9, 20), torch.randn(1, 20, 9, 70), torch.randn(1, 9, 20)
    wanted = [SumBlock(0, 20, 0, 70)]
    later = OuterProducts([Left(h[:, 8:], h[:, 7])], 70, None, wanted, free_processors=3)
    earlier = OuterProducts([Left(h[:, :8], h0)], 70, None, wanted, onto=later)
    for sums in (later, earlier):
        sums.split_left()
    later.finish(d[:, 8:].contiguous())
    (found,) = earlier.finish(d[:, :8].contiguous())
    before = previous(h, h0, None).double()
    truth = d.double().flatten(1, 2).mT @ before.flatten(1, 2)
    assert float((found - truth).norm() / truth.norm()) < 1e-6
    whole, alone = (
        outer_sums([Left(h, h0)], d, None, wanted)[0],
        outer_sums([Left(h[0], h0[0])], d[0], None, wanted)[0],
    )
    assert torch.equal(whole[0], alone)


@pytest.mark.parametrize(
    ("count", "inner", "columns", "turned"), [(150, 88, 72, False), (140, 140, 24, True)]
)
def test_emulated_rows_times_a_matrix(count, inner, columns, turned, emulated):
    x = torch.randn(2, count, inner) * 10.0 ** torch.randint(-6, 6, (count, 1))
    x[:, 5] = 0
    x[:, 6, :70] = 0
    x[:, 7, 70:] *= 1e9
    matrix = torch.randn(2, columns, inner) * 10.0 ** torch.randint(-3, 3, (columns, 1))
    matrix = matrix.mT.contiguous().mT if turned else matrix
    bias = None if turned else torch.randn(2, columns)
    found = row_products.rows_times(x, matrix, bias)
    truth, size = x.double() @ matrix.double().mT, x.double().abs() @ matrix.double().abs().mT
    if bias is not None:
        truth, size = truth + bias.double().unsqueeze(1), size + bias.abs().unsqueeze(1)
    assert float(((found - truth).abs() / size.clamp_min(1e-30)).max()) < 3e-7
    alone = row_products.rows_times(x[1], matrix[1], None if bias is None else bias[1])
    assert torch.equal(alone, found[1])
    if bias is not None:
        one = bias[0, :1].expand(columns)
        expanded, copied = (row_products.rows_times(x[1], matrix[1], b) for b in (one, one.contiguous()))
        assert torch.equal(expanded, copied)


@pytest.mark.parametrize("name", ["dts3", "lstm", "highway"])
def test_emulated_sums_are_the_gradients_of_every_matrix(name, emulated, monkeypatch):
    """With the sums of the input and the biases, where its product is taken in one with the loop."""
    monkeypatch.setattr(outer_products, "TILES", range(64, 65))
    adjoint = adjoint_of(cells_by_hand.by_name(8)[name])
    sizes = [adjoint.cell.stages[o.stage].size for o in adjoint.cell.outputs]
    stored, delta, x = (
        [torch.rand(9, 5, n) for n in sizes],
        torch.randn(9, 5, adjoint.width),
        torch.randn(9, 5, 6),
    )
    states = [torch.randn(5, n) for n in adjoint.cell.states]
    matrices = [torch.empty(shape) for shape in adjoint.cell.matrices]
    inputs = Inputs(None, states, matrices, [], [], torch.rand(9, 5) < 0.2)
    sums = weight_sums.WeightSums(adjoint, stored, inputs, x, with_bias=True)
    sums.start()
    loop, (d_U, d_b) = sums.finish(delta)
    entry = delta[..., : adjoint.cell.entry_width].flatten(0, 1)
    pairs = [
        *zip(
            scatter_to_matrices(adjoint, loop), matrix_gradients(adjoint, delta, stored, inputs), strict=True
        )
    ]
    for found, truth in (*pairs, (d_U, entry.mT @ x.flatten(0, 1)), (d_b, entry.sum(0))):
        torch.testing.assert_close(found, truth, rtol=1e-4, atol=1e-4)


# ---- on a GPU


@GPU
@pytest.mark.parametrize(
    ("steps", "batch", "members", "width", "right"),
    [(40, 32, 1, 64, 128), (70, 33, 2, 201, 331), (200, 64, 1, 400, 800), (3, 50, 3, 100, 77)],
)
@pytest.mark.parametrize("reset", [False, True])
def test_sums_over_rows_are_as_accurate_as_fp32(steps, batch, members, width, right, reset):
    found, truth, sizes = sums_and_truth(steps, batch, members, width, right, reset, "cuda")
    for f, t, s in zip(found, truth, sizes, strict=True):
        assert float(((f - t).abs() / s.clamp_min(1e-30)).max()) < 1e-6


@GPU
def test_the_same_sums_twice_are_the_same_bits():
    d, h, h0 = (torch.randn(1, *s, device="cuda") for s in ((200, 64, 800), (200, 64, 400), (64, 400)))
    one, other = (outer_sums([Left(h, h0)], d, None, [SumBlock(0, 400, 0, 800)])[0] for _ in range(2))
    assert torch.equal(one, other)


@GPU
@pytest.mark.parametrize(
    ("count", "inner", "columns"), [(4480, 88, 800), (2311, 100, 404), (130, 8, 64), (3000, 800, 88)]
)
def test_rows_times_a_matrix_is_as_accurate_as_fp32(count, inner, columns):
    x = torch.randn(2, count, inner, device="cuda") * 10.0 ** torch.randint(-6, 6, (count, 1), device="cuda")
    matrix, bias = torch.randn(2, columns, inner, device="cuda"), torch.randn(2, columns, device="cuda")
    for added in (None, bias):
        found = row_products.rows_times(x, matrix, added)
        truth, size = x.double() @ matrix.double().mT, x.double().abs() @ matrix.double().abs().mT
        if added is not None:
            truth, size = truth + added.double().unsqueeze(1), size + added.abs().double().unsqueeze(1)
        assert float(((found - truth).abs() / size).max()) < 1e-6
