"""What several tests share."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


def benchmark_data() -> Path:
    """The folder of benchmark files, or skip, saying so."""
    folder = os.environ.get("DEEPRNN_DATA")
    if not folder or not Path(folder).is_dir():
        pytest.skip("benchmark data absent: set DEEPRNN_DATA to the folder that holds music/ and ptb/")
    return Path(folder)
