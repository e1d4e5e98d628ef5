"""The sweep's coordinator: asks for trials, packs them, has them trained, prunes, and writes down how each ended."""

from __future__ import annotations

import shutil
import traceback
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from deeprnn.errors import UserError
from deeprnn.files import CannotWrite
from deeprnn.sweeps.engines import Engine, WorkerLost
from deeprnn.sweeps.pack import Pack, Result, read_pack, trial_folder
from deeprnn.sweeps.spec import Spec, one_seed_each
from deeprnn.sweeps.storage import Store
from deeprnn.sweeps.study import Study, Trial, best
from deeprnn.sweeps.worker import train_and_report
from deeprnn.training.lockstep import together

POLL_SECONDS = 0.2
"""between two readings of the board"""
ATTEMPTS = 5
"""at a pack whose workers die one after the other, none of them an epoch further on"""
PACKS_AHEAD = 8
"""packs' worth of trials that are asked for at once where no trial depends on another's outcome"""
SHARED_DIVISOR = 4
"""one part in so many of the trials that are left is asked for at once where other sweeps may want some too"""
BEST_KEPT = 5
"""best trials whose parameters are kept"""


class SweepObserver(Protocol):
    """Shows a sweep to a person while it runs."""

    def changed(self, study: Study, running: int) -> None:
        """Some trial got on."""

    def ended(self, trial: Trial) -> None:
        """A trial came to its end."""

    def say(self, text: str) -> None:
        """Show a remark."""


@dataclass(frozen=True)
class Settings:
    """Where a sweep runs and how wide."""

    folder: Path
    pack: int
    """members of a population at most"""
    storage: str = ""
    store: str = ""
    """address of a folder that all machines reach, for checkpoints"""


class Coordinator:
    """Carries trials from the study to the engine and scores back; nobody else writes into either."""

    def __init__(
        self,
        spec: Spec,
        settings: Settings,
        engine: Engine,
        study: Study,
        store: Store | None,
        view: SweepObserver,
        received: Sequence[int],
    ) -> None:
        self.spec, self.settings, self.engine, self.study = spec, settings, engine, study
        self.store, self.view, self.received = store, view, received
        self.waiting: list[Pack] = []
        self.running: dict[Future[Any], Pack] = {}
        self.stopped: dict[int, list[int]] = {}
        self.attempts: dict[int, int] = {}
        self.reached: dict[int, int] = {}
        """of a pack: the last epoch that was heard of"""
        self.curves: dict[tuple[int, int], float] = {}
        """of a pack and its member: the best score so far"""
        self.with_parameters = self._folders_with_parameters()
        self.interrupted = False

    def run(self) -> None:
        """Until every trial has ended, or everybody shall stop."""
        try:
            self._loop()
        except WorkerLost as error:  # not of a worker: of the board itself
            raise UserError(f"{error}: what was saved stays, and the same command goes on") from error
        except BaseException:
            with suppress(WorkerLost):
                self.engine.board.interrupt()  # workers save and stop, instead of training on for nobody
            raise

    def _loop(self) -> None:
        self._resume_packs()
        while True:
            if self.received and not self.interrupted:
                self.interrupted = True
                self.engine.board.interrupt()
                if self.running:
                    self.view.say("saving what trains; a second time stops at once")
            if not self.interrupted:
                self._fill_slots()
            if not self.running:
                return
            done, _ = wait(self.running, timeout=POLL_SECONDS, return_when=FIRST_COMPLETED)
            self._read_board()
            for future in done:
                self._pack_ended(self.running.pop(future), future)
            self.view.changed(self.study, sum(len(set(p.trials)) for p in self.running.values()))

    # ---- beginning

    def _resume_packs(self) -> None:
        """Go on with what an earlier process began: its packs as they are, other trials in new ones."""
        unfinished = {trial.number: trial for trial in self.study.unfinished()}
        packed: set[int] = set()
        for path in sorted((self.settings.folder / "packs").glob("*/pack.json")):
            pack = read_pack(path)
            resumed = {*pack.trials} & unfinished.keys() if pack else set()
            if pack is None or not resumed:
                if pack is not None:
                    self._fetch(pack)
                self._remove_pack(path.parent)
                continue
            self.stopped[pack.number] = [m for m, t in enumerate(pack.trials) if t not in unfinished]
            packed |= resumed
            self.waiting.append(pack)
        rest = [trial for number, trial in unfinished.items() if number not in packed]
        if unfinished:
            self.view.say(f"going on with {len(unfinished)} begun trial{'s' * (len(unfinished) > 1)}")
        self._form_packs(rest)

    def _fill_slots(self) -> None:
        """Keep every slot of the engine busy."""
        while len(self.running) < self.engine.slots:
            if not self.waiting:
                free = self.engine.slots - len(self.running)
                ahead = 1 if self.spec.sampler == "tpe" else PACKS_AHEAD
                trials = max(1, self.settings.pack // len(self.spec.recipe.seeds)) * free * ahead
                if self.study.url:
                    trials = min(trials, max(free, self.study.left // SHARED_DIVISOR))
                self._form_packs(self.study.ask(trials))
            if not self.waiting:
                return
            self._submit(self.waiting.pop(0))

    def _form_packs(self, trials: Sequence[Trial]) -> None:
        """Packs of those trials that can train together; one whose recipe is refused has failed."""
        owners, recipes = [], []
        for trial in trials:
            try:
                seeds = one_seed_each(self.spec.recipe_at(trial.point))
            except UserError as error:  # values that do not go together
                self._fail(trial.number, str(error))
                continue
            owners += [trial.number] * len(seeds)
            recipes += seeds
        for group in together(recipes, max(self.settings.pack, len(self.spec.recipe.seeds))):
            pack = Pack(
                self._next_number(), tuple(owners[i] for i in group), tuple(recipes[i] for i in group)
            )
            pack.write(self.settings.folder)
            self.waiting.append(pack)

    def _next_number(self) -> int:
        folder = self.settings.folder / "packs"
        numbers = [int(p.name) for p in folder.glob("*") if p.name.isdecimal()] if folder.exists() else []
        return max([*numbers, *self.attempts, -1]) + 1

    def _submit(self, pack: Pack) -> None:
        self.attempts[pack.number] = self.attempts.get(pack.number, 0) + 1
        stopped = self.stopped.get(pack.number, [])
        root = str(self.settings.folder.absolute())
        future = self.engine.submit(train_and_report, pack, root, tuple(stopped), self.store)
        self.running[future] = pack

    # ---- while they train

    def _read_board(self) -> None:
        """What workers told since: into the study, and back who shall stop."""
        packs = {pack.number: pack for pack in self.running.values()}
        for number, rows in self.engine.board.drain():
            if number in packs:
                self._record_epoch(packs[number], rows)

    def _record_epoch(self, pack: Pack, rows: Sequence[Mapping[str, Any] | None]) -> None:
        for member, row in enumerate(rows):
            if row is not None:
                key = (pack.number, member)
                self.curves[key] = min(row["valid"], self.curves.get(key, row["valid"]))
        epoch = max((row["epoch"] for row in rows if row is not None), default=0)
        if epoch > self.reached.get(pack.number, 0):  # machines that are taken away are not its fault
            self.reached[pack.number], self.attempts[pack.number] = epoch, 1
        for trial, members in self._training(pack).items():
            if any(rows[m] is not None for m in members):
                scores = [self.curves[pack.number, m] for m in members if (pack.number, m) in self.curves]
                if len(scores) == len(members) and self.study.report(trial, epoch, sum(scores) / len(scores)):
                    self._prune(pack, trial, members)

    def _training(self, pack: Pack) -> dict[int, list[int]]:
        """A pack's trials that have not been stopped, and the members of each."""
        stopped = {*self.stopped.get(pack.number, ())}
        return {trial: members for trial, members in pack.members.items() if not {*members} & stopped}

    def _prune(self, pack: Pack, trial: int, members: Sequence[int]) -> None:
        self.study.prune(trial)
        self.stopped.setdefault(pack.number, []).extend(members)
        self.engine.board.stop(pack.number, members)
        self._announce(trial)

    # ---- ending

    def _pack_ended(self, pack: Pack, future: Future[Any]) -> None:
        error = future.exception()
        if isinstance(error, CannotWrite):
            raise error  # a full disk is nobody's trial
        if isinstance(error, WorkerLost) and self.attempts[pack.number] < ATTEMPTS:
            self.view.say(f"pack {pack.number}: {error}; it goes on from its last checkpoint")
            self.waiting.insert(0, pack)
            return
        results: list[Result] | None = None if error is not None else future.result()
        if error is None and results is None:
            return  # interrupted: saved, to be gone on with
        training = self._training(pack)  # others were announced when they were stopped
        if error is not None and len(training) > 1:
            self._retry_separately(pack, training, _reason(error))
            return
        self._fetch(pack)  # before a trial counts as ended, for nobody looks for its files again then
        for trial, members in training.items():
            if results is not None:
                self._complete(trial, [results[m] for m in members])
            elif error is not None:
                self._fail(trial, _reason(error))
        self._remove_pack(self.settings.folder / pack.folder)
        self._drop_parameters(pack.trials)

    def _retry_separately(self, pack: Pack, trials: Collection[int], why: str) -> None:
        """Train the trials of a pack that crashed each by itself: only the one at fault shall fail."""
        self.view.say(f"pack {pack.number}: {why}; its trials are trained one at a time")
        for trial in self.study.trials():
            if trial.number in trials:
                self._form_packs([trial])
        self._remove_pack(self.settings.folder / pack.folder)

    def _complete(self, trial: int, results: Sequence[Result]) -> None:
        failed = next((r for r in results if r.failed or r.valid is None), None)
        if failed is not None:
            self._fail(trial, failed.reason)
            return
        self.study.complete(trial, sum(r.valid for r in results) / len(results))  # type: ignore[misc]
        self._announce(trial)

    def _fail(self, trial: int, reason: str) -> None:
        self.study.fail(trial, reason)
        self._announce(trial)

    def _announce(self, number: int) -> None:
        self.view.ended(self.study.trial(number))

    def _remove_pack(self, folder: Path) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        if self.store is not None:
            self.store.remove(folder.relative_to(self.settings.folder).as_posix())

    def _fetch(self, pack: Pack) -> None:
        """Bring the members' files here from where their worker put them."""
        if self.store is not None:
            for home in pack.homes:
                self.store.download(home, self.settings.folder / home)
                self.store.remove(home)

    def _folders_with_parameters(self) -> set[int]:
        root = self.settings.folder / "trials"
        names = {path.relative_to(root).parts[0] for path in root.glob("**/best.*")}
        return {int(name) for name in names if name.isdecimal()}

    def _drop_parameters(self, ended: Collection[int]) -> None:
        """Keep the parameters of the best trials alone: a thousand models are many gigabytes."""
        self.with_parameters |= {*ended}
        trials = self.study.trials()
        training = [t for t in trials if t.state == "running"]
        keep = {t.number for t in (*best(trials, BEST_KEPT), *training)}
        for number in self.with_parameters - keep:
            for path in (self.settings.folder / trial_folder(number)).glob("**/best.*"):
                path.unlink(missing_ok=True)
        self.with_parameters &= keep


def _reason(error: BaseException) -> str:
    if isinstance(error, UserError | WorkerLost):
        return str(error)
    return " ".join("".join(traceback.format_exception_only(error)).split())  # a reason is one line
