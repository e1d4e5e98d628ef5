"""The reproduction inside one short slice of a bare GPU machine: no command-line extras, results as few files.

    DEEPRNN_DATA=data python benchmarks/gpu_reproduce.py --only jsb nottingham --budget 8 --out out/gpu
    python benchmarks/gpu_reproduce.py ... --restore out/gpu       # a later slice goes on from there

Needs torch, numpy and safetensors alone. Into --out go `ledger.tar.gz` (entries, renewed after every job, so
that a slice that is cut off keeps what it finished), `state-*.part` (a tar in pieces: unfinished runs, and
first stages that later runs start from) and `log.txt`. `--collect DIR` enters a ledger.tar.gz into
results/runs, or --into another ledger, and does nothing else; nothing there is written over.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import sys
import tarfile
import tempfile
import threading
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(HERE / "src"))

from deeprnn.reproduction import tables  # noqa: E402
from deeprnn.reproduction.compare import compare, comparison_text  # noqa: E402
from deeprnn.reproduction.entries import read_entry, record  # noqa: E402
from deeprnn.reproduction.plan import find_member, make_plan, wanted  # noqa: E402
from deeprnn.reproduction.run import Settings, default_jobs, parse_seeds, reproduce  # noqa: E402
from deeprnn.training.saving import member_folders  # noqa: E402
from deeprnn.training.session import pick_device  # noqa: E402

PART = 15 * 2**20
"""bytes of one piece of the state"""
LEDGER = HERE / "results" / "runs"


class Slice:
    """One call: its settings, its log and what it leaves behind."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.began = time.monotonic()
        self.out = Path(arguments.out)
        self.out.mkdir(parents=True, exist_ok=True)
        self.work = Path(arguments.work)
        device = str(pick_device(arguments.device))
        jobs = arguments.jobs or default_jobs(device)
        self.settings = Settings(
            only=tuple(arguments.only), extras=arguments.extras, budget=arguments.budget,
            seeds=parse_seeds(arguments.seeds) if arguments.seeds else None,
            device=device, jobs=jobs, overrides=tuple(arguments.override),
            root=self.work / "runs", ledger=self.work / "ledger", published=LEDGER if arguments.fresh else None,
        )  # fmt: skip
        self.settings.root.mkdir(parents=True, exist_ok=True)
        self.settings.ledger.mkdir(parents=True, exist_ok=True)
        self.packing = threading.Lock()
        self.log = (self.out / "log.txt").open("a", encoding="utf-8")

    def say(self, text: str) -> None:
        """To the terminal and the log, at once."""
        print(text, flush=True)
        self.log.write(text + "\n")
        self.log.flush()

    def run(self) -> int:
        """Bring in what is known, train, pack."""
        for path in () if self.arguments.fresh else LEDGER.glob("*.json"):
            (self.settings.ledger / path.name).write_bytes(path.read_bytes())
        if self.arguments.restore:
            self.restore(Path(self.arguments.restore))
        if self.arguments.hard:
            threading.Thread(target=self._cut_short, daemon=True).start()
        outcome = reproduce(self.settings, self.say, self.pack_ledger)
        self.pack_ledger()
        self.pack_state()
        self.say(tables.text_tables(tables.read_ledger(self.settings.ledger)))
        if self.arguments.fresh:
            entries = tables.read_ledger(self.settings.ledger)
            self.say(comparison_text(compare(entries, tables.read_ledger(LEDGER))))
        self.say(f"finished: {', '.join(outcome.finished) or 'none'}")
        self.say(f"unfinished: {', '.join(outcome.unfinished) or 'none'}")
        for name, error in outcome.failed.items():
            self.say(f"failed: {name}: {error}")
        self.say(f"{time.monotonic() - self.began:.0f} s in all")
        return outcome.status

    def _cut_short(self) -> None:
        """Leave before somebody else ends the process, with what is on disk by then."""
        time.sleep(self.arguments.hard)
        self.say(f"{self.arguments.hard:g} s are over: packing what is on disk")
        self.pack_ledger()
        self.pack_state()
        os._exit(3)

    # ---- out

    def pack_ledger(self) -> None:
        """All entries that the checkout does not have as they are."""
        with self.packing:
            temporary = self.out / ".ledger.new"
            with tarfile.open(temporary, "w:gz", compresslevel=6) as tar:
                for path in sorted(self.settings.ledger.glob("*.json")):
                    content, known = path.read_bytes(), LEDGER / path.name
                    if self.arguments.fresh or not known.exists() or known.read_bytes() != content:
                        add(tar, path.name, self._with_commit(content))
            temporary.replace(self.out / "ledger.tar.gz")

    def _with_commit(self, content: bytes) -> bytes:
        """A bare copy of the code knows no commit: the caller's word stands in."""
        entry = json.loads(content)
        if entry["commit"] is None and self.arguments.commit:
            entry["commit"] = self.arguments.commit
            entry["dirty"] = (
                True if self.arguments.commit.endswith("+") else None
            )  # a caller's word is no proof
            return (json.dumps(entry, indent=1, ensure_ascii=False) + "\n").encode()
        return content

    def pack_state(self) -> None:
        """What a later slice needs, the most valuable first, up to the limit."""
        with self.packing:
            buffer = io.BytesIO()
            room = self.arguments.state_limit * 2**20
            with tarfile.open(fileobj=buffer, mode="w") as tar:
                for name, files in self._wanted_state():
                    size = sum(path.stat().st_size + 1024 for path in files)
                    if size > room:
                        self.say(f"state of {name} left out: {size / 2**20:.1f} MiB do not fit")
                        continue
                    room -= size
                    for path in files:
                        tar.add(path, str(path.relative_to(self.settings.root)))
            content = buffer.getvalue()
            for old in self.out.glob("state-*.part"):
                old.unlink()
            for number, start in enumerate(range(0, len(content), PART)):
                (self.out / f"state-{number}.part").write_bytes(content[start : start + PART])

    def _wanted_state(self) -> list[tuple[str, list[Path]]]:
        """First stages that are finished and needed still, then unfinished runs, small ones first."""
        settings = self.settings
        names = wanted([*settings.only, *self.arguments.keep], settings.extras)
        entries = tables.read_ledger(settings.ledger)
        plan = make_plan(names, entries, settings.root, seeds=settings.seeds, overrides=settings.overrides)
        stages: dict[str, list[Path]] = {}
        unfinished: dict[str, list[Path]] = {}
        for job in plan.jobs:
            for seed in job.recipe.seeds if job.stage else ():
                home = find_member(settings.root, stage_identity(job), seed)
                if home is not None:
                    wanted_files = (
                        home / n
                        for n in ("run.json", "recipe.toml", "metrics.jsonl", "best.json", "best.safetensors")
                    )
                    stages[f"{job.name}'s first stage, seed {seed}"] = [p for p in wanted_files if p.exists()]
            folder = settings.root / job.folder_name
            if (folder / "last.json").exists():
                inside = [
                    folder / n for n in ("last.json", "last.safetensors", "recipe.toml", "population.json")
                ]
                for home in member_folders(job.recipe, folder):
                    inside += [p for p in home.iterdir() if p.suffix in (".toml", ".jsonl")]
                    inside += [
                        p
                        for p in home.glob("*.json")
                        if p.name not in ("last.json", "previous.json", "best.json")
                    ]
                unfinished[job.name] = sorted({p for p in inside if p.is_file()})
        small_first = sorted(unfinished.items(), key=lambda item: sum(p.stat().st_size for p in item[1]))
        return [*stages.items(), *small_first]

    # ---- in

    def restore(self, folder: Path) -> None:
        """Unpack an earlier slice's ledger and state."""
        entries, _ = enter(folder / "ledger.tar.gz", self.settings.ledger)
        parts = sorted(folder.glob("state-*.part"), key=lambda p: int(p.stem.partition("-")[2]))
        content = b"".join(part.read_bytes() for part in parts)
        files = unpack(io.BytesIO(content), self.settings.root) if content else 0
        self.say(f"restored {len(entries)} ledger entries and {files} files of state from {folder}")


def stage_identity(job) -> str:
    """Of a job's first stage."""
    from deeprnn.reproduction.identity import identity

    return identity(job.stage)


def add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    """One file from memory."""
    info = tarfile.TarInfo(name)
    info.size = len(content)
    tar.addfile(info, io.BytesIO(content))


def unpack(source: io.BytesIO, folder: Path) -> int:
    """Unpack a tar into a folder, plain files only; how many."""
    folder.mkdir(parents=True, exist_ok=True)
    with tarfile.open(fileobj=source) as tar:
        members = [m for m in tar.getmembers() if m.isfile()]
        tar.extractall(folder, members=members, filter="data")
    return len(members)


def enter(archive: Path, folder: Path) -> tuple[list[Path], list[Path]]:
    """Enter an archive's runs, each one checked, over nothing: those now in the ledger, and those it has otherwise."""
    entered, other = [], []
    with tempfile.TemporaryDirectory() as place:
        unpack(io.BytesIO(archive.read_bytes()), Path(place))
        for path in sorted(Path(place).glob("*.json")):
            raw = read_entry(path).raw
            home = record(raw, folder)
            (entered if read_entry(home).raw == raw else other).append(home)
    return entered, other


def collect(folder: Path, ledger: Path) -> int:
    """Bring an earlier slice's entries into a ledger; where it has another result of a run, that one stays."""
    entered, other = enter(folder / "ledger.tar.gz", ledger)
    print(f"{len(entered)} entries from {folder} are in {ledger}")
    for path in other:
        print(
            f"not entered: {path} has another result of that recipe and seed (a rerun: --into a folder of its own)"
        )
    return int(bool(other))


def main() -> int:
    """Read the arguments and run one slice."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", nargs="*", default=[], help="data sets, cells (jsb/dots) or patterns (*/rnn)"
    )
    parser.add_argument("--extras", action="store_true", help="also the models the paper does not train")
    parser.add_argument("--seeds", default="", help="how many seeds of each cell, or which: 5, 11..15 or 3,7")
    parser.add_argument("--fresh", action="store_true", help="train anew, and compare with results/runs")
    parser.add_argument("--budget", type=float, default=8.0, help="minutes of training")
    parser.add_argument(
        "--hard", type=float, default=0.0, help="seconds after which the process ends whatever runs"
    )
    parser.add_argument("--jobs", type=int, help="populations at once (4 on a GPU)")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--override", nargs="*", default=[], help="field=value or data/model:field=value")
    parser.add_argument(
        "--keep", nargs="*", default=[], help="further cells whose first stages go into the state"
    )
    parser.add_argument("--out", default=os.environ.get("OUT", "out/gpu"))
    parser.add_argument("--work", default="runs/gpu", help="run folders and ledger of this machine")
    parser.add_argument("--restore", help="folder with an earlier slice's files")
    parser.add_argument("--collect", help="enter this folder's ledger.tar.gz into --into, and stop")
    parser.add_argument("--into", default=str(LEDGER), help="ledger for --collect; a rerun's own for a rerun")
    parser.add_argument("--commit", help="the code's commit, where the copy has no repository")
    parser.add_argument("--state-limit", type=float, default=44.0, help="MiB of state to keep")
    arguments = parser.parse_args()
    if arguments.collect:
        return collect(Path(arguments.collect), Path(arguments.into))
    return Slice(arguments).run()


if __name__ == "__main__":
    sys.exit(main())
