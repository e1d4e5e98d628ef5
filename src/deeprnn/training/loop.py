"""The loop: epochs of updates, validation after each, the best parameters kept.

    trainer = Trainer(recipe, data)
    trainer.train()
    trainer.results()          # one dict a member: train, valid and test in every convention

P models train in lockstep; P = 1 is the ordinary case. Nothing here writes a file or prints: watchers do
(`saving.RunSaver` saves, `view` shows).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from deeprnn.data.batching import EpochPlan, music_chunks, text_chunks
from deeprnn.data.music import MusicData
from deeprnn.data.transposing import randomly_transposed
from deeprnn.errors import UserError
from deeprnn.model import metrics
from deeprnn.model.models import build
from deeprnn.training import rng
from deeprnn.training.engine import Engine, engine_for
from deeprnn.training.evaluate import Data, evaluation_plan, mean_nats, scorable, score, summarise, visible
from deeprnn.training.flat import Layout
from deeprnn.training.members import MemberName, members_of, named
from deeprnn.training.ranks import Ranks
from deeprnn.training.recipe import Recipe
from deeprnn.training.schedule import Schedule
from deeprnn.training.transfer import Source, Transfer, symbols_of
from deeprnn.training.updater import Updater


class Watcher(Protocol):
    """Something that is told how a trainer gets on."""

    def updated(self, trainer: Trainer) -> None:
        """After every update."""

    def epoch_ended(self, trainer: Trainer, rows: Sequence[Mapping[str, Any] | None]) -> None:
        """After every epoch: one line of metrics a member, None for one that had finished before."""


@runtime_checkable
class ScoringWatcher(Protocol):
    """A watcher that is also told how the scoring of a split gets on."""

    def scored(self, trainer: Trainer, split: str, done: int, total: int) -> None:
        """After every batch of a split: so many of all are done."""


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
        pretrained: Sequence[Source | None] | None = None,
        engine: Callable[[Updater], Engine] = engine_for,
        variants: Sequence[Recipe] = (),
        ranks: Ranks | None = None,
    ) -> None:
        """`variants`: each member's own recipe where seed and rate are not all they differ in (`lockstep`)."""
        data = visible(data, recipe.evaluation)
        self.recipe, self.data, self.device = recipe, data, torch.device(device)
        self.ranks = ranks or Ranks()
        self.met = True  # whether the last update ended with a meeting of the ranks
        self.variants = variants
        self.members = [named(r, p) for p, r in enumerate(variants)] or members_of(recipe)
        self.spec = recipe.model.spec(data.size, data.kind != "music", recipe.regulariser.dropout)
        self.model = build(self.spec, recipe.init, seed=0).to(self.device).requires_grad_(False)
        self.layout = Layout.of(self.model)
        self._text: EpochPlan | None = None
        self.remarks: list[str] = []  # what a person may want to know of its start
        parameters, multipliers = self._start(pretrained)
        self.epoch, self.index, self.seconds = 1, 0, 0.0
        self.epoch_seconds = 0.0
        self._clock = time.perf_counter()
        self._estimated_at = 0.0
        self.length = len(self.plan(self.members[0], 1))
        if not self.length:
            raise UserError(f"{data.name}: the training part is empty")
        rates = [m.rate for m in self.members]
        self.schedule = Schedule(recipe, rates, self.length, self.device, variants)
        for member, source in zip(self.schedule.members, pretrained or (), strict=pretrained is not None):
            if source is None:
                member.end("its first stage diverged")
        self.schedule.push()
        seeds = [m.seed for m in self.members]
        self.updater = Updater(
            self.model, recipe, seeds, parameters, self.schedule, multipliers, self.ranks, variants
        )
        self.best = parameters.clone()
        self.engine = engine(self.updater)
        self.valid_plan = evaluation_plan(data, "valid", recipe.evaluation).to(self.device)

    def _start(self, pretrained: Sequence[Source | None] | None) -> tuple[Tensor, Tensor | None]:
        """First parameters (P, N), and the rate multipliers of what comes from another model."""
        inits = [r.init for r in self.variants] or [self.recipe.init] * len(self.members)
        starts = [(m.seed, init) for m, init in zip(self.members, inits, strict=True)]
        fresh = {(seed, init): build(self.spec, init, seed=rng.mix(seed, rng.INIT)) for seed, init in starts}
        parameters = self.layout.pack(
            [dict(fresh[start].named_parameters()) for start in starts], self.device
        )
        multipliers = None
        for row, source in zip(parameters, pretrained or [None] * len(parameters), strict=True):
            if source is None:
                continue
            transfer = Transfer(self.layout, self.recipe.model, self.data, source)
            transfer.copy(row)
            multipliers = transfer.multipliers(self.recipe.pretrain.rate, parameters)
            self.remarks = transfer.report(symbols_of(self.data))
        return parameters, multipliers

    def plan(self, member: MemberName, epoch: int) -> EpochPlan:
        """An epoch's batches of this rank's lanes: the shared order, or a member's own."""
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
            if member.transposed:
                drawn = rng.mix(part.order_seed if shared else member.seed, rng.TRANSPOSE, epoch)
                songs = randomly_transposed(songs, member.transposed, drawn)
            plan = music_chunks(
                songs, chunk=part.chunk, lanes=part.lanes, seed=seed, epoch=epoch, lengths=lengths
            )
            return plan.of_lanes(self.ranks.share(part.lanes))
        if self._text is None:  # a text has one order, whatever the member and the epoch
            ids = self.data.splits["train"]
            plan = text_chunks(ids, chunk=part.chunk, lanes=part.lanes, lengths=lengths)
            self._text = plan.of_lanes(self.ranks.share(part.lanes))
        return self._text

    def plans(self, epoch: int) -> list[EpochPlan]:
        """One plan for all members, or one for each."""
        if self.recipe.data.order == "own" and isinstance(self.data, MusicData):
            return [self.plan(m, epoch) for m in self.members]
        kinds = {m.transposed: m for m in self.members}  # of one order, but songs may stand in other keys
        if len(kinds) == 1:
            return [self.plan(self.members[0], epoch)]
        plans = {transposed: self.plan(member, epoch) for transposed, member in kinds.items()}
        return [plans[m.transposed] for m in self.members]

    # ---- the loop

    def train(self, watchers: Sequence[Watcher] = ()) -> None:
        """Train until every member has finished."""
        self._clock = time.perf_counter()
        while not self.schedule.done:
            self.train_epoch(watchers)
            rows = self.end_epoch(watchers)
            for watcher in watchers:
                watcher.epoch_ended(self, rows)

    def train_epoch(self, watchers: Sequence[Watcher] = ()) -> None:
        """The rest of the current epoch, from wherever it stands."""
        engine = self.engine
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
        self._tick(now=True)  # ranks may have met last in the epoch before

    def end_epoch(self, watchers: Sequence[Watcher] = ()) -> list[dict[str, Any] | None]:
        """Validate, decide, and begin the next epoch; the lines of metrics it gives.

        Nothing has changed when a watcher stops it while it scores: the epoch's end can come again.
        """
        self.check_finite(saving=True)
        active = [p for p, m in enumerate(self.schedule.members) if not m.finished]
        evaluated = self._evaluated()
        costs = score(
            self.model, evaluated[active], self.valid_plan, self._progress("valid", watchers), self.ranks
        )
        sums, rates = self.updater.take_sums(), self.schedule.rates(self.updater.tau - 1).tolist()
        tau = int(self.updater.tau)
        rows: list[dict[str, Any] | None] = [None] * len(self.members)
        for nats, p in zip(costs, active, strict=True):
            cost = mean_nats(self.data, nats)
            if not math.isfinite(cost) or (self.index and not sums[p]["updates"]):
                self._end_diverged(p)
                continue
            verdict = self.schedule.after_epoch(p, self.epoch, tau, cost)
            if verdict.improved:
                self.best[p].copy_(evaluated[p])
            if verdict.restore:
                self.updater.restore(p, self.best[p])
            rows[p] = self._row(sums[p], rates[p], nats, verdict.improved)
        self._tick(now=True)  # before the question: an epoch without an update would follow otherwise
        if self.out_of_time:
            self._end_by_time()
        self.schedule.push()
        self.epoch, self.index, self.epoch_seconds = self.epoch + 1, 0, 0.0
        return rows

    def _end_diverged(self, member: int) -> None:
        """End a member whose parameters give no numbers any more; the best ones before that stay."""
        m, member_name = self.schedule.members[member], self.members[member]
        m.end(f"diverged in epoch {self.epoch}")
        nothing_left = all(other.finished and other.best is None for other in self.schedule.members)
        if self.recipe.optimiser.nonfinite == "stop" or nothing_left:
            raise NonFinite(
                f"{member_name.name}: after epoch {self.epoch} the validation cost was NaN or infinite, or no update "
                f"could be applied; the last checkpoint is intact. Try a lower rate (now {member_name.rate:g}): "
                f"--optimiser.rate {member_name.rate / 4:g}"
            )

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
            "valid": valid[metrics.HEADLINE[kind].key],
            "best": improved,
            "rate": rate,
            "grad_norm": sums["norm"] / updates,
            "clipped": sums["clipped"] / updates,
            "seconds": round(self.seconds, 3),
            "frames_per_second": round(sums["count"] / max(self.epoch_seconds, 1e-9), 1),
        }

    def _tick(self, now: bool = False) -> None:
        clock = time.perf_counter()
        elapsed = self.ranks.elapsed(clock - self._clock, now)
        self.met = elapsed is not None
        if elapsed is None:
            return
        self.seconds += elapsed
        self.epoch_seconds += elapsed
        self._clock = clock
        limit = 60 * self.recipe.stop.minutes
        # From a tenth of the time on, when what is slow at first no longer counts for much; fifty estimates in all.
        if limit and self.seconds >= max(0.1 * limit, self._estimated_at + 0.02 * limit):
            self._estimated_at = self.seconds
            self.schedule.expect(int(self.updater.tau) * limit / self.seconds)

    def reopen(self) -> None:
        """Let members go on that the present limits of epochs and time would not have stopped."""
        self.schedule.reopen(self.epoch - 1)
        if self.out_of_time:
            self._end_by_time()

    def _end_by_time(self) -> None:
        self.schedule.finish(f"{self.recipe.stop.minutes:g} minutes passed")

    @property
    def out_of_time(self) -> bool:
        """Whether the time the recipe allows is used up."""
        limit = self.recipe.stop.minutes
        return bool(limit) and self.seconds >= 60 * limit

    def check_finite(self, saving: bool = False) -> None:
        """Stop where a loss or gradient was NaN or infinite; such an update has not been applied.

        `saving` also checks the parameters, which no checkpoint should hold if they are infinite: a step can leave
        the range of numbers though its gradient did not.
        """
        if self.recipe.optimiser.nonfinite == "skip":
            return
        bad = self.updater.bad.tolist()
        for p, (member, step) in enumerate(zip(self.members, bad, strict=True)):
            if step < 0 and not saving:
                continue
            broken = not bool(torch.isfinite(self.updater.parameters[p]).all())
            if step < 0 and not broken:
                continue
            # The update that met infinite parameters is not to blame, but the one before it, which made them so.
            last = int(self.updater.tau) if step < 0 else step
            cause = (
                f"update {last - 1} (epoch {self.epoch}) made parameters NaN or infinite; the"
                if broken
                else f"the loss or gradient of update {step} (epoch {self.epoch}) was NaN or infinite; it was not "
                "applied and the"
            )
            raise NonFinite(
                f"{member.name}: {cause} last checkpoint is intact. Try a lower rate (now {member.rate:g}): "
                f"--optimiser.rate {member.rate / 4:g}, a smaller --optimiser.clip, or "
                f"--optimiser.nonfinite skip to leave such updates out"
            )

    # ---- what is left at the end

    def parameters(self, member: int) -> dict[str, Tensor]:
        """A member's best parameters by name, on the CPU."""
        return {k: v.clone() for k, v in self.layout.views(self.best[member].cpu()).items()}

    def results(self, watchers: Sequence[Watcher] = ()) -> list[dict[str, Any] | None]:
        """The best parameters of each member scored on every split that the recipe lets it see, in every convention.

        None for a member that diverged before it had any.
        """
        out: list[dict[str, Any] | None] = [
            None if m.best is None else {"best_epoch": m.best_epoch} for m in self.schedule.members
        ]
        scored = [p for p, result in enumerate(out) if result is not None]
        for split in self.scored_splits:
            plan = evaluation_plan(self.data, split, self.recipe.evaluation)
            progress = self._progress(split, watchers)
            nats = score(self.model, self.best[scored], plan, progress, self.ranks)
            for p, sums in zip(scored, nats, strict=True):
                out[p][split] = summarise(self.data, split, sums)  # type: ignore[index]
        return out

    @property
    def scored_splits(self) -> list[str]:
        """The splits that have something to score."""
        return [split for split in ("train", "valid", "test") if scorable(self.data, split)]

    def _progress(self, split: str, watchers: Sequence[Watcher]) -> Callable[[int, int], None]:
        """What tells the watchers how far the scoring of a split has come."""
        interested = [watcher for watcher in watchers if isinstance(watcher, ScoringWatcher)]

        def tell(done: int, total: int) -> None:
            for watcher in interested:
                watcher.scored(self, split, done, total)

        return tell
