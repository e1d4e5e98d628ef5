"""The commands of the page on several processes, at small size."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from deeprnn.runs.folder import load_run
from tests.small_runs import text_file
from tests.training.test_ranks import LIMIT, environment

PAGE = Path(__file__).parents[1] / "docs" / "guide" / "several-processes.md"
SMALL = "--model rnn --hidden 8 --device cpu --quiet"


def commands() -> list[str]:
    return re.findall(r"^```sh\n(.*?)\n```", PAGE.read_text(encoding="utf-8"), flags=re.M | re.S)


@pytest.mark.slow
def test_the_commands_of_the_guide_run(tmp_path):
    pytest.importorskip("mlflow")
    (tmp_path / "book.txt").write_bytes(text_file().read_bytes())
    programs = {"torchrun": "torch.distributed.run", "deeprnn": "deeprnn"}
    for command in commands():
        program, *words = shlex.split(command)
        words += SMALL.split() if "train" in words else []
        line = [sys.executable, "-m", programs[program], *words]
        done = subprocess.run(
            line, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=LIMIT
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    epochs = {name: len(load_run(tmp_path / "runs" / name).metrics()) for name in ("two", "safe", "watched")}
    assert epochs == {"two": 3, "safe": 2, "watched": 2}
    assert {"tensorboard", "mlflow"} <= {p.name for p in (tmp_path / "runs" / "watched").iterdir()}
