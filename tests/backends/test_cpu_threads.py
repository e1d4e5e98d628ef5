"""Machine code on torch's own threads, or on ours where those cannot be had."""

import os
import threading

import pytest
import torch

from deeprnn.backends.unrolling import unroll
from tests.backends import cells_by_hand
from tests.backends.random_cells import Shape, cast, random_inputs

pytest.importorskip("llvmlite")

from deeprnn.backends.cpu.jit import sharing, threads

CELL = cells_by_hand.gru(40)


@pytest.fixture(autouse=True)
def shared_calls(monkeypatch):
    """Even a small call is shared by two threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    monkeypatch.setattr(sharing, "WORK_PER_THREAD", 1)
    yield
    torch.set_num_threads(before)


def result(B: int = 1) -> torch.Tensor:
    inputs = cast(random_inputs(CELL, Shape(B=B), 0), torch.float32)
    return unroll(CELL, inputs)[0]


@pytest.fixture
def alone() -> torch.Tensor:
    torch.set_num_threads(1)
    out = result()
    torch.set_num_threads(2)
    return out


def own_threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name == "deeprnn-cpu"]


def test_torchs_threads_and_ours_give_the_same_bits(alone, monkeypatch):
    if threads.openmp() is not None:
        before = len(own_threads())
        assert torch.equal(result(), alone)
        assert len(own_threads()) == before  # torch's served
    monkeypatch.setattr(threads, "openmp", lambda: None)
    assert torch.equal(result(), alone)
    assert own_threads()


def test_a_region_with_too_few_threads_runs_nothing(alone, monkeypatch):
    """Parts wait for each other: one alone would wait for ever. So ours take over."""
    library = threads.openmp()
    if library is None:
        pytest.skip("torch comes without GNU's OpenMP here")
    assert library is not None

    class Alone:
        omp_get_num_threads = library.omp_get_num_threads
        omp_get_thread_num = library.omp_get_thread_num

        def GOMP_parallel(self, function, data, count, flags):
            library.GOMP_parallel(function, data, 1, flags)

    short = Alone()
    monkeypatch.setattr(threads, "openmp", lambda: short)
    assert torch.equal(result(), alone)
    assert own_threads()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_child_process_does_not_ask_for_torchs_threads(alone, monkeypatch):
    """GNU's OpenMP does not survive a fork."""
    monkeypatch.setattr(threads, "_FIRST_PROCESS", os.getpid() + 1)
    monkeypatch.setattr(threads, "openmp", lambda: pytest.fail("asked for torch's threads"))
    assert torch.equal(result(), alone)


def test_who_does_not_get_the_threads_computes_alone(alone):
    assert threads.acquire()
    try:
        assert torch.equal(result(), alone)
    finally:
        threads.release()


def test_only_a_library_that_is_loaded_already_is_used(monkeypatch, tmp_path):
    """Loading another copy of OpenMP would start threads that torch knows nothing of."""
    (tmp_path / "libgomp.so.1").write_bytes(b"not loaded")
    monkeypatch.setattr(threads, "_candidates", lambda: [tmp_path / "libgomp.so.1"])
    assert threads.openmp.__wrapped__() is None
