"""The models of a population, which train in lockstep: each by its seed, rate and transposition."""

from __future__ import annotations

from dataclasses import dataclass

from deeprnn.training.recipe import Recipe


@dataclass(frozen=True)
class MemberName:
    """One model of a population."""

    seed: int
    rate: float
    name: str
    transposed: int = 0
    """semitones by which its songs are moved at most"""


def members_of(recipe: Recipe) -> list[MemberName]:
    """Every seed at every rate and transposition."""
    rates = recipe.rates or (recipe.optimiser.rate,)
    moved = recipe.transpositions or (recipe.data.random_transpose,)

    def name(seed: int, rate: float, transposed: int) -> str:
        words = [f"seed-{seed}"]
        words += [f"rate-{rate:g}"] if recipe.rates else []
        words += [f"transpose-{transposed}"] if recipe.transpositions else []
        return "-".join(words)

    grid = [(s, r, t) for s in recipe.seeds for r in rates for t in moved]
    return [MemberName(s, r, name(s, r, t), t) for s, r, t in grid]


def named(variant: Recipe, number: int) -> MemberName:
    """A member of a population whose members have recipes of their own."""
    return MemberName(
        variant.seeds[0], variant.optimiser.rate, f"member-{number}", variant.data.random_transpose
    )
