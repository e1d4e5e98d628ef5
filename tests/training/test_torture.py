"""SIGKILL at random moments leaves the outcome bit-equal."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


def torture(folder: Path, kills: int, seed: int, limit: float) -> str:
    command = [sys.executable, "-m", "tests.training.torture", str(folder), str(kills), str(seed)]
    root = Path(__file__).parents[2]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=root, env=env, capture_output=True, text=True, timeout=limit)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_few_kills(tmp_path):
    assert "5 kills" in torture(tmp_path, 5, seed=1, limit=120)


@pytest.mark.slow
def test_two_hundred_kills(tmp_path):
    assert "200 kills" in torture(tmp_path, 200, seed=2, limit=1800)
