"""The rate over time, and what an epoch's validation cost decides.

`rates` is tensor code on the device, evaluated for every update; `after_epoch` runs on the host once an
epoch and says for one member: a new best? back to the best parameters? finished?
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from deeprnn.model.equations import learning_rate
from deeprnn.training.recipe import Recipe, SchedulePart

WARMUP_SHARE = 0.1
"""of all updates: a short run would end before a long warm-up does"""


@dataclass
class Member:
    """Where one member stands; plain numbers, so that a checkpoint can hold them exactly."""

    rate: float
    scale: float = 1.0
    """halving: what the rate has been multiplied by so far"""
    tau0: int | None = None
    """paper: the update at which the decay started"""
    best: float | None = None
    best_epoch: int = 0
    waiting_since: int = 0
    """the epoch from which the schedule's patience counts"""
    decay_epoch: int = 0
    finished: str = ""
    """why this member stopped; empty while it trains"""
    final: bool = False
    """whether no later limit of epochs or time lets it go on"""

    def end(self, reason: str) -> None:
        """Stop for good."""
        self.finished, self.final = reason, True


@dataclass(frozen=True)
class Verdict:
    """What follows from an epoch's validation cost."""

    improved: bool
    restore: bool = False


class Schedule:
    """Rates of P members as tensors on the device, and the members' state on the host.

    `variants` holds each member's own recipe where they differ (`training.lockstep` says in what they may).
    """

    def __init__(
        self,
        recipe: Recipe,
        rates: list[float],
        updates_per_epoch: int,
        device: torch.device,
        variants: Sequence[Recipe] = (),
    ) -> None:
        self.part, self.stop = recipe.schedule, recipe.stop
        recipes = variants or [recipe] * len(rates)
        self.parts, self.stops = [r.schedule for r in recipes], [r.stop for r in recipes]
        self.members = [Member(rate) for rate in rates]
        self.most = float(recipe.stop.epochs * updates_per_epoch or math.inf)
        self.total = torch.full((), self.most, dtype=torch.float64, device=device)
        zeros = torch.zeros(len(rates), dtype=torch.float64, device=device)
        self.base, self.tau0, self.active = zeros.clone(), zeros.clone(), zeros.clone()
        self.beta = torch.tensor([part.beta for part in self.parts], dtype=torch.float64, device=device)
        self.push()

    def push(self) -> None:
        """Copy the members' state to the device."""
        inf = math.inf
        for target, values in (
            (self.base, [m.rate * m.scale for m in self.members]),
            (self.tau0, [inf if m.tau0 is None else float(m.tau0) for m in self.members]),
            (self.active, [0.0 if m.finished else 1.0 for m in self.members]),
        ):
            target.copy_(torch.tensor(values, dtype=torch.float64))

    def expect(self, updates: float) -> None:
        """Let cosine and warm-up follow a limit of time: so many updates will fit, if the epochs are not fewer."""
        self.total.fill_(max(1.0, min(self.most, updates)))

    def rates(self, tau: Tensor) -> Tensor:
        """(P,) rates of update τ, counted from 0; a finished member's is 0."""
        tau = tau.to(torch.float64)
        rate = self.base * self.active
        if self.part.name == "paper":
            rate = learning_rate(tau, self.tau0, self.beta, rate)
        elif self.part.name == "cosine":
            wave = 0.5 * (1 + torch.cos(math.pi * (tau / self.total).clamp(max=1)))
            rate = rate * (self.part.floor + (1 - self.part.floor) * wave)
        if self.part.warmup:
            warmup = (WARMUP_SHARE * self.total).clamp(min=1, max=self.part.warmup)
            rate = rate * ((tau + 1) / warmup).clamp(max=1)
        return rate

    def after_epoch(self, member: int, epoch: int, tau: int, cost: float) -> Verdict:
        """Take an epoch's validation cost (mean nats) into account; epochs count from 1."""
        m, part = self.members[member], self.parts[member]
        enough = m.best is None or cost * part.factor < m.best
        improved = m.best is None or cost < m.best
        if improved:
            m.best, m.best_epoch = cost, epoch
        restore = False
        if part.name == "paper":
            restore = self._start_decay(m, part, epoch, tau)
        elif part.name == "halving":
            restore = self._halve(m, part, epoch, enough)
        if not m.finished:
            m.finished = self._finished(member, epoch)
        # Also where it has finished: a later limit may let it go on, as if it had never stopped.
        return Verdict(improved, restore and part.restore_best)

    def _start_decay(self, m: Member, part: SchedulePart, epoch: int, tau: int) -> bool:
        """τ0 comes after `patience` epochs without a new best: the literal first rise fires by chance."""
        if m.tau0 is not None or epoch - m.best_epoch < max(1, part.patience):
            return False
        m.tau0, m.decay_epoch = tau, epoch
        return True

    def _halve(self, m: Member, part: SchedulePart, epoch: int, enough: bool) -> bool:
        if enough:
            m.waiting_since = epoch
            return False
        if epoch - m.waiting_since < max(1, part.patience):
            return False
        m.scale, m.waiting_since = m.scale / 2, epoch
        if m.rate * m.scale < part.minimum:
            m.end(f"the rate fell below {part.minimum:g}")
        return True

    def _finished(self, member: int, epoch: int) -> str:
        m, stop = self.members[member], self.stops[member]
        if stop.epochs and epoch >= stop.epochs:
            return "1 epoch done" if stop.epochs == 1 else f"all {stop.epochs} epochs done"
        waited = epoch - max(m.best_epoch, m.decay_epoch)
        counts = self.part.name != "paper" or m.tau0 is not None
        if stop.patience and counts and waited >= stop.patience:
            return f"no new best in {waited} epochs"
        return ""

    def reopen(self, epoch: int) -> None:
        """Let members go on that the present limits would not have stopped after `epoch`."""
        for number, m in enumerate(self.members):
            if m.finished and not m.final:
                m.finished = self._finished(number, epoch)
        self.push()

    @property
    def done(self) -> bool:
        """Whether every member has finished."""
        return all(m.finished for m in self.members)

    def finish(self, reason: str) -> None:
        """End training for all members that still run."""
        for m in self.members:
            m.finished = m.finished or reason
        self.push()

    def state(self) -> list[dict[str, Any]]:
        """Plain data for a checkpoint."""
        return [asdict(m) for m in self.members]

    def load(self, state: list[dict[str, Any]]) -> None:
        """Read what `state` wrote."""
        self.members = [Member(**m) for m in state]
        self.push()
