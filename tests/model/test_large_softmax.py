"""The chunked output layer against the plain one: value, every gradient, masks, population, memory."""

from __future__ import annotations

from functools import lru_cache

import pytest
import torch
from torch.func import vmap

from deeprnn.backends.cuda.device import nvidia
from deeprnn.model import large_softmax
from deeprnn.model.large_softmax import linear_cross_entropy
from deeprnn.model.losses import categorical_nll
from tests.backends.small_emulation import EMULATED, Small

T, B, D, V = 5, 3, 7, 29


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    """Four rows at a time, so that 15 rows make three full pieces and one of three."""
    monkeypatch.setattr(large_softmax, "PIECE", {"cpu": 4 * V, "cuda": 4 * V})


def values(P=(), dtype=torch.float64):
    h = torch.randn(*P, T, B, D, dtype=dtype)
    weight, bias = torch.randn(*P, V, D, dtype=dtype), torch.randn(*P, V, dtype=dtype)
    return h, weight, bias, torch.randint(V, (T, B)), torch.rand(T, B) < 0.7


def plain(h, weight, bias, targets, mask):
    logits = h @ weight.mT if bias is None else h @ weight.mT + bias
    return categorical_nll(logits, targets, mask)


@pytest.mark.parametrize("with_bias", [True, False])
def test_value_and_gradients_equal_the_plain_path(with_bias):
    h, weight, bias, targets, mask = values()
    bias = bias if with_bias else None
    leaves = [x.requires_grad_() for x in (h, weight, bias) if x is not None]
    total, count = linear_cross_entropy(h, weight, bias, targets, mask)
    expected, number = plain(h, weight, bias, targets, mask)
    torch.testing.assert_close(total, expected)
    assert count == number
    for got, want in zip(
        torch.autograd.grad(total * 0.3, leaves), torch.autograd.grad(expected * 0.3, leaves), strict=True
    ):
        torch.testing.assert_close(got, want)


def test_masked_rows_may_hold_any_target():
    h, weight, bias, targets, mask = values()
    total, _ = linear_cross_entropy(h, weight, bias, targets, mask)
    other, _ = linear_cross_entropy(h, weight, bias, torch.where(mask, targets, -100), mask)
    assert torch.equal(total, other)


def test_no_mask_means_every_row():
    h, weight, bias, targets, _ = values()
    total, count = linear_cross_entropy(h, weight, bias, targets)
    torch.testing.assert_close(total, plain(h, weight, bias, targets, torch.ones(T, B, dtype=torch.bool))[0])
    assert count == T * B


def test_a_population_equals_its_members():
    h, weight, bias, targets, mask = values(P=(3,))
    leaves = [x.requires_grad_() for x in (h, weight, bias)]
    total, count = vmap(lambda h, w, b: linear_cross_entropy(h, w, b, targets, mask))(h, weight, bias)
    assert total.shape == (3,)
    assert count.tolist() == [int(mask.sum())] * 3
    scale = torch.tensor([1.0, 0.5, 2.0], dtype=torch.float64)
    grads = torch.autograd.grad((total * scale).sum(), leaves)
    for p in range(3):
        own = [x[p].detach().requires_grad_() for x in leaves]
        alone, _ = linear_cross_entropy(*own, targets, mask)
        torch.testing.assert_close(total[p], alone)
        for got, want in zip(grads, torch.autograd.grad(alone * scale[p], own), strict=True):
            torch.testing.assert_close(got[p], want)


def test_second_derivatives_and_shared_weights():
    h, weight, bias, targets, mask = values()
    leaves = [x.requires_grad_() for x in (h, weight, bias)]
    assert torch.autograd.gradgradcheck(lambda *x: linear_cross_entropy(*x, targets, mask)[0], leaves)
    hs = torch.stack([h, h + 1]).detach()
    total, _ = vmap(lambda x: linear_cross_entropy(x, weight, bias, targets, mask))(hs)
    torch.testing.assert_close(total[1], linear_cross_entropy(hs[1], weight, bias, targets, mask)[0])


def test_a_matrix_that_is_the_embedding_too_counts_once_in_gradients_to_be_differentiated_again():
    _, weight, bias, targets, mask = values()
    weight.requires_grad_()
    h = torch.tanh(weight[torch.randint(V, (T, B))])
    totals = [function(h, weight, bias, targets, mask)[0] for function in (linear_cross_entropy, plain)]
    found, expected = (torch.autograd.grad(y, weight, create_graph=True)[0] for y in totals)
    torch.testing.assert_close(found, expected)


def test_gradients_inside_a_functional_transform():
    h, weight, bias, targets, mask = values()
    inside = torch.func.grad(lambda w: linear_cross_entropy(h, w, bias, targets, mask)[0])(weight)
    weight.requires_grad_()
    (outside,) = torch.autograd.grad(plain(h, weight, bias, targets, mask)[0], weight)
    torch.testing.assert_close(inside, outside)


def test_without_gradients_nothing_is_kept_for_them(monkeypatch):
    h, weight, bias, targets, mask = values()
    with torch.no_grad():
        results = large_softmax.pieces(
            h.flatten(0, 1), weight, bias, targets.flatten(), mask.flatten(), False
        )
    assert [r.numel() for r in results] == [1, 0, 0, 0]


def test_extreme_logits_stay_finite():
    h, weight, bias, targets, mask = values(dtype=torch.float32)
    total, _ = linear_cross_entropy(h * 1e4, weight, bias, targets, mask)
    torch.testing.assert_close(total, plain(h * 1e4, weight, bias, targets, mask)[0])
    assert total.isfinite()


def test_the_operator_keeps_torchs_rules():
    h, weight, bias, targets, mask = values()
    leaves = [x.requires_grad_() for x in (h.flatten(0, 1), weight, bias)]
    results = torch.library.opcheck(
        large_softmax.pieces,
        (*leaves, targets.flatten(), mask.flatten(), True),
        test_utils=("test_schema", "test_faketensor", "test_autograd_registration"),
    )
    assert set(results.values()) == {"SUCCESS"}


def test_shapes_that_do_not_fit_are_named():
    h, weight, bias, targets, mask = values()
    with pytest.raises(ValueError, match=r"\(5, 2\).*\(5, 3, 7\)"):
        linear_cross_entropy(h, weight, bias, targets[:, :2], mask)


@pytest.fixture
def emulated(monkeypatch):
    """The kernel of a GPU, compiled for the CPU."""

    def kernel(classes, device):
        macros = {"CLASSES": classes, "ITEMS": -(-classes // large_softmax.THREADS)}
        return Small("training/softmax.cu", "softmax_gradient", macros)

    monkeypatch.setattr(large_softmax, "_kernel", lru_cache(kernel))
    monkeypatch.setattr(large_softmax, "_has_kernel", lambda h, classes: True)
    monkeypatch.setattr(large_softmax, "PIECE", {"cpu": 10**4, "cuda": 0})


@EMULATED
@pytest.mark.parametrize("classes", [29, 512, 1100])
def test_the_emulated_kernel(classes, emulated):
    h, weight, bias = torch.randn(5, 3, 8), torch.randn(classes, 8), torch.randn(classes)
    targets, mask = torch.randint(classes, (5, 3)), torch.rand(5, 3) < 0.7
    exact = [x.double().requires_grad_() for x in (h, weight, bias)]
    expected, _ = plain(*exact, targets, mask)
    leaves = [x.requires_grad_() for x in (h, weight, bias)]
    total, _ = linear_cross_entropy(*leaves, targets, mask)
    torch.testing.assert_close(total.double(), expected, rtol=1e-6, atol=0)
    truth = torch.autograd.grad(expected, exact)
    for got, want in zip(torch.autograd.grad(total, leaves), truth, strict=True):
        assert (got.double() - want).norm() < 2e-6 * want.norm()


@EMULATED
def test_in_the_emulated_kernel_nonsense_gives_nan(emulated):
    h, weight, bias, targets, mask = values(dtype=torch.float32)
    mask[2, 1], mask[0, 0] = True, False
    for wrong in (V, -1, 2**40):
        strange = targets.clone()
        strange[0, 0] = wrong
        assert linear_cross_entropy(h, weight, bias, strange, mask)[0].isfinite()
        strange[2, 1] = wrong
        assert linear_cross_entropy(h, weight, bias, strange, mask)[0].isnan()
    bias[3] = torch.nan
    assert linear_cross_entropy(h, weight, bias, targets, mask)[0].isnan()


@pytest.mark.gpu
@pytest.mark.parametrize(
    "classes", [29, 512, 10_007, 40_000]
)  # in one register, several, and beyond the kernel
def test_on_the_gpu(classes, monkeypatch):
    monkeypatch.setattr(large_softmax, "PIECE", {"cuda": 100 * classes})
    h, weight, bias = torch.randn(130, 2, 24), torch.randn(classes, 24), torch.randn(classes)
    targets, mask = torch.randint(classes, (130, 2)), torch.rand(130, 2) < 0.7
    exact = [x.double().requires_grad_() for x in (h, weight, bias)]
    expected, _ = plain(*exact, targets, mask)
    leaves = [x.cuda().requires_grad_() for x in (h, weight, bias)]
    total, _ = linear_cross_entropy(*leaves, targets.cuda(), mask.cuda())
    torch.testing.assert_close(total.cpu().double(), expected, rtol=1e-6, atol=0)
    for got, want in zip(
        torch.autograd.grad(total, leaves), torch.autograd.grad(expected, exact), strict=True
    ):
        assert (got.cpu().double() - want).norm() < 2e-6 * want.norm()


@pytest.mark.gpu
def test_a_logit_that_is_no_number_is_not_hidden_on_the_gpu():
    h, weight, bias, targets, mask = (x.cuda() for x in values(dtype=torch.float32))
    bias[3] = torch.nan
    assert linear_cross_entropy(h, weight, bias, targets, mask | True)[0].isnan()


def test_amds_gpus_take_plain_operations(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", None)  # torch calls them "cuda" too
    assert not nvidia(torch.device("cuda"))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert nvidia(torch.device("cuda", 1))
    assert not nvidia(torch.device("cpu"))
