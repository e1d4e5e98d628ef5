"""What a run would need of memory, compared with what is at hand before anything is begun."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path

import torch

from deeprnn.cells.lookup import on_meta, short
from deeprnn.data.music import MusicData
from deeprnn.errors import UserError
from deeprnn.model.operator_specs import CellSpec
from deeprnn.model.structure import dissect
from deeprnn.training.evaluate import Data
from deeprnn.training.members import members_of
from deeprnn.training.recipe import Recipe

NUMBER = 4
"""bytes of a number in single precision"""
PLACE = 6
"""bytes of a step in an epoch's plan: its row, whether it is scored, whether a sequence begins there"""


def check(recipe: Recipe, data: Data, device: torch.device | str = "cpu") -> None:
    """Refuse a recipe that needs more memory than there is, or wastes it, by the settings that ask for it."""
    free = at_hand(torch.device(device))
    known = _cells(recipe, data).items()  # before `needs`, which reads their steps on tensors of their sizes
    for settings, bytes_needed in chain(known, _later(lambda: needs(recipe, data, torch.device(device)))):
        if free is not None and bytes_needed > free:
            raise UserError(
                f"{settings} would take at least {bytes_needed / 1e9:,.1f} GB of memory, and {free / 1e9:,.1f} GB "
                "are free: choose smaller numbers"
            )
    steps = _training_steps(data)
    if recipe.data.lanes > steps:
        unit = "frames" if isinstance(data, MusicData) else "symbols"
        raise UserError(
            f"data.lanes={recipe.data.lanes:,} is more than the {steps:,} {unit} to learn from: most lanes would be "
            "empty; choose a smaller number"
        )


def _later(table: Callable[[], dict[str, int]]) -> Iterator[tuple[str, int]]:
    yield from table().items()


def _cells(recipe: Recipe, data: Data) -> dict[str, int]:
    """Bytes of the cells of a model, of one member alone."""
    spec = recipe.model.spec(data.size, data.kind != "music", recipe.regulariser.dropout)
    levels = [level for level in spec.levels if isinstance(level, CellSpec)]
    cells = [on_meta(level.cell, level.entering, level.hidden_size, level.options) for level in levels]
    if not cells:
        return {}
    options = f" with {', '.join(recipe.model.cell_options)}" if recipe.model.cell_options else ""
    sizes = ", ".join(f"{size:,}" for size in recipe.model.hidden)
    numbers = sum(p.numel() for cell in cells for p in cell.parameters())
    return {f"model.cell={short(recipe.model.cell)}{options} and model.hidden={sizes}": 3 * NUMBER * numbers}


def needs(recipe: Recipe, data: Data, device: torch.device) -> dict[str, int]:
    """Bytes that a run takes at the least, by the settings that decide them."""
    model = dissect(recipe.model.spec(data.size, data.kind != "music", recipe.regulariser.dropout))
    members = len(members_of(recipe))
    lanes = recipe.data.lanes
    lane, sequence = _steps(data, lanes)
    chunk = min(recipe.data.chunk, sequence)
    together = members if device.type == "cuda" else 1  # on a CPU members take turns
    # Without input and output, which are not kept where they are symbols and many classes.
    step = sum(layer.width for layer in model.layers if layer.role not in ("input", "output"))
    population = f" of {members:,} models" if members > 1 else ""
    sizes = ", ".join(f"{size:,}" for size in recipe.model.hidden)
    nade = f" and model.nade_size={recipe.model.nade_size:,}" if recipe.model.output == "nade" else ""
    return {
        **_evaluation(recipe, data),
        # values, gradient, best values
        f"model.hidden={sizes}{nade}{population}": 3 * NUMBER * members * model.parameters,
        # pre-activations and their gradients
        f"one update of data.lanes={lanes:,} and data.chunk={chunk:,}": (
            2 * NUMBER * together * lanes * chunk * step
        ),
        f"data.lanes={lanes:,}": PLACE * lanes * lane,
    }


def _evaluation(recipe: Recipe, data: Data) -> dict[str, int]:
    """The plan that scores a text by several streams, each of which first reads a chunk unscored."""
    part = recipe.evaluation
    if isinstance(data, MusicData) or part.streams == 1:
        return {}
    length = max(len(split) for split in data.splits.values())
    steps = part.streams * min(part.chunk, length)
    return {f"evaluation.streams={part.streams:,} and evaluation.chunk={part.chunk:,}": PLACE * steps}


def _training_steps(data: Data) -> int:
    train = data.splits["train"]
    return train.frames if isinstance(data, MusicData) else len(train)  # type: ignore[union-attr]


def _steps(data: Data, lanes: int) -> tuple[int, int]:
    """Steps of the longest lane, and of the longest sequence that a chunk can be cut from."""
    lane = -(-_training_steps(data) // lanes)
    if not isinstance(data, MusicData):
        return lane, lane
    longest = int(data.splits["train"].lengths.max())
    lane = max(longest, lane)
    return lane, longest if lanes == 1 else lane  # one lane cuts at every song's end


def at_hand(device: torch.device) -> int | None:
    """Bytes that are free on a device, None where that cannot be found out."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    limits = (_free_of_machine(), _limit_of_container())
    return min((limit for limit in limits if limit is not None), default=None)


def _free_of_machine() -> int | None:
    with contextlib.suppress(OSError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    with contextlib.suppress(ValueError, OSError, AttributeError):  # not on Windows
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return None


def _limit_of_container() -> int | None:
    """The limit of a container, by either version of Linux control groups; what it caches can be given back."""
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with contextlib.suppress(OSError, ValueError):  # not there, or "max"
            return int(Path(path).read_text())
    return None
