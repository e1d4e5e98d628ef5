"""All measurements of docs/kernels.md in one go, the most important first:

    DEEPRNN_DATA=data python benchmarks/gpu_measure.py OUT --seconds 300

Kernels are compiled in parallel first. Then every stage runs in a process of its own with a time limit, so that
one that hangs costs no other. Each row goes to OUT/measure.jsonl as soon as it is known; OUT/measure.json is made
of these lines after every stage (`--merge` makes it anew). No stage and no row begins after --seconds.
`--device cpu --tiny` tries the script itself.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
import traceback
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from deeprnn.cells.description import CellDescription

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "benchmarks")]
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
GRACE = 15.0  # seconds a stage may take beyond its limit to finish the row it is at
IN_TIME = ("finished", "stopped after", "not begun", "killed after")  # how a stage ends that did not fail
OVER = 25.0  # seconds of every stage's limit that starting it may take


def stages() -> dict[str, tuple[Any, float]]:
    """Name -> what it yields, and the seconds it may take."""
    import gpu_stages as g

    return {
        "peers-400": (partial(g.peers, hidden=(400,), names=g.PEERS), 60),
        "epochs": (g.epochs, 60),
        "first": (g.first, 60),
        "curves": (g.curves, 90),
        "jax-400": (partial(g.jax_peer, hidden=(400,)), 90),
        "compiled-400": (partial(g.peers, hidden=(400,), names=g.COMPILED), 170),
        "peers-384-512": (partial(g.peers, hidden=(384, 512), names=g.PEERS), 75),
        "jax-384": (partial(g.jax_peer, hidden=(384,)), 90),
        "jax-512": (partial(g.jax_peer, hidden=(512,)), 90),
    }


NAMES = (  # in the order in which they run
    *("peers-400", "epochs", "curves", "first", "jax-400", "peers-384-512", "compiled-400", "jax-384"),
    "jax-512",
)


# ---- kernels first


Key = tuple[
    int, int, int, int, str, bool, str
]  # hidden, depth, batch, members, precision, reset marks, directions
TRAINING: list[Key] = [  # what the stage "epochs" launches: updates, and validation of 64 songs side by side
    *((400, 2, 1, members, "fp32", True, "both") for members in (1, 15)),
    *((400, 2, 64, members, "fp32", True, "forward") for members in (1, 15)),
]


def needed() -> list[Key]:
    """Every kernel the stages launch, in about the order in which they come."""
    from gpu_stages import BATCHES, STEPS, Point, points

    found = [Point(h, batch=b, steps=STEPS) for h in (400, 384, 512) for b in BATCHES] + points()
    keys: list[Key] = [(p.hidden, p.depth, p.batch, p.members, p.precision, False, "both") for p in found]
    return list(dict.fromkeys([*TRAINING, *keys]))


def compile_point(key: Key) -> tuple[str, float]:
    """The kernels that unroll a point; needs no GPU."""
    import torch
    from gpu_stages import Point

    from deeprnn.backends.cuda import nvrtc
    from deeprnn.backends.cuda.device import Device

    hidden, depth, batch, members, precision, marked, directions = key
    started = time.perf_counter()
    torch.set_num_threads(1)
    cell = Point(hidden, depth).cell
    try:
        for backward in (False, True) if directions == "both" else (False,):
            compile_direction(cell, backward, batch, members, precision == "bf16", marked)
        if key == TRAINING[0]:  # and the kernel that is the same for every shape
            nvrtc.cubin("training/update.cu", {}, Device().arch)
    except Exception as error:  # noqa: BLE001 - the stage that needs this kernel will say so too
        return f"{key}: {type(error).__name__}: {str(error)[-800:]}", time.perf_counter() - started
    return "", time.perf_counter() - started


def compile_direction(
    cell: CellDescription, backward: bool, batch: int, members: int, bf16: bool, marked: bool
) -> None:
    """The loop's kernel and the scan before it, or those of single steps where no persistent kernel can serve."""
    from deeprnn.backends.cuda import nvrtc, stepwise
    from deeprnn.backends.cuda.device import Device
    from deeprnn.backends.cuda.epilogue import Options, code
    from deeprnn.backends.cuda.recurrence.launch import compile_plan
    from deeprnn.backends.cuda.recurrence.max_abs_scan import ScanShape, scan_jobs, scanned_stages
    from deeprnn.backends.cuda.recurrence.planning import make_plan
    from deeprnn.backends.cuda.recurrence.schedule import schedule
    from deeprnn.backends.cuda.recurrence.tensor_core_plans import TensorCorePlan

    device, steps = Device(), schedule(cell, backward)
    last = tuple(output in cell.new_states for output in cell.outputs)  # what the stages ask gradients of
    options = Options(marked, gradients=last) if backward else Options(marked)
    plan, own = make_plan(steps, batch, members, bf16, device), code(steps, options)
    if plan is None:
        for stage in range(len(steps.stages)):
            stepwise.compile_stage(own, stage, device)
        return
    compile_plan(plan, own, device)
    if isinstance(plan, TensorCorePlan) and plan.ranges is not None:
        shape = ScanShape(members, 1, batch, 0, scanned_stages(plan, steps, last))
        jobs = len(scan_jobs(steps, shape).outs)
        nvrtc.cubin("recurrence/max_abs_scan.cu", {"JOBS": str(jobs)}, plan.arch(device))


def compile_all(out: Path, limit: float, workers: int) -> None:
    """Fill the disk cache; workers are forked before anything touches the GPU."""
    started, failures, done = time.perf_counter(), [], []
    keys = needed()
    with ProcessPoolExecutor(workers, mp_context=get_context("fork")) as pool:
        futures = [pool.submit(compile_point, key) for key in keys]
        try:
            for future in as_completed(futures, timeout=limit):
                failure, seconds = future.result()
                done.append(seconds)
                failures += [failure] if failure else []
        except TimeoutError:
            failures.append(f"{len(keys) - len(done)} of {len(keys)} points not compiled in {limit:.0f} s")
        for future in futures:
            future.cancel()
    row = {"points": len(keys), "seconds": round(time.perf_counter() - started, 1), "failures": failures[:20]}
    row |= {"median_s": round(sorted(done)[len(done) // 2], 2)} if done else {}
    put(out, "compile", row)
    print("compile:", row, flush=True)


# ---- rows on disk


def put(out: Path, section: str, row: dict[str, Any]) -> None:
    """Add a line to the file; it is on disk when this returns."""
    with open(out / "measure.jsonl", "a", encoding="utf-8") as file:
        file.write(json.dumps({"section": section, **row}) + "\n")


def merge(out: Path) -> dict[str, Any]:
    """measure.json from the lines: one list a section, and ratios to ours at the same shape."""
    report: dict[str, Any] = {"format": 2, "about": {}}
    for line in (out / "measure.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        section = row.pop("section")
        if section == "about":
            report |= row
        else:
            report.setdefault(section, []).append(row)
    report.pop("about")
    ours = {(r["hidden"], r["batch"]): r for r in report.get("rows", []) if r["peer"] == "ours"}
    for row in report.get("rows", []):
        mine = ours.get((row["hidden"], row["batch"]), {})
        for kind in ("forward", "train"):
            if f"{kind}_us" in row and f"{kind}_us" in mine:
                row[f"{kind}_ratio"] = round(row[f"{kind}_us"] / mine[f"{kind}_us"], 3)
    (out / "measure.json").write_text(json.dumps(report, indent=1) + "\n")
    return report


# ---- stages in processes


def child(out: Path, name: str, device: str, tiny: bool, seconds: float, commit: str | None = None) -> None:
    """One stage, in this process: rows until the time is over."""
    from deeprnn.bench.measure import surroundings

    started = time.perf_counter()
    stage, _ = stages()[name]
    if device == "cuda":
        about = surroundings(device)
        put(out, "about", about | {"commit": about["commit"] or commit})
    ended = "finished"
    try:
        for section, row in stage(device=device, tiny=tiny):
            put(out, section, row)
            print(name, short(row), flush=True)
            if time.perf_counter() - started > seconds:
                ended = f"stopped after {seconds:.0f} s"
                break
    except Exception as error:  # noqa: BLE001 - the other stages still have something to tell
        traceback.print_exc()
        ended = f"{type(error).__name__}: {str(error)[:300]}"
    put(out, "stages", {"name": name, "seconds": round(time.perf_counter() - started, 1), "ended": ended})


def short(row: dict[str, Any]) -> str:
    """A row for the terminal."""
    wanted = {k: v for k, v in row.items() if v is not None and not k.endswith(("_plan", "note", "_min"))}
    return " ".join(f"{k}={v:.4g}" if isinstance(v, float) else f"{k}={v}" for k, v in wanted.items())


def run_stage(args: argparse.Namespace, name: str, limit: float) -> None:
    """A stage in its own process, ended where it does not end itself."""
    command = [sys.executable, __file__, str(args.out), "--child", name, "--device", args.device]
    command += ["--seconds", f"{limit:.1f}", *(["--tiny"] if args.tiny else [])]
    command += ["--commit", args.commit] if args.commit else []
    path = os.pathsep.join([str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])])
    process = subprocess.Popen(command, env={**os.environ, "PYTHONUNBUFFERED": "1", "PYTHONPATH": path})
    try:
        code = process.wait(limit + GRACE)
        ended = "" if code == 0 else f"exit status {code}"
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        ended = f"killed after {limit + GRACE:.0f} s"
    if ended:
        put(args.out, "stages", {"name": name, "ended": ended})
        print(name, ended, flush=True)


def main() -> None:
    """Read the arguments; compile, run the stages, merge after each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--only", nargs="+", choices=NAMES, default=NAMES)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small shapes, to try the script")
    parser.add_argument("--workers", type=int, default=16, help="processes that compile kernels")
    parser.add_argument("--no-compile", action="store_true", help="kernels are on disk already")
    parser.add_argument("--merge", action="store_true", help="only make measure.json anew")
    parser.add_argument("--commit", help="the code's commit, where the copy has no repository")
    parser.add_argument("--child", choices=NAMES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    started = time.perf_counter()
    args.out.mkdir(parents=True, exist_ok=True)
    if args.child:
        return child(args.out, args.child, args.device, args.tiny, args.seconds, args.commit)
    if args.merge:
        merge(args.out)
        return None
    (args.out / "measure.jsonl").write_text("")
    if args.device == "cuda" and not args.no_compile:
        compile_all(args.out, args.seconds / 3, args.workers)
    for name in args.only:
        left = args.seconds - (time.perf_counter() - started)
        if left < OVER:
            put(args.out, "stages", {"name": name, "ended": "not begun: the time was over"})
            continue
        run_stage(args, name, min(left - GRACE, stages()[name][1]))
        merge(args.out)
    ended = {row["name"]: row["ended"] for row in merge(args.out).get("stages", [])}
    print(f"all: {time.perf_counter() - started:.0f} s", flush=True)
    failed = [f"{n}: {how}" for n, how in ended.items() if not how.startswith(IN_TIME)]
    if failed:
        sys.exit("\n".join(failed))  # a stage that failed is no success, though the others have told theirs
    return None


if __name__ == "__main__":
    main()
