"""`deeprnn export`: a trained run for other runtimes."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro


@dataclass(frozen=True)
class Export:
    """Write a trained run as ONNX: the whole sequence with batch and time left open, or one step."""

    run_folder: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """a run folder"""
    out: Path = Path("out/model.onnx")
    """the file to write"""
    step: bool = False
    """one step for streaming: call it again with the state it returned"""

    def run(self) -> int:
        """Load the run's best parameters and write them."""
        from deeprnn.console import console
        from deeprnn.model.export import export_onnx
        from deeprnn.runs.folder import load_run

        run = load_run(self.run_folder)
        with without_warnings():
            path = export_onnx(run.model(), self.out, step=self.step)
        form = "one step" if self.step else "whole sequences, dynamic batch and time"
        console().print(f"wrote {path} ({path.stat().st_size / 1e6:.1f} MB): {form}")
        return 0


@contextmanager
def without_warnings() -> Iterator[None]:
    """Keep back what exporters say about their own insides: it is meant for their authors. Errors pass."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        logging.disable(before)
