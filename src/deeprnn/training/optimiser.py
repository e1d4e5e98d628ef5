"""Steps on flat parameters: SGD, momentum, Adam and AdamW, each a few in-place lines on (P, N) buffers."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from deeprnn.training.recipe import OptimiserPart

BUFFERS = {"sgd": (), "momentum": ("velocity",), "adam": ("m", "v"), "adamw": ("m", "v")}


class Optimiser:
    """The step rule with its buffers; per-member rates, and a multiplier for each parameter where given."""

    def __init__(self, part: OptimiserPart, parameters: Tensor, multipliers: Tensor | None = None) -> None:
        self.part = part
        self.multipliers = multipliers  # (N,): 0.1 for what was pretrained
        self.buffers = {name: torch.zeros_like(parameters) for name in BUFFERS[part.name]}
        if "m" in self.buffers:  # how many gradients m has seen: `forget` starts it again, v goes on
            self.buffers["seen"] = torch.zeros(
                len(parameters), 1, dtype=torch.float64, device=parameters.device
            )

    def step(self, rows: slice, parameters: Tensor, gradient: Tensor, rate: Tensor, update: Tensor) -> None:
        """Move `parameters` (p, N) of members `rows` against `gradient` at `rate` (p,); `update` counts from 0."""
        of_rows = {name: buffer[rows] for name, buffer in self.buffers.items()}
        rate = rate.to(parameters.dtype).unsqueeze(1)
        if self.multipliers is not None:
            rate = rate * self.multipliers
        if self.part.name == "sgd":
            parameters.addcmul_(gradient, rate, value=-1)
        elif self.part.name == "momentum":
            velocity = of_rows["velocity"].mul_(self.part.momentum).addcmul_(gradient, rate, value=-1)
            parameters.add_(velocity)
        else:
            self._adam(parameters, gradient, rate, update, **of_rows)

    def fused_step(
        self,
        rows: slice,
        parameters: Tensor,
        gradient: Tensor,
        factor: Tensor,
        rate: Tensor,
        update: Tensor,
        average: tuple[Tensor, Tensor] | None,
    ) -> None:
        """`step` on `factor` (p,) times the gradient, and the running average after it, by one kernel."""
        from deeprnn.training import fused  # needs an NVIDIA driver

        of_rows = {name: buffer[rows] for name, buffer in self.buffers.items()}
        correction = self._correction(update, of_rows.pop("seen")).squeeze(1) if "seen" in of_rows else None
        fused.take_step(
            self.part,
            parameters,
            gradient,
            list(of_rows.values()),
            factor,
            rate,
            correction,
            self.multipliers,
            average,
        )

    def _correction(self, update: Tensor, seen: Tensor) -> Tensor:
        """Adam's bias correction (p, 1) of the step that now comes."""
        b1, b2 = self.part.betas
        seen.add_(1)
        return torch.sqrt(1 - b2 ** (update + 1).to(torch.float64)) / (1 - b1**seen)

    def _adam(
        self, p: Tensor, g: Tensor, rate: Tensor, update: Tensor, m: Tensor, v: Tensor, seen: Tensor
    ) -> None:
        b1, b2 = self.part.betas
        correction = self._correction(update, seen).to(p.dtype)
        m.lerp_(g, 1 - b1)
        v.mul_(b2).addcmul_(g, g, value=1 - b2)
        if self.part.name == "adamw" and self.part.weight_decay:
            p.sub_(p * (rate * self.part.weight_decay))
        # ε is scaled with the correction, as in Kingma and Ba's efficient form of the algorithm.
        p.addcdiv_(m * (rate * correction), v.sqrt() + self.part.epsilon, value=-1)

    def forget(self, member: int) -> None:
        """Zero a member's direction, where its parameters jump back to earlier ones.

        Adam's v stays: it is the scale of the gradients, which is much the same there, and without it the
        next thousand steps would be up to three times too long.
        """
        for name, buffer in self.buffers.items():
            if name != "v":
                buffer[member].zero_()


def thresholds(clips: Sequence[float]) -> Tensor:
    """Each member's `optimiser.clip` as `clip_scale` takes it: where 0 stands for never, infinity."""
    return torch.tensor([clip or math.inf for clip in clips])


def clip_scale(norm: Tensor, threshold: Tensor) -> Tensor:
    """min(1, threshold / ‖g‖) for each member (Pascanu et al. 2013); 1 where the threshold is infinite."""
    return torch.where(torch.isinf(threshold), 1.0, (norm.reciprocal() * threshold).clamp(max=1.0))
