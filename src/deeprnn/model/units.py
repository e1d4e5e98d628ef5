"""Units φ by name: the element-wise ones, and the two that pool several linear maps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import softplus

from deeprnn.cells import functions
from deeprnn.errors import UserError, did_you_mean


def maxout(a: Tensor, pool: int) -> Tensor:
    """φ(a)_j = max over the pool of N linear maps of unit j (Goodfellow et al. 2013)."""
    return a.unflatten(-1, (-1, pool)).amax(-1)


def lp(a: Tensor, pool: int, rho: Tensor, centre: Tensor) -> Tensor:
    """φ(a)_j = ((1/N) Σ_i |a_ji - c_ji|^p_j)^(1/p_j) with p_j = 1 + softplus(ρ_j) (Gulcehre et al. 2013)."""
    members = (a - centre).unflatten(-1, (-1, pool)).unbind(-1)  # N of (..., M)
    return functions.lp(1 + softplus(rho), *members)


Unit = Callable[[Tensor], Tensor]

ELEMENTWISE: dict[str, Unit] = dict(functions.UNITS)
"""the units of the table, and those that `register` adds"""
POOLED = ("maxout", "lp")


@dataclass(frozen=True)
class UnitSpec:
    """A unit as data: a name, and for pooled units how many linear maps feed one unit."""

    name: str
    pool: int = 1

    @classmethod
    def parse(cls, text: str) -> UnitSpec:
        """Read "sigmoid", "maxout:2", "lp:4"; a pooled unit without a number pools 2."""
        name, _, pool = text.partition(":")
        known = (*ELEMENTWISE, *POOLED)
        if name not in known:
            hint = did_you_mean(name, known)
            raise UserError(f"unknown unit {text!r}{hint}: known are {', '.join(known)}; "
                            "deeprnn.model.units.register(name, function) adds one of your own")  # fmt: skip
        if name not in POOLED:
            if pool:
                raise UserError(f"unit {name!r} does not pool: write {name!r}, not {text!r}")
            return cls(name)
        if pool and not (pool.isdecimal() and int(pool) >= 1):
            raise UserError(f"unit {text!r}: the pool size after ':' must be a whole number, at least 1")
        return cls(name, int(pool) if pool else 2)

    def __str__(self) -> str:
        return f"{self.name}:{self.pool}" if self.name in POOLED else self.name


def register(name: str, phi: Unit) -> None:
    """Make an element-wise unit of your own known by name, so that it can be saved in a recipe."""
    if name in ELEMENTWISE or name in POOLED or not name or set(name) & {":", ","}:
        raise UserError(f"unit name {name!r} is taken or not usable: choose another, without ':' or ','")
    if not callable(phi):
        raise UserError(f"unit {name!r} must be a function of a tensor, got {phi!r}")
    if isinstance(phi, type):
        raise UserError(f"unit {name!r} is a class, no function of a tensor: give an instance, {name}()")
    if isinstance(phi, torch.nn.Module) and any(True for _ in phi.parameters()):
        # They would be in no state_dict, move to no device and never be trained.
        raise UserError(
            f"unit {name!r} has parameters of its own, which a unit cannot hold: use lp:N to learn one"
        )
    ELEMENTWISE[name] = phi


def named(unit: str | Unit) -> str:
    """The name of a unit; a callable is registered under its own name first."""
    if isinstance(unit, str):
        return str(UnitSpec.parse(unit))
    if not callable(unit):
        raise UserError(f"a unit is a name or a function of a tensor, got {unit!r}")
    name = getattr(unit, "__qualname__", type(unit).__name__).replace(":", "_").replace(",", "_")
    if ELEMENTWISE.get(name) is not unit:
        while name in ELEMENTWISE or name in POOLED:
            name += "'"
        register(name, unit)
    return name


def resolve(spec: UnitSpec, rho: Tensor | None = None, centre: Tensor | None = None) -> Unit:
    """The function of one unit, its parameters bound."""
    if spec.name == "maxout":
        return lambda a: maxout(a, spec.pool)
    if spec.name == "lp":
        if rho is None or centre is None:
            raise UserError("an Lp unit has learned parameters: use it inside Plus or Predict")
        return lambda a: lp(a, spec.pool, rho, centre)
    return ELEMENTWISE[spec.name]
