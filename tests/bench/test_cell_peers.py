"""Every peer computes what it is compared with, whatever the cell."""

from __future__ import annotations

import logging

import pytest
import torch
from benchmarks.cell_peers import Calls, calls_of, checked, error_of, kernels_of, truth_of
from benchmarks.rehearsal import rehearsal
from benchmarks.shapes import COMPILED, JAX, LOOP, OURS, STEP, TF32, TORCH, Shape

SHAPES = [
    *(Shape(kind, 9, 2, 4, 5) for kind in ("rnn", "gru", "lstm", "paced")),
    *(Shape("dts", 9, 2, 4, 5, depth) for depth in (1, 2, 4)),
    Shape("rhn", 9, 2, 4, 5, depth=3),
]


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"{s.kind}{s.depth}")
@pytest.mark.parametrize("peer", [OURS, TORCH, TF32, LOOP, JAX])
def test_outputs_and_all_gradients_are_those_of_float64(shape, peer):
    if peer == JAX:
        pytest.importorskip("jax")
    assert error_of(calls_of(shape, peer, "cpu").gradients(), truth_of(shape, peer, "cpu")) < 1e-6


@pytest.mark.parametrize("shape", [SHAPES[1], SHAPES[-1], SHAPES[6]], ids=lambda s: s.kind)
def test_the_truth_of_the_loop_is_independent_of_it(shape):
    """Two ways to the truth: the hand-written loop, and the reference backend behind our layer."""
    calls = Calls(shape, OURS, "cpu", torch.float64)
    calls.layer.backend = "reference"  # type: ignore[assignment]
    assert error_of(calls.gradients(), Calls(shape, LOOP, "cpu", torch.float64).gradients()) < 1e-12


def test_marks_are_known_to_ours_and_to_its_truth():
    shape = Shape("gru", 9, 2, 30, 5, reset=0.2)
    truth = truth_of(shape, OURS, "cpu")
    assert error_of(calls_of(shape, OURS, "cpu").gradients(), truth) < 1e-6
    without = truth_of(Shape("gru", 9, 2, 30, 5), OURS, "cpu")
    assert error_of(without[:1], truth[:1]) > 0.01


def test_a_step_is_one_step_of_the_layer():
    shape = Shape("lstm", 9, 2, 1, 5)
    assert error_of(calls_of(shape, STEP, "cpu").gradients(), truth_of(shape, OURS, "cpu")) < 1e-6


def test_tf32_is_allowed_while_its_peer_runs_and_not_after(monkeypatch):
    seen = []
    calls = calls_of(SHAPES[0], TF32, "cpu")
    run = calls.run
    monkeypatch.setattr(calls, "run", lambda: seen.append(torch.backends.cudnn.allow_tf32) or run())
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    try:
        calls.train()
        assert seen == [True]
        assert torch.backends.cudnn.allow_tf32 is False
    finally:
        torch.backends.cudnn.allow_tf32 = before


def test_long_and_large_shapes_are_compared_over_fewer_steps():
    assert checked(Shape("rnn", 256, 1, 100_000)).steps == 1000
    assert 4 <= checked(Shape("gru", 512, 4096, 128)).steps < 128
    assert checked(SHAPES[0]) == SHAPES[0]


@pytest.mark.parametrize("shape", [Shape("dts", 400, 16, 6, 88, depth=2), Shape("gru", 128, 64, 6),
                                   Shape("lstm", 1024, 64, 3), Shape("rhn", 64, 1, 6, depth=3)],
                         ids=lambda s: s.kind)  # fmt: skip
def test_the_kernels_a_row_names_are_those_that_a_call_launches(shape, caplog):
    with rehearsal(), caplog.at_level(logging.INFO, logger="deeprnn"):
        Calls(shape, OURS, "cpu").train()
    assert dict(_logged(caplog.messages)) == kernels_of(shape)


def _logged(messages):
    for message in messages:
        head, _, text = message.partition(": ")
        if head.startswith("deeprnn CUDA kernel, "):
            yield head.removeprefix("deeprnn CUDA kernel, "), text


@pytest.mark.slow
def test_the_compiled_step_is_right():
    shape = SHAPES[5]
    assert error_of(calls_of(shape, COMPILED, "cpu").gradients(), truth_of(shape, COMPILED, "cpu")) < 1e-6
