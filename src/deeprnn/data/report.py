"""What became of a person's files: each accepted or skipped with a reason, and what is worth knowing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from deeprnn.data.quantise import Losses
from deeprnn.data.splitting import LARGEST


@dataclass
class FileReport:
    """What became of one file."""

    path: str
    accepted: bool
    reason: str = ""  # why it was skipped
    split: str = ""
    size: int = 0  # frames or characters
    losses: Losses | None = None
    notes: list[str] = field(default_factory=list)  # remarks that skip nothing


@dataclass
class Report:
    """What became of all files, and what is worth knowing before training on them."""

    files: list[FileReport] = field(default_factory=list)
    losses: Losses = field(default_factory=Losses)
    duplicates: list[tuple[str, str]] = field(default_factory=list)  # same content in two splits
    warnings: list[str] = field(default_factory=list)

    @property
    def accepted(self) -> int:
        return sum(file.accepted for file in self.files)

    def reasons(self) -> Counter[str]:
        """How many files were skipped for each reason (without the part that names the file)."""
        return Counter(file.reason for file in self.files if not file.accepted)

    def summary(self, sizes: Mapping[str, int], unit: str) -> list[str]:
        """What to know in a line or two: the sizes of the splits, and what the grid lost."""
        counts = " / ".join(f"{size:,}" for size in sizes.values())
        files = f"{self.accepted:,} file{'s' if self.accepted != 1 else ''}"
        lines = [f"{files}: {counts} {unit} to train, validate and test on"]
        if self.losses.notes:
            lines.append(f"of {self.losses.notes:,} notes on the grid: {self.losses}")
        return lines

    def warn_of_empty(self, sizes: Mapping[str, int]) -> None:
        """Warn of splits without content."""
        self.warnings += [
            f"the {split} split is empty: add files, or name files or folders by split"
            for split, size in sizes.items()
            if not size
        ]

    def warn_of_large(self, files: Mapping[str, Mapping[str, int]]) -> None:
        """Warn where one file is more than a third of a split, given the sizes of each split's files."""
        large = []
        for split, sizes in files.items():
            name = max(sizes, key=lambda name: sizes[name], default="")
            if name and sizes[name] > LARGEST * sum(sizes.values()):
                large.append(f"{name} is {sizes[name] / sum(sizes.values()):.0%} of {split}")
        if large:
            self.warnings.append(
                f"one file is more than a third of a split: {', '.join(large)}; "
                "more files, or shorter ones, would make the scores steadier"
            )
