"""The reproduction, a rerun of it or a study in slices of a bare GPU machine: no extras, results as few files.

    export DEEPRNN_DATA=data
    python benchmarks/gpu_reproduce.py --fresh --seeds 11..11 --seconds 570 --out slice1
    python benchmarks/gpu_reproduce.py --fresh --seeds 11..11 --seconds 570 --restore slice1 --out slice2
    python benchmarks/gpu_reproduce.py --collect slice2 --into results/replications/seed-11

    python benchmarks/gpu_reproduce.py --study depth --only jsb --seconds 570 --out slice1
    python benchmarks/gpu_reproduce.py --collect slice1 --into results/studies/depth

Needs torch, numpy and safetensors alone, and no repository (`--commit` says which commit the copy is of). A later
call in the same working tree goes on from `--work`; on another machine `--restore` brings an earlier call's files.
Into --out go `results.tar.gz` (a folder of results: `runs/`, `clean.json`, `calls.json`; renewed after every job),
`state-N.part` (unfinished runs, first stages that are needed still, finished runs that are yet to be scored without
near-duplicates or dynamically; renewed every minute) and `log.txt`. Whenever the process is killed, what these held a
moment before is whole.

All kernels are compiled ahead by all cores. Every finished run of a rerun is scored again, from the parameters it kept,
on what has no near-duplicate in the training part. `--collect` enters results into a folder, over nothing, and does
nothing else.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(HERE / "src"), str(HERE / "benchmarks")]
# Streams that share a queue to the card wait for each other; there are eight queues unless one asks for more.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")

import slice_files  # noqa: E402
import torch  # noqa: E402

from deeprnn.errors import UserError  # noqa: E402
from deeprnn.files import write_json, write_new  # noqa: E402
from deeprnn.reproduction import clean_scores, tables  # noqa: E402
from deeprnn.reproduction.compare import compare, comparison_text  # noqa: E402
from deeprnn.reproduction.entries import read_ledger  # noqa: E402
from deeprnn.reproduction.identity import identity  # noqa: E402
from deeprnn.reproduction.plan import Job, cells_named, find_member, finished_members, make_plan  # noqa: E402
from deeprnn.reproduction.replications import CALLS, RUNS  # noqa: E402
from deeprnn.reproduction.run import default_jobs, parse_seeds, reproduce  # noqa: E402
from deeprnn.reproduction.runner import Outcome, Settings  # noqa: E402
from deeprnn.reproduction.study import dynamic  # noqa: E402
from deeprnn.reproduction.study.analysis import results  # noqa: E402
from deeprnn.reproduction.study.jobs import study_plan  # noqa: E402
from deeprnn.reproduction.study.plan_file import Study, read_study  # noqa: E402
from deeprnn.reproduction.study.report import text  # noqa: E402
from deeprnn.reproduction.study.run import DIVERGED, STARTED, read_runs, run_study  # noqa: E402
from deeprnn.runs.provenance import command_line, commit, environment  # noqa: E402
from deeprnn.training.clean import SplitSubset, clean_parts  # noqa: E402
from deeprnn.training.cuda_graph import on_own_stream  # noqa: E402
from deeprnn.training.loading import load_data, load_data_once, pick_device  # noqa: E402
from deeprnn.training.recipe import DataPart, Recipe  # noqa: E402
from deeprnn.training.run_folders import member_folders  # noqa: E402

LEDGER, STUDIES = HERE / "results" / "runs", HERE / "results" / "studies"
TO_SAVE, TO_END = 25.0, 5.0
"""seconds before the end at which training stops, and at which the process ends whatever it does"""
EVERY = 60.0
"""seconds between two packings of the state"""
TO_COMPILE = 90.0
"""seconds after which what is not compiled ahead is left to the runs"""


def parts_of_test(part: DataPart) -> Mapping[str, SplitSubset]:
    """What of a test part is clean, for a worker: an audit takes up to a minute."""
    return clean_parts(load_data(part), clean_scores.SPLIT)


class Slice:
    """One call: its settings, its log and what it leaves behind."""

    def __init__(self, arguments: argparse.Namespace, pool: ProcessPoolExecutor | None = None) -> None:
        self.arguments, self.pool = arguments, pool
        self.began, self.since = time.monotonic(), datetime.now(UTC).isoformat(timespec="milliseconds")
        self.out, self.work = Path(arguments.out), Path(arguments.work)
        self.device = str(pick_device(arguments.device))
        self.study: Study | None = read_study(arguments.study) if arguments.study else None
        # Beside each other, as they lie in results/: entries, and what belongs to them.
        self.home = self.work / (self.study.name if self.study else "results")
        self.settings = Settings(
            only=tuple(arguments.only), extras=arguments.extras,
            seeds=parse_seeds(arguments.seeds) if arguments.seeds else None, device=self.device,
            jobs=arguments.jobs or default_jobs(self.device), overrides=tuple(arguments.override),
            root=self.work / ("runs-" + self.home.name), ledger=self.home / RUNS,
            published=LEDGER if arguments.fresh else None,
            record_cut_off=not arguments.fresh,  # a rerun's runs are scored once, when they are whole
            commit=arguments.commit,
        )  # fmt: skip
        for folder in (self.out, self.settings.root, self.settings.ledger):
            folder.mkdir(parents=True, exist_ok=True)
        self.packing = threading.RLock()
        self.log = (self.out / "log.txt").open("a", encoding="utf-8")
        self.outcome, self.left = Outcome(), list[Job]()
        self.earlier: list[dict[str, Any]] = []
        self.notes: dict[str, Any] = {}
        self.state: dict[str, list[str]] = {"kept": [], "lost": []}
        self.over, self.ended = threading.Event(), threading.Event()
        self.commit = arguments.commit or commit()
        self.scoring: threading.Thread | None = None
        self.audits: dict[str, Future[Mapping[str, SplitSubset]]] = {}

    def say(self, line: str) -> None:
        """To the terminal and the log, at once."""
        print(line, flush=True)
        with self.packing:
            self.log.write(line + "\n")
            self.log.flush()

    @property
    def seconds(self) -> float:
        """Since the call began."""
        return time.monotonic() - self.began

    # ---- the call

    def run(self) -> int:
        """Bring in what is known, compile, train, score, pack."""
        self._bring_in()
        if self.arguments.seconds:
            threading.Thread(target=self._end_in_time, daemon=True).start()
        self.left = self._jobs_left()
        rows = self._rows() or [self.left]
        self._prepare(  # as a GPU takes them
            [job for row in rows for job in sorted(row, key=lambda job: (job.alone, job.wide))]
        )
        threading.Thread(target=self._pack_again_and_again, daemon=True).start()
        self._start_scoring()
        self.notes["training_from"] = round(self.seconds, 1)
        self.pack()
        self.settings = replace(self.settings, budget=self._minutes_to_train())
        if self.study is None:
            reproduce(self.settings, self.say, self._job_ended, self.outcome)
        else:
            run_study(self.study, self.settings, self.home, self.say, self._job_ended, self.outcome)
        self._finish_scoring()
        self.pack_state(replan=True)
        self.pack()
        self._report()
        return self.outcome.status

    def _bring_in(self) -> None:
        """What the published ledger has, unless all is trained anew; what an earlier slice left."""
        if self.study is None and not self.arguments.fresh:
            for path in LEDGER.glob("*.json"):
                write_new(self.settings.ledger / path.name, path.read_bytes())
        if self.study is not None:  # what slices of any machine have brought together
            known = slice_files.read_folder(STUDIES / self.study.name)
            entries = slice_files.enter(known, self.home)[0]
            self.say(f"{len(entries)} entries of {self.study.name} are known")
        if self.arguments.restore:
            folder = Path(self.arguments.restore)
            entries = slice_files.enter(slice_files.read_results(folder), self.home)[0]
            folders = slice_files.unpack_state(folder, self.settings.root)
            self.say(f"restored {len(entries)} entries and {len(folders)} run folders from {folder.name}")
        calls = self.home / CALLS
        self.earlier = json.loads(calls.read_text(encoding="utf-8")) if calls.exists() else []

    def _prepare(self, jobs: list[Job]) -> None:
        """Kernels, and what of the test parts is clean, by the workers; the card's own start meanwhile."""
        if self.pool is None:
            return
        if self._scores_clean:
            names = {job.recipe.data.name: job.recipe.data for job in jobs}
            self.audits = {name: self.pool.submit(parts_of_test, part) for name, part in names.items()}
        if self.device == "cpu":
            return
        from kernels_ahead import compile_all

        first = 2 * self.settings.jobs
        card = threading.Thread(target=_wake, args=(self.device,))
        card.start()
        self.notes["kernels"] = compile_all(self.pool, [j.recipe for j in jobs[:first]], TO_COMPILE)
        self.say(f"[{self.seconds:6.1f} s] kernels of the first {first} jobs: {self.notes['kernels']}")
        card.join()

        def rest() -> None:
            assert self.pool is not None
            self.notes["further kernels"] = compile_all(
                self.pool, [j.recipe for j in jobs[first:]], TO_COMPILE
            )
            self.say(f"[{self.seconds:6.1f} s] further kernels: {self.notes['further kernels']}")

        threading.Thread(target=rest, daemon=True).start()

    def _minutes_to_train(self) -> float | None:
        given: list[float] = [self.arguments.budget] if self.arguments.budget else []
        if self.arguments.seconds:
            given.append((self.arguments.seconds - self.seconds - TO_SAVE) / 60)
        return max(1e-6, min(given)) if given else None

    def _end_in_time(self) -> None:
        """Leave before somebody else ends the process, with what is on disk by then."""
        time.sleep(max(0.0, self.arguments.seconds - TO_END - self.seconds))
        self.say(f"{self.seconds:.0f} s are over: packing what is on disk")
        self.pack()  # first of all what is finished
        self.pack_state()
        self.pack()
        os._exit(3)

    def _report(self) -> None:
        """What came of it, for a person."""
        entries, outcome = read_ledger(self.settings.ledger), self.outcome
        if self.study is not None:
            self.say(text(results(self.study, read_runs(self.home))))
        else:
            self.say(tables.text_tables(entries))
        if self.arguments.fresh:
            self.say(comparison_text(compare(entries, read_ledger(LEDGER))))
            self.say("without near-duplicates of the training part, and by new melodies alone:")
            for row in clean_scores.read_scores(self.home / clean_scores.FILE):
                self.say(f"  {row.data}/{row.model}, seed {row.seed}: {clean_scores.text(row)}")
        self.say(f"finished: {', '.join(outcome.finished) or 'none'}")
        self.say(f"unfinished: {', '.join(outcome.unfinished) or 'none'}")
        for name, error in outcome.failed.items():
            self.say(f"failed: {name}: {error}")
        for what in ("kept", "lost"):
            self.say(f"state {what}: {', '.join(self.state[what]) or 'none'}")
        self.say(f"{self.seconds:.0f} s in all")

    # ---- scores on the clean part

    @property
    def _scores_clean(self) -> bool:
        return self.study is None and bool(self.arguments.fresh)

    def _start_scoring(self) -> None:
        if self._scores_clean:
            self.scoring = threading.Thread(target=self._score_as_they_finish, daemon=True)
            self.scoring.start()

    def _score_as_they_finish(self) -> None:
        while not self.over.is_set():
            self.ended.wait()
            self.ended.clear()
            self._score()
        self._score()  # what ended while the last one was scored

    def _score(self) -> None:
        with on_own_stream(self.device):
            clean_scores.score_finished(
                self.settings.root,
                self.settings.ledger,
                self.device,
                load_data_once,
                self.say,
                self._parts_of,
            )

    def _parts_of(self, data: Any) -> Mapping[str, SplitSubset]:
        audit = self.audits.get(data.name)
        return clean_parts(data, clean_scores.SPLIT) if audit is None else audit.result()

    def _finish_scoring(self) -> None:
        if self.scoring is not None:
            self.over.set()
            self.ended.set()
            self.scoring.join()

    # ---- out

    def _job_ended(self) -> None:
        self.ended.set()
        self.pack()

    def pack(self) -> None:
        """The results as they are now; of the published ledger's entries none."""
        with self.packing:
            write_json(self.home / CALLS, [*self.earlier, self._call()])
            files = {}
            for path in sorted(self.settings.ledger.glob("*.json")):
                content, known = path.read_bytes(), LEDGER / path.name
                if self.study or self.arguments.fresh or not known.exists() or known.read_bytes() != content:
                    files[f"{RUNS}/{path.name}"] = self._with_commit(content)
            for name in (clean_scores.FILE, CALLS, STARTED, DIVERGED, dynamic.FILE):
                if (self.home / name).exists():
                    files[name] = (self.home / name).read_bytes()
            slice_files.pack_results(self.out, files)

    def _call(self) -> dict[str, Any]:
        """When what ran in this call."""
        return {
            "began": self.since,
            "seconds": round(self.seconds, 1),
            "command": command_line(),
            "commit": self.commit,
            "environment": environment(self.device),
            "jobs_at_once": self.settings.jobs,
            **self.notes,
            "spans": [span._asdict() for span in self.outcome.spans],
            "failed": {name: error.splitlines()[-1][:300] for name, error in self.outcome.failed.items()},
            "state": self.state,
        }

    def _with_commit(self, content: bytes) -> bytes:
        """A bare copy of the code knows no commit: the caller's word stands in."""
        entry = json.loads(content)
        if entry["commit"] is None and self.arguments.commit:
            entry["commit"] = self.arguments.commit
            # A caller's word is no proof that nothing was changed.
            entry["dirty"] = True if self.arguments.commit.endswith("+") else None
            return (json.dumps(entry, indent=1, ensure_ascii=False) + "\n").encode()
        return content

    def _pack_again_and_again(self) -> None:
        while not self.over.wait(EVERY):
            self.pack_state()
            self.pack()

    def pack_state(self, replan: bool = False) -> None:
        """What a later slice needs, the most valuable first, up to the limit; by the plan of the call's beginning."""
        with self.packing:
            if replan:  # takes seconds for a study, which training beside it would feel
                self.left = self._jobs_left()
            room = int(self.arguments.state_limit * 2**20)
            kept, lost = slice_files.pack_state(self.out, self.settings.root, self._groups(), room)
            self.state = {"kept": kept, "lost": lost}

    def _groups(self) -> list[tuple[str, list[Path]]]:
        """Finished runs yet to be scored, first stages that are needed, then unfinished runs, small ones first."""
        root = self.settings.root
        groups: dict[str, list[Path]] = {}
        if self._scores_clean:
            rows = clean_scores.read_scores(self.home / clean_scores.FILE)
            for run, name in clean_scores.unscored(root, self.settings.ledger, rows):
                groups[f"{name}, to be scored"] = _finished_files(run.path)
        if self.study is not None:
            for entry in dynamic.unscored(self.study, read_runs(self.home), self.home):
                home = find_member(root, identity(entry.recipe), entry.seed)
                if home is not None:
                    groups[f"{entry.path.name}, to be scored dynamically"] = _finished_files(home)
        unfinished: dict[str, list[Path]] = {}
        trained = finished_members(root)
        for job in self.left:
            for seed in job.recipe.seeds if job.stage else ():
                assert job.stage is not None
                home = trained.get((identity(job.stage), seed))
                if home is not None:
                    groups[f"first stage of {job.name}, seed {seed}"] = _finished_files(home)
            folder = root / job.folder_name
            if (folder / "last.json").exists():
                unfinished[job.name] = _unfinished_files(job.recipe, folder)
        small_first = sorted(unfinished.items(), key=lambda item: sum(p.stat().st_size for p in item[1]))
        return [*groups.items(), *small_first]

    def _rows(self) -> list[list[Job]]:
        """What is left of a study by the words of --only, which are run one after another."""
        if self.study is None:
            return []
        runs, known, rows = read_runs(self.home), set[str](), list[list[Job]]()
        for only in [(word,) for word in self.settings.only] or [()]:
            jobs = study_plan(self.study, runs, self.settings.root, only, ahead=True)[0].jobs
            rows.append([job for job in jobs if job.name not in known])
            known |= {job.name for job in jobs}
        return rows

    def _jobs_left(self) -> list[Job]:
        """Those of this slice, and of cells whose first stages a later one needs."""
        s = self.settings
        if self.study is not None:
            return [job for row in self._rows() for job in row]
        names = cells_named([*s.only, *self.arguments.keep], s.extras)
        entries = read_ledger(s.ledger)
        return make_plan(names, entries, s.root, seeds=s.seeds, overrides=s.overrides).jobs


def _finished_files(home: Path) -> list[Path]:
    """All but the state of training."""
    return [p for p in sorted(home.iterdir()) if p.is_file() and p.stem not in ("last", "previous")]


def _unfinished_files(recipe: Recipe, folder: Path) -> list[Path]:
    """The newest state, which has the best parameters too, and what describes the run and its members."""
    inside = [folder / n for n in ("last.json", "last.safetensors", "recipe.toml", "population.json")]
    for home in member_folders(recipe, folder):
        inside += [p for p in home.iterdir() if p.suffix in (".toml", ".jsonl")]
        inside += [p for p in home.glob("*.json") if p.stem not in ("last", "previous", "best")]
    return sorted({p for p in inside if p.is_file()})


def _wake(device: str) -> None:
    """A card's first context and first product take seconds."""
    x = torch.ones(64, 64, device=device)
    (x @ x).sum().item()


def main() -> int:
    """Read the arguments and run one slice."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="*", default=[], help="data sets, cells (jsb/dots) or patterns (*/rnn); of a "
                        "study data sets, families or family/data/contender")  # fmt: skip
    parser.add_argument("--extras", action="store_true", help="also the models the paper does not train")
    parser.add_argument("--seeds", default="", help="how many seeds of each cell, or which: 5, 11..15 or 3,7")
    parser.add_argument("--fresh", action="store_true", help="train anew, and compare with results/runs")
    parser.add_argument(
        "--study", default="", help="go on with a study: depth, beyond, …, or a plan's .toml file"
    )
    parser.add_argument("--seconds", type=float, default=0.0, help="of the whole call, packing included")
    parser.add_argument("--budget", type=float, default=0.0, help="minutes of training")
    parser.add_argument("--jobs", type=int, help="populations at once (4 on a GPU)")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--override", nargs="*", default=[], help="field=value or data/model:field=value")
    parser.add_argument(
        "--keep", nargs="*", default=[], help="further cells whose first stages go into the state"
    )
    parser.add_argument("--out", default=os.environ.get("OUT", "out/gpu"))
    parser.add_argument("--work", default="runs/gpu", help="run folders and results of this machine")
    parser.add_argument("--restore", help="folder with an earlier slice's files")
    parser.add_argument("--collect", help="enter this folder's results into --into, and stop")
    parser.add_argument(
        "--into", default=str(LEDGER), help="for --collect: results/runs, or a folder of its own"
    )
    parser.add_argument("--commit", help="the code's commit, where the copy has no repository")
    parser.add_argument("--state-limit", type=float, default=40.0, help="MiB of state to keep")
    parser.add_argument(
        "--workers", type=int, default=os.cpu_count(), help="processes beside the card; 0: none"
    )
    arguments = parser.parse_args()
    try:
        if arguments.collect:
            return slice_files.collect(Path(arguments.collect), Path(arguments.into))
        if not arguments.workers:
            return Slice(arguments).run()
        from kernels_ahead import workers

        pool = workers(arguments.workers)  # forked before anything touches the card
        try:
            return Slice(arguments, pool).run()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
