"""Noise and the clipped step: the plain versions anywhere, the kernels against them on a GPU."""

from __future__ import annotations

import pytest
import torch

from deeprnn.training import fused

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


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("threshold", [0.0, 1.0, 1e6])
def test_clipped_step(device, threshold):
    generator = torch.Generator().manual_seed(1)
    p, g = (torch.randn(3, 10_007, generator=generator).to(device) for _ in range(2))
    g[1] *= 1e-3
    rate = torch.tensor([1.0, 0.5, 0.1], device=device)
    multipliers = torch.rand(10_007, generator=generator).to(device)
    expected = p.double()
    for member in range(3):
        norm = g[member].double().norm()
        scale = min(1.0, threshold / float(norm)) if threshold else 1.0
        expected[member] -= float(rate[member]) * scale * multipliers.double() * g[member].double()
    before = p.clone()
    norm = fused.clipped_step(p, g, rate, threshold, multipliers)
    torch.testing.assert_close(p.double(), expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(norm.double(), g.double().norm(dim=1), rtol=1e-5, atol=0)
    assert not torch.equal(p, before)


@pytest.mark.gpu
def test_kernel_noise_equals_the_plain_one():
    seeds, step = torch.tensor([3, -(2**40) + 5], device="cuda"), torch.tensor([2**33 + 1], device="cuda")
    flat = torch.randn(2, 10_003, device="cuda")
    out = fused.add_noise(flat, 0.075, seeds, step, torch.empty_like(flat), count=9_999)
    expected = fused.plain_noise(flat.cpu(), 0.075, seeds.cpu(), step.cpu(), 9_999)
    torch.testing.assert_close(out.cpu(), expected, rtol=1e-5, atol=1e-6)
