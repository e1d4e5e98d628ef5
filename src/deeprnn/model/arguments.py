"""The settings of a layer, checked: what is refused is named, with its value and the remedy."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from deeprnn.backends import REGISTRY
from deeprnn.errors import UserError
from deeprnn.model import units
from deeprnn.model.units import Unit


def check_settings(
    num_layers: int, bias: bool, batch_first: bool, dropout: float, bidirectional: bool, backend: str
) -> None:
    """Refuse settings that `PlusSpec` does not see, naming the argument, the value and the remedy."""
    if isinstance(num_layers, bool) or not isinstance(num_layers, int) or num_layers < 1:
        raise ValueError(f"num_layers must be a whole number of at least 1, got {num_layers!r}")
    for name, value in (("bias", bias), ("batch_first", batch_first), ("bidirectional", bidirectional)):
        if not isinstance(value, bool):
            raise TypeError(f"{name} must be True or False, got {value!r}")
    number = isinstance(dropout, (int, float)) and not isinstance(dropout, bool)
    if not number or not 0 <= dropout <= 1:
        raise ValueError(f"dropout should be a number in range [0, 1] representing the probability of an element "
                         f"being zeroed, got {dropout!r}")  # fmt: skip
    if dropout > 0 and num_layers == 1:
        warnings.warn(f"dropout={dropout} acts between levels and num_layers=1 has none: use num_layers > 1",
                      stacklevel=3)  # fmt: skip
    if not isinstance(backend, str) or (backend != "auto" and backend not in REGISTRY):
        raise ValueError(f"backend must be one of auto, {', '.join(REGISTRY)}, got {backend!r}")


def as_sizes(intermediate_sizes: int | Sequence[int]) -> tuple[int, ...]:
    """One width or several, as a tuple."""
    if isinstance(intermediate_sizes, (tuple, list)):
        return tuple(intermediate_sizes)
    if isinstance(intermediate_sizes, int):
        return (intermediate_sizes,)
    raise TypeError(f"intermediate_sizes must be one size or a list of sizes, got {intermediate_sizes!r}")


def name_unit(argument: str, unit: str | Unit) -> str:
    """The unit's name, or an error that says which argument was wrong."""
    try:
        return units.named(unit)
    except UserError as error:
        raise ValueError(f"{argument}: {error}") from None
