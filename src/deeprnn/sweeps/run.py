"""The sweep's coordinator: asks for trials, packs them, has them trained, prunes, and writes down how each ended."""

from __future__ import annotations

import json
import shutil
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from threading import Lock
from typing import Any, Protocol

from deeprnn.errors import UserError
from deeprnn.files import CannotWrite, write_json
from deeprnn.runs.locking import lock
from deeprnn.runs.reading import read_json
from deeprnn.sweeps.engines import ASK, Board, Engine, Lost, Wish
from deeprnn.sweeps.folder import SWEEP, open_study, write_sweep
from deeprnn.sweeps.pack import Pack, Result, home_of, train_pack
from deeprnn.sweeps.spec import Spec, members
from deeprnn.sweeps.storage import Store
from deeprnn.sweeps.study import Study, Trial, best
from deeprnn.training import saving, session
from deeprnn.training.lockstep import together
from deeprnn.training.recipe import DataPart, Recipe

TICK = 0.2
"""seconds between two looks at what workers tell"""
ATTEMPTS = 5
"""at a pack whose workers die one after the other, none of them an epoch further on"""
AHEAD = 8
"""packs' worth of trials that are asked for at once where no trial depends on another's outcome"""
SHARE = 4
"""one part in so many of the trials that are left is asked for at once where other sweeps may want some too"""
KEPT = 5
"""best trials whose parameters are kept"""
MOST_JSON = 2**24


class SweepObserver(Protocol):
    """What a person sees of a sweep."""

    def changed(self, study: Study, running: int) -> None:
        """Some trial got on."""

    def ended(self, trial: Trial) -> None:
        """A trial came to its end."""

    def say(self, text: str) -> None:
        """A remark."""


@dataclass(frozen=True)
class Settings:
    """Where a sweep runs and how wide."""

    folder: Path
    pack: int
    """members of a population at most"""
    storage: str = ""
    store: str = ""
    """address of a folder that all machines reach, for checkpoints"""


@dataclass
class Outcome:
    """How it ended."""

    finished: bool
    trials: list[Trial] = field(default_factory=list)
    importances: dict[str, float] = field(default_factory=dict)
    score: dict[str, Any] | None = None
    """of the winner on test, if that was asked for"""


def default_pack(device: str) -> int:
    """Models that train in lockstep: a GPU is hardly slower with sixteen; a CPU serves them one after the other."""
    return 16 if device.startswith("cuda") else 4


def run_sweep(
    spec: Spec, settings: Settings, engine: Engine, view: SweepObserver, received: Sequence[int] = ()
) -> Outcome:
    """Run or go on with a sweep in its folder, which this process holds meanwhile.

    One that has ended needs neither its data nor its engine any more.
    """
    if settings.pack < 1:
        raise UserError(f"--pack must be at least 1, got {settings.pack}")
    folder = settings.folder
    _load.cache_clear()  # files may have changed since another sweep of this process
    if not (folder / SWEEP).exists():
        _data_of(spec.recipe)  # what cannot be read is an error before there is a folder
    with lock(folder):
        study = open_study(spec, folder, settings.storage)
        with study.answering():
            write_sweep(spec, folder)
            outcome = outcome_of(study)
            if outcome.finished:
                return outcome
            _data_of(spec.recipe)
            store = Store(settings.store) if settings.store else None
            if store is not None:
                store.check()
            with engine:
                _Coordinator(spec, settings, engine, study, store, view, received).run()
            return outcome_of(study)


def outcome_of(study: Study) -> Outcome:
    """How a sweep stands."""
    trials = study.trials()
    ended = all(t.state != "running" for t in trials) and len(trials) == study.spec.trials
    return Outcome(ended, trials, study.importances() if ended else {}, study.score)


class _Coordinator:
    """Everything between the study and the engine; the only one that writes into either."""

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
            self._conduct()
        except Lost as error:  # not of a worker: of the board itself
            raise UserError(f"{error}: what was saved stays, and the same command goes on") from error
        except BaseException:
            with suppress(Lost):
                self.engine.board.interrupt()  # workers save and stop, instead of training on for nobody
            raise

    def _conduct(self) -> None:
        self._take_up()
        while True:
            if self.received and not self.interrupted:
                self.interrupted = True
                self.engine.board.interrupt()
                if self.running:
                    self.view.say("saving what trains; a second time stops at once")
            if not self.interrupted:
                self._fill()
            if not self.running:
                return
            done, _ = wait(self.running, timeout=TICK, return_when=FIRST_COMPLETED)
            self._hear()
            for future in done:
                self._ended(self.running.pop(future), future)
            self.view.changed(self.study, sum(len(set(p.trials)) for p in self.running.values()))

    # ---- beginning

    def _take_up(self) -> None:
        """Go on with what an earlier process began: its packs as they are, other trials in new ones."""
        unfinished = {trial.number: trial for trial in self.study.unfinished()}
        known: set[int] = set()
        for path in sorted((self.settings.folder / "packs").glob("*/pack.json")):
            pack = self._read_pack(path)
            alive = {*pack.trials} & unfinished.keys() if pack else set()
            if pack is None or not alive:
                if pack is not None:
                    self._fetch(pack)
                self._remove_pack(path.parent)
                continue
            self.stopped[pack.number] = [m for m, t in enumerate(pack.trials) if t not in unfinished]
            known |= alive
            self.waiting.append(pack)
        rest = [trial for number, trial in unfinished.items() if number not in known]
        if unfinished:
            self.view.say(f"going on with {len(unfinished)} begun trial{'s' * (len(unfinished) > 1)}")
        self._pack(rest)

    def _fill(self) -> None:
        """Keep every slot of the engine busy."""
        while len(self.running) < self.engine.slots:
            if not self.waiting:
                free = self.engine.slots - len(self.running)
                ahead = 1 if self.spec.sampler == "tpe" else AHEAD
                trials = max(1, self.settings.pack // len(self.spec.recipe.seeds)) * free * ahead
                if self.study.url:
                    trials = min(trials, max(free, self.study.left // SHARE))
                self._pack(self.study.ask(trials))
            if not self.waiting:
                return
            self._submit(self.waiting.pop(0))

    def _pack(self, trials: Sequence[Trial]) -> None:
        """Packs of those trials that can train together; one whose recipe is refused has failed."""
        owners, recipes = [], []
        for trial in trials:
            try:
                own = members(self.spec.recipe_at(trial.point))
            except UserError as error:  # values that do not go together
                self._fail(trial.number, str(error))
                continue
            owners += [trial.number] * len(own)
            recipes += own
        for group in together(recipes, max(self.settings.pack, len(self.spec.recipe.seeds))):
            pack = Pack(
                self._next_number(), tuple(owners[i] for i in group), tuple(recipes[i] for i in group)
            )
            place = self.settings.folder / pack.folder
            place.mkdir(parents=True, exist_ok=True)
            plain = {"trials": pack.trials, "recipes": [r.to_dict() for r in pack.recipes]}
            write_json(place / "pack.json", plain)
            self.waiting.append(pack)

    def _next_number(self) -> int:
        folder = self.settings.folder / "packs"
        numbers = [int(p.name) for p in folder.glob("*") if p.name.isdecimal()] if folder.exists() else []
        return max([*numbers, *self.attempts, -1]) + 1

    def _read_pack(self, path: Path) -> Pack | None:
        from deeprnn.training.recipe import Recipe

        with suppress(UserError, OSError, KeyError, TypeError, ValueError):  # cut off while it was written
            plain = read_json(path, MOST_JSON)
            recipes = tuple(Recipe.from_dict(r) for r in plain["recipes"])
            if len(recipes) == len(plain["trials"]) > 0:
                return Pack(int(path.parent.name), tuple(int(t) for t in plain["trials"]), recipes)
        return None

    def _submit(self, pack: Pack) -> None:
        self.attempts[pack.number] = self.attempts.get(pack.number, 0) + 1
        stopped = self.stopped.get(pack.number, [])
        root = str(self.settings.folder.absolute())
        future = self.engine.submit(work, pack, root, tuple(stopped), self.store)
        self.running[future] = pack

    # ---- while they train

    def _hear(self) -> None:
        """What workers told since: into the study, and back who shall stop."""
        packs = {pack.number: pack for pack in self.running.values()}
        for number, rows in self.engine.board.drain():
            if number in packs:
                self._heard(packs[number], rows)

    def _heard(self, pack: Pack, rows: Sequence[Mapping[str, Any] | None]) -> None:
        for member, row in enumerate(rows):
            if row is not None:
                key = (pack.number, member)
                self.curves[key] = min(row["valid"], self.curves.get(key, row["valid"]))
        epoch = max((row["epoch"] for row in rows if row is not None), default=0)
        if epoch > self.reached.get(pack.number, 0):  # machines that are taken away are not its fault
            self.reached[pack.number], self.attempts[pack.number] = epoch, 1
        for trial in dict.fromkeys(pack.trials):
            own = [m for m, t in enumerate(pack.trials) if t == trial]
            if any(rows[m] is not None for m in own) and not {*own} & {*self.stopped.get(pack.number, ())}:
                scores = [self.curves[pack.number, m] for m in own if (pack.number, m) in self.curves]
                if len(scores) == len(own) and self.study.report(trial, epoch, sum(scores) / len(own)):
                    self._prune(pack, trial, own)

    def _prune(self, pack: Pack, trial: int, own: Sequence[int]) -> None:
        self.study.prune(trial)
        self.stopped.setdefault(pack.number, []).extend(own)
        self.engine.board.stop(pack.number, own)
        self._tell(trial)

    # ---- ending

    def _ended(self, pack: Pack, future: Future[Any]) -> None:
        error = future.exception()
        if isinstance(error, CannotWrite):
            raise error  # a full disk is nobody's trial
        if isinstance(error, Lost) and self.attempts[pack.number] < ATTEMPTS:
            self.view.say(f"pack {pack.number}: {error}; it goes on from its last checkpoint")
            self.waiting.insert(0, pack)
            return
        results: list[Result] | None = None if error is not None else future.result()
        if error is None and results is None:
            return  # interrupted: saved, to be gone on with
        stopped = {*self.stopped.get(pack.number, ())}
        members = {trial: [m for m, t in enumerate(pack.trials) if t == trial] for trial in pack.trials}
        alive = {
            trial: own for trial, own in members.items() if not {*own} & stopped
        }  # others were told already
        if error is not None and len(alive) > 1:
            self._take_apart(pack, alive, _told(error))
            return
        self._fetch(pack)  # before a trial counts as ended, for nobody looks for its files again then
        for trial, own in alive.items():
            if results is not None:
                self._conclude(trial, [results[m] for m in own])
            elif error is not None:
                self._fail(trial, _told(error))
        self._remove_pack(self.settings.folder / pack.folder)
        self._drop_parameters(pack.trials)

    def _take_apart(self, pack: Pack, alive: Collection[int], why: str) -> None:
        """Train the trials of a pack that crashed each by itself: only the one at fault shall fail."""
        self.view.say(f"pack {pack.number}: {why}; its trials are trained one at a time")
        for trial in self.study.trials():
            if trial.number in alive:
                self._pack([trial])
        self._remove_pack(self.settings.folder / pack.folder)

    def _conclude(self, trial: int, results: Sequence[Result]) -> None:
        failed = next((r for r in results if r.failed or r.valid is None), None)
        if failed is not None:
            self._fail(trial, failed.reason)
            return
        self.study.complete(trial, sum(r.valid for r in results) / len(results))  # type: ignore[misc]
        self._tell(trial)

    def _fail(self, trial: int, reason: str) -> None:
        self.study.fail(trial, reason)
        self._tell(trial)

    def _tell(self, number: int) -> None:
        self.view.ended(self.study.trial(number))

    def _remove_pack(self, place: Path) -> None:
        shutil.rmtree(place, ignore_errors=True)
        if self.store is not None:
            self.store.remove(place.relative_to(self.settings.folder).as_posix())

    def _fetch(self, pack: Pack) -> None:
        """Bring the members' files here from where their worker put them."""
        if self.store is not None:
            for home in pack.homes:
                self.store.download(home, self.settings.folder / home)
                self.store.remove(home)

    def _folders_with_parameters(self) -> set[int]:
        places = (self.settings.folder / "trials").glob("**/best.*")
        names = {path.relative_to(self.settings.folder / "trials").parts[0] for path in places}
        return {int(name) for name in names if name.isdecimal()}

    def _drop_parameters(self, ended: Collection[int]) -> None:
        """Keep the parameters of the best trials alone: a thousand models are many gigabytes."""
        self.with_parameters |= {*ended}
        trials = self.study.trials()
        keep = {t.number for t in best(trials, KEPT)} | {t.number for t in trials if t.state == "running"}
        for number in self.with_parameters - keep:
            for path in (self.settings.folder / home_of(number)).glob("**/best.*"):
                path.unlink(missing_ok=True)
        self.with_parameters &= keep


def _told(error: BaseException) -> str:
    if isinstance(error, UserError | Lost):
        return str(error)
    return " ".join("".join(traceback.format_exception_only(error)).split())  # a reason is one line


# ---- in a worker


def work(
    board: Board, device: str, pack: Pack, root: str, stopped: Sequence[int], store: Store | None
) -> list[Result] | None:
    """Train a pack and tell the board of it; None where everybody was to stop."""
    report: Callable[..., Any] = board.report
    try:
        return train_pack(
            pack,
            Path(root),
            device,
            data=_data_of(pack.recipes[0]),
            report=lambda rows: report(pack.number, rows),
            received=Wish(board.interrupted, 0.0 if isinstance(board, Board) else ASK),
            stopped=stopped,
            store=store,
        )
    except saving.Interrupted:
        return None


_LOADING = Lock()


def _data_of(recipe: Recipe) -> Any:
    """What a recipe trains on, read once, and its warnings told once, by the coordinator and its threads together."""
    with _LOADING:  # threads that want the same data wait for the one that reads it
        return _load(json.dumps(recipe.to_dict()["data"]))


@lru_cache(maxsize=4)
def _load(part: str) -> Any:
    return session.load_data(DataPart(**json.loads(part)))
