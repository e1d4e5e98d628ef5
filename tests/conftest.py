"""What holds for every test."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator

import pytest

if "PYTEST_XDIST_WORKER" in os.environ:  # workers share the cores already; before torch is imported
    os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_collection_finish() -> None:
    """What thousands of collected tests and their imports hold is left out of every later search for garbage."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def committed() -> Iterator[None]:
    """Runs say that their code is in a commit, whatever is being worked on: otherwise views mark them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DEEPRNN_COMMIT", "0123456789ab")
        yield
