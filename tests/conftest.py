"""What holds for every test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="session")
def committed() -> Iterator[None]:
    """Runs say that their code is in a commit, whatever is being worked on: otherwise views mark them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DEEPRNN_COMMIT", "0123456789ab")
        yield
