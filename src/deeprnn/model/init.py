"""Initialisation as the paper gives it: sparse with unit spectral norm between hidden layers, Gaussian elsewhere."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from deeprnn.errors import UserError


@dataclass(frozen=True)
class InitSpec:
    """Every setting by the role of a parameter (Sec. 5.2)."""

    input_std: float = 0.1
    """input to hidden"""
    output_std: float = 0.01
    """last layer of the output function"""
    output_hidden_std: float = 0.01
    """state to the first intermediate layer of a deep output function"""
    incoming: int = 20
    """non-zero incoming connections of a unit between hidden layers"""
    spectral_norm: float = 1.0
    """largest singular value of a matrix between hidden layers"""
    bias: float = 0.0
    rectifier_bias: float = 0.0
    output_bias: float = 0.0
    lp_order: float = 3.0
    """p of Lp units at the start"""


MUSIC = InitSpec()
CHAR = InitSpec(input_std=0.01, output_std=0.001, rectifier_bias=0.1)
WORD = InitSpec(input_std=0.1, output_std=0.1)


@torch.no_grad()
def sparse_(weight: Tensor, incoming: int, norm: float, generator: torch.Generator | None = None) -> Tensor:
    """Fill (out, in) with `incoming` Gaussian entries a row (dense if there are fewer inputs), then rescale."""
    rows, columns = weight.shape
    w = torch.randn(rows, columns, generator=generator, dtype=torch.float64)
    if columns > incoming:
        order = torch.rand(rows, columns, generator=generator).argsort(dim=1)
        w[order >= incoming] = 0.0
    if w.numel():
        w *= norm / torch.linalg.matrix_norm(w, 2)
    return weight.copy_(w)


@torch.no_grad()
def gaussian_(weight: Tensor, std: float, generator: torch.Generator | None = None) -> Tensor:
    """Fill with white noise of the given standard deviation."""
    return weight.copy_(torch.randn(weight.shape, generator=generator) * std)


@torch.no_grad()
def initialise(module: nn.Module, init: InitSpec, generator: torch.Generator | None = None) -> None:
    """Fill every parameter of the operators in `module` by its role; a part with `initialise` fills itself."""
    for part in module.modules():
        if (fill := getattr(part, "initialise", None)) is not None:
            fill(init, generator)
        for name, role in getattr(part, "roles", {}).items():
            weight = getattr(part, name)
            if is_parametrized(
                part, name
            ):  # what was read is computed: assigning finds the parameters behind it
                _fill(weight := weight.clone(), role, init, generator)
                setattr(part, name, weight)
            elif isinstance(weight, nn.Parameter):
                _fill(weight, role, init, generator)
            else:
                raise UserError(
                    f"{name} of {type(part).__name__} is computed by a hook (weight_norm, spectral_norm, pruning): "
                    "initialise first, or use torch.nn.utils.parametrizations"
                )


def _fill(p: Tensor, role: str, init: InitSpec, generator: torch.Generator | None) -> None:
    if role == "hidden":
        sparse_(p, init.incoming, init.spectral_norm, generator)
    elif role == "input":
        gaussian_(p, init.input_std, generator)
    elif role == "output_hidden":
        gaussian_(p, init.output_hidden_std, generator)
    elif role == "output":
        gaussian_(p, init.output_std, generator)
    elif role == "bias:relu":
        p.fill_(init.rectifier_bias)
    elif role == "bias:output":
        p.fill_(init.output_bias)
    elif role.startswith("bias:"):
        p.fill_(init.bias)
    elif role == "lp_rho":
        p.fill_(math.log(math.expm1(init.lp_order - 1)))
    elif role == "lp_centre":
        p.zero_()
    else:
        raise AssertionError(f"no initialisation for role {role!r}")
