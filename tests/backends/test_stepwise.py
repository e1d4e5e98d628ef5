"""Cells step by step on a GPU: library products and a generated epilogue, here by torch and g++."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from deeprnn.backends import autograd
from deeprnn.backends.call import Case as BackendCase
from deeprnn.backends.cuda import stepwise
from deeprnn.backends.cuda.recurrence.parameters import headers
from tests.backends import grid
from tests.backends.cells_by_hand import by_name
from tests.backends.grid import Case
from tests.backends.small_emulation import EMULATED, Small

CELLS = by_name(5)


@pytest.fixture
def emulated(monkeypatch):
    @cache
    def load_kernel(own, stage, device):
        return Small("stepwise/stepwise.cu", "epilogue_step", {"STAGE": stage}, headers(own))

    monkeypatch.setattr(stepwise, "load_kernel", load_kernel)
    monkeypatch.setattr(stepwise, "index_of", lambda device: 0)


CASES = [
    Case("dts", CELLS["dts"], 4, 3, reset=True, population=2),
    Case("pooled", CELLS["pooled"], 3, 2),
    Case("masked", CELLS["masked"], 4, 3, reset=True),
    Case("lstm", CELLS["lstm"], 4, 3, reset=True),
    Case("highway", CELLS["highway"], 3, 2, state_gradient_only=True),
]


@EMULATED
@pytest.mark.parametrize("case", CASES, ids=str)
def test_emulated(case, emulated):
    grid.examine(lambda cell, inputs, p: autograd.unroll("stepwise", cell.text, p, inputs), case)


def test_tensors_elsewhere_are_refused_with_the_remedy():
    case = BackendCase(CELLS["rnn"], torch.device("cpu"), torch.float32)
    assert ".cuda()" in (stepwise.BACKEND.why_not(case) or "")
