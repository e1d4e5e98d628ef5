"""`deeprnn resume`: go on with a run, exactly where it stopped."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import tyro


@dataclass(frozen=True)
class Resume:
    """Go on with an interrupted run; on the CPU the outcome is the undisturbed run's, bit for bit."""

    run_folder: tyro.conf.Positional[Path]
    """a folder under runs/"""
    device: str = "auto"
    """auto, cpu or cuda"""
    threads: int = 0
    """CPU threads; 0: as torch chooses. Bit-equality needs the number the run began with"""
    ledger: Path | None = None
    """also write the finished run's entry into this folder"""
    tensorboard: bool = False
    """write TensorBoard logs into the run folder"""
    quiet: bool = False
    """print nothing but errors"""
    json: bool = False
    """print the results as one JSON document, and nothing else"""

    def run(self) -> int:
        """Take the run up where its newest whole checkpoint stands."""
        from deeprnn.commands.train import conduct, set_threads
        from deeprnn.training.session import recipe_of

        set_threads(self.threads)
        return conduct(recipe_of(self.run_folder), self.run_folder, data=None, options=self)
