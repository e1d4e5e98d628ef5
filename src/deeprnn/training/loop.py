"""The loop: epochs of updates, validation after each, the best parameters kept.

    trainer = Trainer(recipe, data)
    trainer.train()
    trainer.results()          # one dict a member: train, valid and test in every convention

P models train in lockstep; P = 1 is the ordinary case. Nothing here writes a file or prints: watchers do
(`keeping.Keeper` saves, `view` shows).
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from deeprnn.data.batching import Plan, music_chunks, text_chunks
from deeprnn.data.music import MusicData
from deeprnn.errors import UserError
from deeprnn.model import metrics
from deeprnn.model.models import build
from deeprnn.training import pretrain, rng
from deeprnn.training.evaluate import Data, evaluation_plan, mean_nats, score, summarise
from deeprnn.training.flat import Layout
from deeprnn.training.recipe import Recipe
from deeprnn.training.schedule import Schedule
from deeprnn.training.updater import Updater


@dataclass(frozen=True)
class MemberName:
    """One model of a population."""

    seed: int
    rate: float
    name: str


def members_of(recipe: Recipe) -> list[MemberName]:
    """Every seed at every rate."""
    if not recipe.rates:
        return [MemberName(s, recipe.optimiser.rate, f"seed-{s}") for s in recipe.seeds]
    return [MemberName(s, r, f"seed-{s}-rate-{r:g}") for s in recipe.seeds for r in recipe.rates]


class Watcher(Protocol):
    """Something that looks on while a trainer works."""

    def updated(self, trainer: Trainer) -> None:
        """After every update."""

    def epoch_ended(self, trainer: Trainer, rows: Sequence[Mapping[str, Any] | None]) -> None:
        """After every epoch: one line of metrics a member, None for one that had finished before."""


class NonFinite(UserError):
    """A loss or gradient was NaN or infinite."""


class Trainer:
    """Everything a training run is, from the recipe and the data alone."""

    def __init__(
        self,
        recipe: Recipe,
        data: Data,
        *,
        device: torch.device | str = "cpu",
        pretrained: Sequence[Mapping[str, Tensor]] | None = None,
    ) -> None:
        self.recipe, self.data, self.device = recipe, data, torch.device(device)
        self.members = members_of(recipe)
        self.spec = recipe.model.spec(data.size, data.kind != "music", recipe.regulariser.dropout)
        self.model = build(self.spec, recipe.init, seed=0).to(self.device).requires_grad_(False)
        self.layout = Layout.of(self.model)
        parameters, multipliers = self._start(pretrained)
        self.epoch, self.index, self.seconds = 1, 0, 0.0
        self.epoch_seconds = 0.0
        self._clock = time.perf_counter()
        self.length = len(self.plan(self.members[0], 1))
        if not self.length:
            raise UserError(f"{data.name}: the training part is empty")
        self.schedule = Schedule(recipe, [m.rate for m in self.members], self.length, self.device)
        seeds = [m.seed for m in self.members]
        self.updater = Updater(self.model, recipe, seeds, parameters, self.schedule, multipliers)
        self.best = parameters.clone()
        self._graphs: Any = None  # captured once, on a GPU
        self.valid_plan = evaluation_plan(data, "valid", recipe.evaluation).to(self.device)

    def _start(self, pretrained: Sequence[Mapping[str, Tensor]] | None) -> tuple[Tensor, Tensor | None]:
        """First parameters (P, N), and the rate multipliers of what comes from a first stage."""
        fresh = {
            m.seed: build(self.spec, self.recipe.init, seed=rng.mix(m.seed, rng.INIT)) for m in self.members
        }
        parameters = self.layout.pack(
            [dict(fresh[m.seed].named_parameters()) for m in self.members], self.device
        )
        if pretrained is None:
            return parameters, None
        names: tuple[str, ...] = ()
        for row, source in zip(parameters, pretrained, strict=True):
            names = pretrain.transfer(self.layout, row, source)
        return parameters, pretrain.multipliers(self.layout, names, self.recipe.pretrain.rate, parameters)

    def plan(self, member: MemberName, epoch: int) -> Plan:
        """An epoch's batches: the shared order, or a member's own."""
        part = self.recipe.data
        shared = part.order == "shared"
        lengths = None
        if self.device.type == "cpu":
            lengths = range(1, part.chunk + 1)  # no padding: few lengths only matter to captured graphs
        elif not shared:
            lengths = (part.chunk,)  # the members' chunks must have one shape to be stacked
        if isinstance(self.data, MusicData):
            seed = part.order_seed if shared else rng.mix(member.seed, rng.ORDER)
            songs = self.data.splits["train"]
            return music_chunks(
                songs, chunk=part.chunk, lanes=part.lanes, seed=seed, epoch=epoch, lengths=lengths
            )
        return text_chunks(self.data.splits["train"], chunk=part.chunk, lanes=part.lanes, lengths=lengths)

    def plans(self, epoch: int) -> list[Plan]:
        """One plan for all members, or one for each."""
        own = self.recipe.data.order == "own" and isinstance(self.data, MusicData)
        return [self.plan(m, epoch) for m in (self.members if own else self.members[:1])]

    # ---- the loop

    def train(self, watchers: Sequence[Watcher] = ()) -> None:
        """Train until every member has finished."""
        self._clock = time.perf_counter()
        while not self.schedule.done:
            self.train_epoch(watchers)
            rows = self.end_epoch()
            for watcher in watchers:
                watcher.epoch_ended(self, rows)

    def train_epoch(self, watchers: Sequence[Watcher] = ()) -> None:
        """The rest of the current epoch, from wherever it stands."""
        engine = self._engine()
        engine.load(self.plans(self.epoch))
        self.length = engine.length
        while self.index < self.length and not self.out_of_time:
            engine.step(self.index)
            self.index += 1
            self._tick()
            if self.device.type == "cpu":
                self.check_finite()
            for watcher in watchers:
                watcher.updated(self)

    def end_epoch(self) -> list[dict[str, Any] | None]:
        """Validate, decide, and begin the next epoch; the lines of metrics it gives."""
        self.check_finite()
        active = [p for p, m in enumerate(self.schedule.members) if not m.finished]
        sums, rates = self.updater.take_sums(), self.schedule.rates(self.updater.tau - 1).tolist()
        evaluated = self._evaluated()
        costs = score(self.model, evaluated[active], self.valid_plan)
        tau = int(self.updater.tau)
        rows: list[dict[str, Any] | None] = [None] * len(self.members)
        for nats, p in zip(costs, active, strict=True):
            cost = mean_nats(self.data, nats)
            if not math.isfinite(cost) or (self.index and not sums[p]["updates"]):
                self._lose(p)
                continue
            verdict = self.schedule.after_epoch(p, self.epoch, tau, cost)
            if verdict.improved:
                self.best[p].copy_(evaluated[p])
            if verdict.restore:
                self.updater.restore(p, self.best[p])
            rows[p] = self._row(sums[p], rates[p], nats, verdict.improved)
        self._tick()  # before the question: an epoch without an update would follow otherwise
        if self.out_of_time:
            self.schedule.finish(f"{self.recipe.stop.minutes:g} minutes passed")
        self.schedule.push()
        self.epoch, self.index, self.epoch_seconds = self.epoch + 1, 0, 0.0
        return rows

    def _lose(self, member: int) -> None:
        """End a member whose parameters give no numbers any more; the best ones before that stay."""
        m, named = self.schedule.members[member], self.members[member]
        if self.recipe.optimiser.nonfinite == "stop" or m.best is None:
            raise NonFinite(
                f"{named.name}: after epoch {self.epoch} the validation cost was NaN or infinite, or no update "
                f"could be applied; the last checkpoint is intact. Try a lower rate (now {named.rate:g}): "
                f"--optimiser.rate {named.rate / 4:g}"
            )
        m.finished = f"diverged in epoch {self.epoch}"

    def _evaluated(self) -> Tensor:
        part = self.recipe.optimiser
        if part.average == "tail" and self.epoch < part.average_from:
            self.updater.averaged.zero_()
            return self.updater.parameters
        return self.updater.evaluated

    def _row(self, sums: Mapping[str, float], rate: float, nats: Any, improved: bool) -> dict[str, Any]:
        kind, updates = self.data.kind, max(1.0, sums["updates"])
        valid = summarise(self.data, "valid", nats)
        return {
            "epoch": self.epoch,
            "step": int(self.updater.tau),
            "train": metrics.headline(kind, sums["nats"], int(sums["count"])),
            "valid": valid[metrics.HEADLINE[kind]],
            "best": improved,
            "rate": rate,
            "grad_norm": sums["norm"] / updates,
            "clipped": sums["clipped"] / updates,
            "seconds": round(self.seconds, 3),
            "frames_per_second": round(sums["count"] / max(self.epoch_seconds, 1e-9), 1),
        }

    def _engine(self) -> Any:
        if self.device.type == "cuda":
            from deeprnn.training.cuda_graph import GraphEngine

            self._graphs = self._graphs or GraphEngine(self.updater)
            return self._graphs
        return Eager(self.updater)

    def _tick(self) -> None:
        now = time.perf_counter()
        self.seconds += now - self._clock
        self.epoch_seconds += now - self._clock
        self._clock = now

    @property
    def out_of_time(self) -> bool:
        """Whether the time the recipe allows is used up."""
        limit = self.recipe.stop.minutes
        return bool(limit) and self.seconds >= 60 * limit

    def check_finite(self) -> None:
        """Stop where a loss or gradient was NaN or infinite; such an update has not been applied."""
        if self.recipe.optimiser.nonfinite == "skip":
            return
        bad = self.updater.bad.tolist()
        for member, step in zip(self.members, bad, strict=True):
            if step >= 0:
                raise NonFinite(
                    f"{member.name}: the loss or gradient of update {step} (epoch {self.epoch}) was NaN or "
                    f"infinite; it was not applied and the last checkpoint is intact. Try a lower rate (now "
                    f"{member.rate:g}): --optimiser.rate {member.rate / 4:g}, a smaller --optimiser.clip, or "
                    f"--optimiser.nonfinite skip to leave such updates out"
                )

    # ---- what is left at the end

    def parameters(self, member: int) -> dict[str, Tensor]:
        """A member's best parameters by name, on the CPU."""
        return {k: v.clone() for k, v in self.layout.views(self.best[member].cpu()).items()}

    def results(self, splits: Sequence[str] = ("train", "valid", "test")) -> list[dict[str, Any]]:
        """The best parameters of each member scored on every split, in every convention."""
        out: list[dict[str, Any]] = [{"best_epoch": m.best_epoch} for m in self.schedule.members]
        for split in splits:
            if not len(self.data.splits.get(split, ())):
                continue
            plan = evaluation_plan(self.data, split, self.recipe.evaluation)
            for p, nats in enumerate(score(self.model, self.best, plan)):
                out[p][split] = summarise(self.data, split, nats)
        return out


class Eager:
    """Updates straight from the plan: the CPU's engine."""

    def __init__(self, updater: Updater) -> None:
        self.updater = updater
        self.plans: list[Plan] = []

    @property
    def length(self) -> int:
        """Updates of the epoch that is loaded."""
        return len(self.plans[0])

    def load(self, plans: list[Plan]) -> None:
        """Take an epoch's batches."""
        self.plans = plans

    def step(self, index: int) -> None:
        """One update of every member."""
        self.updater.update([plan[index] for plan in self.plans])
