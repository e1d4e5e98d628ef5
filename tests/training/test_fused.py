"""Weight noise and the step: the plain versions anywhere, the kernels against them on a GPU."""

from __future__ import annotations

import pytest
import torch

from deeprnn.training import fused
from deeprnn.training.optimiser import Optimiser, thresholds
from deeprnn.training.recipe import OptimiserPart
from deeprnn.training.updater import Updater
from tests.backends.small_emulation import EMULATED, Small

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def test_philox_gives_the_published_words():
    zero = [torch.zeros(1, dtype=torch.int64)] * 4
    words = [int(w) for w in fused.philox(zero, zero[:2])]
    assert words == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]  # Random123's known answers
    ones = [torch.full((1,), 0xFFFFFFFF)] * 4
    assert [int(w) for w in fused.philox(ones, ones[:2])] == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]


@pytest.mark.parametrize("device", DEVICES)
def test_noise_is_normal_and_depends_on_seed_and_update_alone(device):
    flat = torch.randn(2, 40_001, device=device)
    seeds = torch.tensor([1, 2], device=device)
    out = torch.empty_like(flat)

    def noise(update: int, members: slice = slice(None)) -> torch.Tensor:
        step = torch.tensor([update], device=device)
        fused.add_noise(flat[members], 0.5, seeds[members], step, out[members], count=40_000)
        return (out - flat)[members].clone()

    first = noise(7)
    assert not first[:, 40_000:].any()
    x = first[:, :40_000] / 0.5
    assert abs(float(x.mean())) < 0.02
    assert abs(float(x.std()) - 1) < 0.02
    assert abs(float((x**4).mean()) - 3) < 0.15
    assert abs(float((x[0] * x[1]).mean())) < 0.02
    assert torch.equal(noise(7), first)
    assert torch.equal(noise(7, slice(1, 2)), first[1:])
    assert not torch.equal(noise(8), first)


def steps(name: str, device: str, dtype: torch.dtype, kernel: bool) -> list[torch.Tensor]:
    """Twenty steps of three members with clipping, a lost gradient, a jump back, multipliers and an average."""
    part = OptimiserPart(name=name, momentum=0.9, weight_decay=0.05 if name == "adamw" else 0.0)
    draw = torch.Generator().manual_seed(1)
    p = torch.randn(3, 10_007, generator=draw).to(device, dtype)
    multipliers = torch.rand(10_007, generator=draw).to(device, dtype)
    rate = torch.tensor([0.1, 0.05, 0.0], dtype=torch.float64, device=device)
    optimiser, average = Optimiser(part, p, multipliers), p.clone()
    for update in range(20):
        g = torch.randn(3, 10_007, generator=draw).to(device, dtype)
        factor = torch.tensor([1.0, 0.25, 1.0], device=device)
        if update == 5:
            factor[1], g[1] = 0.0, torch.nan
        if update == 11:
            optimiser.forget(0)
        tau, weight = torch.tensor(update, device=device), torch.tensor(0.125, device=device)
        if kernel:
            optimiser.fused_step(slice(0, 3), p, g, factor, rate, tau, (average, weight))
        else:
            g = torch.where(factor[:, None] == 0, 0.0, g * factor[:, None])
            optimiser.step(slice(0, 3), p, g, rate, tau)
            average.lerp_(p, weight.to(dtype))
    return [p, average, *optimiser.buffers.values()]


@pytest.fixture(scope="module")
def emulated():
    kernel = Small("training/update.cu", "take_step")
    return lambda name, device, blocks, members, arguments: kernel.launch(
        blocks, 256, arguments, device, members
    )


@pytest.mark.parametrize("device", [pytest.param("cpu", marks=EMULATED), DEVICES[1]])
@pytest.mark.parametrize("name", ["sgd", "momentum", "adam", "adamw"])
def test_the_step_in_one_kernel_equals_the_plain_one(name, device, request, monkeypatch):
    if device == "cpu":
        monkeypatch.setattr(fused, "_launch", request.getfixturevalue("emulated"))
    got = steps(name, device, torch.float32, kernel=True)
    expected = steps(name, "cpu", torch.float64, kernel=False)
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one.cpu().double(), other, rtol=2e-5, atol=2e-5)


@pytest.fixture(scope="module")
def emulated_account():
    kernel = Small("training/update.cu", "account")
    return lambda name, device, blocks, members, arguments: kernel.launch(
        blocks, 256, arguments, device, members
    )


@pytest.mark.parametrize("device", [pytest.param("cpu", marks=EMULATED), DEVICES[1]])
@pytest.mark.parametrize("each", [False, True], ids=["one count", "counts"])
def test_a_gradient_is_judged_in_one_kernel_as_in_many(each, device, request, monkeypatch):
    """Clipped or not, never clipped, zero, lost once and again: for some members of a population alone, too."""
    if device == "cpu":
        monkeypatch.setattr(fused, "_launch", request.getfixturevalue("emulated_account"))
    norms = [0.5, 3.0, 3.0, 0.0, torch.inf, torch.nan, 1.0, torch.inf]
    nats = [8.0, 7.0, 6.0, 5.0, 4.0, 3.0, torch.nan, 2.0]
    clips = [1.0, 1.0, 0.0, 1.0, 1.0, 0.0, 1.0, 0.0]
    P, rows = len(norms), slice(1, 8)
    lost = torch.tensor([-1, -1, -1, -1, -1, 3, -1, -1])

    def all_of(where: str, kernel: bool):
        updater = Updater.__new__(Updater)
        updater.clip = thresholds(clips).to(where)
        updater.totals = torch.full((5, P), 0.25, dtype=torch.float64, device=where)
        updater.bad, updater.tau = lost.clone().to(where), torch.tensor(7, device=where)
        count = torch.arange(1, P).to(where) if each else torch.tensor(11, device=where)
        given = torch.tensor(nats, device=where)[rows], count, torch.tensor(norms, device=where)[rows]
        if kernel:
            sums, bad = updater.totals[:, rows], updater.bad[rows]
            factor, good = fused.account(
                given[2], given[0], count, updater.clip[rows], updater.tau, sums, bad
            )
        else:
            good, scale = updater._judge(rows, *given)
            factor = torch.where(good, scale, 0.0)
        return factor.cpu(), good.cpu(), updater.totals.cpu(), updater.bad.cpu()

    for mine, expected in zip(all_of(device, True), all_of("cpu", False), strict=True):
        assert mine.dtype == expected.dtype
        torch.testing.assert_close(mine, expected, rtol=1e-6, atol=0)


@pytest.mark.gpu
def test_kernel_noise_equals_the_plain_one():
    seeds, step = torch.tensor([3, -(2**40) + 5], device="cuda"), torch.tensor([2**33 + 1], device="cuda")
    flat = torch.randn(2, 10_003, device="cuda")
    out = fused.add_noise(flat, 0.075, seeds, step, torch.empty_like(flat), count=9_999)
    expected = fused.plain_noise(flat.cpu(), 0.075, seeds.cpu(), step.cpu(), 9_999)
    torch.testing.assert_close(out.cpu(), expected, rtol=1e-5, atol=1e-6)
