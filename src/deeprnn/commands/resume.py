"""`deeprnn resume`: go on with a run, exactly where it stopped."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import tyro

from deeprnn.commands.arguments import TrackOption, parse
from deeprnn.commands.recipe_options import field_options, parse_values, split_overrides


@dataclass(frozen=True)
class Resume:
    """Go on with an interrupted run; on the CPU the outcome is the undisturbed run's, bit for bit.

    A finished run goes on for longer with other limits, which count from its beginning: --stop.epochs 40,
    --stop.minutes 10 or --stop.patience 30; 0 is no limit. Nothing else of its recipe can change.
    """

    run_folder: tyro.conf.Positional[Path]
    """a folder under runs/"""
    device: str = "auto"
    """auto, cpu or cuda"""
    threads: int = 0
    """CPU threads; 0: as many as the run began with, which bit-equality needs"""
    ledger: Path | None = None
    """also write the finished run's entry into this folder"""
    track: TrackOption = ()
    """watch the run with another program; may be given several times"""
    quiet: bool = False
    """print nothing but warnings and errors"""
    json: bool = False
    """print the results as one JSON document, and nothing else"""
    overrides: Annotated[tuple[tuple[str, str], ...], tyro.conf.Suppress] = field(default=())
    """limits from the command line"""

    @classmethod
    def from_argv(cls, argv: Sequence[str], prog: str = "deeprnn resume") -> Resume:
        """Dotted options go to the recipe, the rest to this command."""
        from dataclasses import replace

        rest, overrides = split_overrides(argv)
        limits = [name for name in field_options() if name.startswith(("--stop.", "--save."))]
        return replace(parse(cls, rest, prog, other_options=limits), overrides=tuple(overrides))

    def run(self) -> int:
        """Take the run up where its newest whole checkpoint stands."""
        from deeprnn.commands.training import set_threads, train_recipe
        from deeprnn.errors import UserError
        from deeprnn.training.loading import pick_device
        from deeprnn.training.ranks import joined, own_device
        from deeprnn.training.recipe import Recipe, override
        from deeprnn.training.session import recipe_of

        for name, _ in self.overrides:
            if not name.startswith(("stop.", "save.")):
                raise UserError(
                    f"--{name} cannot change in a run that has begun, only --stop.* and --save.* can: train a new "
                    f"run, perhaps from this one's parameters with --pretrain.run {self.run_folder}"
                )
        set_threads(self.threads)
        device = own_device(pick_device(self.device))
        with joined(device) as ranks:
            saved = Recipe.from_dict(ranks.on_lead(lambda: recipe_of(self.run_folder).to_dict()))
            recipe = override(saved, parse_values(self.overrides))
            return train_recipe(recipe, self.run_folder, data=None, options=self, device=device, ranks=ranks)
