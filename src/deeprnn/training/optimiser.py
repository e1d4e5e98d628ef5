"""Steps on flat parameters: SGD, momentum, Adam and AdamW, each a few in-place lines on (P, N) buffers."""

from __future__ import annotations

import torch
from torch import Tensor

from deeprnn.recipe import OptimiserPart

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
        self.scratch = torch.empty_like(parameters[:1])

    def step(self, rows: slice, parameters: Tensor, gradient: Tensor, rate: Tensor, update: Tensor) -> None:
        """Move `parameters` (p, N) of members `rows` against `gradient` at `rate` (p,); `update` counts from 0."""
        own = {name: buffer[rows] for name, buffer in self.buffers.items()}
        rate = rate.to(parameters.dtype).unsqueeze(1)
        if self.multipliers is not None:
            rate = rate * self.multipliers
        if self.part.name == "sgd":
            parameters.addcmul_(gradient, rate, value=-1)
        elif self.part.name == "momentum":
            velocity = own["velocity"].mul_(self.part.momentum).addcmul_(gradient, rate, value=-1)
            parameters.add_(velocity)
        else:
            self._adam(parameters, gradient, rate, update, **own)

    def _adam(
        self, p: Tensor, g: Tensor, rate: Tensor, update: Tensor, m: Tensor, v: Tensor, seen: Tensor
    ) -> None:
        b1, b2 = self.part.betas
        t = (update + 1).to(torch.float64)
        seen.add_(1)
        m.lerp_(g, 1 - b1)
        v.mul_(b2).addcmul_(g, g, value=1 - b2)
        correction = (torch.sqrt(1 - b2**t) / (1 - b1**seen)).to(p.dtype)
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


def clip_scale(norm: Tensor, threshold: float) -> Tensor:
    """min(1, threshold / ‖g‖) for each member; 0 for a threshold means never clipped (Pascanu et al. 2013)."""
    if not threshold:
        return torch.ones_like(norm)
    return (threshold / norm).clamp(max=1.0)
