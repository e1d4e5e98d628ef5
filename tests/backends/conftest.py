"""What every test of a backend begins with."""

import pytest

from deeprnn.backends.cuda.recurrence import launch


@pytest.fixture(autouse=True)
def plans_made_anew():
    """Launches are prepared once for each shape: a test that chooses the plan itself must not find another's."""
    launch.prepare.cache_clear()
    yield
    launch.prepare.cache_clear()
