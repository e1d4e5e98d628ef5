"""A search over what the paper does not say, decided on validation alone: the test part is never scored.

    python benchmarks/gpu_search.py jobs.json --out out/search.json --minutes 3 --jobs 3

`jobs.json` is a list of {"recipe": "paper/nottingham/dts", "set": {"schedule.patience": 8}, "seeds": [1, 2],
"rates": [1.0, 0.5], "epochs": 100}. Each becomes one population; several run at once on a GPU. The answer has
one object a member: the job, seed, rate, best validation value and epoch, epochs run, and the curve. It is
written after every epoch, so a search that is cut off keeps what it saw.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(HERE / "src"))

from deeprnn.sweeps.engines.local import SWITCH  # noqa: E402
from deeprnn.training.cuda_graph import SETUP, on_own_stream  # noqa: E402
from deeprnn.training.loading import load_data_once, pick_device  # noqa: E402
from deeprnn.training.loop import Trainer  # noqa: E402
from deeprnn.training.recipe import load_recipe, override  # noqa: E402


class Search:
    """All jobs, their curves so far, and the file they go to."""

    def __init__(self, jobs: list[dict], out: Path, minutes: float, device: str) -> None:
        self.jobs, self.out, self.device = jobs, out, device
        self.end = time.monotonic() + 60 * minutes
        self.members: dict[tuple[int, int], dict] = {}
        self.lock = threading.Lock()

    def run_job(self, number: int) -> None:
        """Train one population until its epochs or the time are over."""
        job = self.jobs[number]
        changes = {**job.get("set", {}), "pretrain.recipe": ""}
        changes["seeds"] = job.get("seeds", [1])
        changes["rates"] = job.get("rates", [])
        changes["stop.epochs"] = job.get("epochs", 0)
        recipe = override(load_recipe(job["recipe"]), changes)
        with on_own_stream(self.device):
            with SETUP:
                trainer = Trainer(recipe, load_data_once(recipe.data), device=self.device)
            while not trainer.schedule.done and time.monotonic() < self.end:
                trainer.train_epoch()
                self.note(number, trainer, trainer.end_epoch())
        self.say(number, trainer)

    def note(self, number: int, trainer: Trainer, rows: list) -> None:
        """Add an epoch to the members' curves."""
        with self.lock:
            for p, (member, row) in enumerate(zip(trainer.members, rows, strict=True)):
                if row is None:
                    continue
                state = trainer.schedule.members[p]
                entry = self.members.setdefault(
                    (number, p),
                    {"job": self.jobs[number], "seed": member.seed, "rate": member.rate, "valid_curve": []},
                )
                entry["valid_curve"].append(round(row["valid"], 4))
                entry |= {
                    "valid": min(entry["valid_curve"]),
                    "best_epoch": state.best_epoch,
                    "decay_epoch": state.decay_epoch,
                    "epochs": row["epoch"],
                    "seconds": row["seconds"],
                    "grad_norm": row["grad_norm"],
                    "clipped": row["clipped"],
                    "finished": state.finished,
                }
            self.out.write_text(json.dumps([self.members[k] for k in sorted(self.members)], indent=1))

    def say(self, number: int, trainer: Trainer) -> None:
        """One line a member."""
        with self.lock:
            job = self.jobs[number]
            print(job["recipe"], job.get("set", {}), flush=True)
            for key in sorted(k for k in self.members if k[0] == number):
                m = self.members[key]
                print(
                    f"  seed {m['seed']} rate {m['rate']:g}: valid {m['valid']:.4f} at {m['best_epoch']}, "
                    f"decay at {m['decay_epoch']}, {m['epochs']} epochs, {m['seconds'] / m['epochs']:.2f} s each, "
                    f"clipped {m['clipped']:.2f}, {m['finished'] or 'cut off'}",
                    flush=True,
                )


def main() -> None:
    """Read the jobs, run them, print what they reached."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path, help="the jobs, as JSON")
    parser.add_argument("--out", type=Path, default=Path("out/search.json"))
    parser.add_argument("--minutes", type=float, default=3.0)
    parser.add_argument("--jobs", type=int, default=3, help="populations at once")
    parser.add_argument("--device", default="auto")
    a = parser.parse_args()
    a.out.parent.mkdir(parents=True, exist_ok=True)
    search = Search(json.loads(a.file.read_text()), a.out, a.minutes, str(pick_device(a.device)))
    sys.setswitchinterval(SWITCH)
    with ThreadPoolExecutor(a.jobs) as pool:
        for future in [pool.submit(search.run_job, n) for n in range(len(search.jobs))]:
            future.result()


if __name__ == "__main__":
    main()
