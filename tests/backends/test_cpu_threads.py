"""Work on torch's own threads, or on ours where those cannot be had."""

import os
import threading
from pathlib import Path

import pytest
import torch

from deeprnn.backends.cpu.jit import threads as cpu_threads


@pytest.fixture(params=["torch's", "ours"])
def team(request, monkeypatch):
    torch.ones(4) @ torch.ones(4)
    if request.param == "ours":
        monkeypatch.setattr(cpu_threads, "openmp", lambda: None)
    elif cpu_threads.openmp() is None:
        pytest.skip("torch comes without GNU's OpenMP here")
    assert cpu_threads.borrow()
    yield request.param
    cpu_threads.give_back()


def test_jobs_run_at_the_same_time_and_the_first_on_this_thread(team):
    meeting, seen = threading.Barrier(3, timeout=20), {}

    def job(i):
        meeting.wait()  # alone, or one after the other, none would get past this
        seen[i] = threading.get_ident()

    for _ in range(3):
        cpu_threads.together([lambda i=i: job(i) for i in range(3)])
        assert len(set(seen.values())) == 3
        assert seen[0] == threading.get_ident()


@pytest.mark.parametrize("which", [0, 1])
def test_an_error_of_any_job_reaches_the_caller(team, which):
    ran = []

    def job(i):
        ran.append(i)
        if i == which:
            raise ZeroDivisionError(f"job {i}")

    with pytest.raises(ZeroDivisionError, match=f"job {which}"):
        cpu_threads.together([lambda: job(0), lambda: job(1)])
    assert sorted(ran) == [0, 1]


def test_a_region_with_too_few_threads_runs_nothing(monkeypatch):
    """Jobs may wait for each other: a part of them would wait for ever."""

    class Alone:
        def omp_get_num_threads(self):
            return 1

        def GOMP_parallel(self, function, data, threads, flags):
            function(None)

    monkeypatch.setattr(cpu_threads, "openmp", Alone)
    done = []
    cpu_threads.together([lambda: done.append(0), lambda: done.append(1)])
    assert sorted(done) == [0, 1]


def test_after_a_fork_the_threads_are_ours(monkeypatch):
    """GNU's OpenMP does not survive one."""
    monkeypatch.setattr(cpu_threads, "_FIRST", os.getpid() + 1)
    monkeypatch.setattr(cpu_threads, "openmp", lambda: pytest.fail("asked for torch's threads"))
    names = []
    cpu_threads.together([lambda: None, lambda: names.append(threading.current_thread().name)])
    assert names == ["deeprnn-cpu"]


def test_of_several_copies_of_openmp_torchs_is_taken():
    """Other packages bring one too; theirs are other threads."""
    site = "/env/lib/site-packages"

    def found(*paths):
        maps = "\n".join(
            f"7f0000-7f1000 r-xp 00000000 08:01 42   {path}" for path in (*paths, *paths, "/lib/libc.so.6")
        )
        return cpu_threads._own_copy(maps, Path(f"{site}/torch"))

    inside, beside = f"{site}/torch/lib/libgomp.so.1", f"{site}/torch.libs/libgomp-a34b3233.so.1"
    other, system = f"{site}/scikit_learn.libs/libgomp-d22c30c5.so.1", "/usr/lib/libgomp.so.1"
    assert found(inside, other, system) == inside
    assert found(other, beside) == beside
    assert found(system) == system
    assert found(other, system) is None
    assert found() is None
