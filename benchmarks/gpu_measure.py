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
from typing import Any

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
    """The kernels of a point, through `launch` itself with the driver left out; needs no GPU."""
    import torch
    from gpu_stages import Point

    from deeprnn.backends.cuda import largest, launch, nvrtc
    from deeprnn.backends.cuda.planning import Device

    hidden, depth, batch, members, precision, marked, directions = key
    started = time.perf_counter()
    torch.set_num_threads(1)
    launch.Kernel = largest.Kernel = _NoKernel  # type: ignore[misc,assignment]
    launch.device_of = lambda index: Device()  # type: ignore[assignment]
    spec, H, bf16 = Point(hidden, depth).spec, hidden, precision == "bf16"
    W = [torch.zeros(members, m, H) for m in spec.sizes]
    S = [torch.zeros(members, m, H) for m, s in zip(spec.sizes, spec.shortcuts, strict=True) if s]
    A, h0 = torch.zeros(members, 1, batch, spec.total), torch.zeros(members, batch, H)
    h, z = torch.zeros(members, 1, batch, H), torch.zeros(members, 1, batch, spec.total - H)
    reset = torch.zeros(1, batch, dtype=torch.bool) if marked else None
    try:
        launch.forward(A, h0, W, S, reset, spec, bf16, h, z)
        if directions == "both":
            launch.backward(h, None, h, z, W, S, reset, spec, bf16, A, h0)
        if key == TRAINING[0]:  # and the kernels that are the same for every shape
            for name in ("update.cu", "products.cu"):
                nvrtc.cubin(name, {}, Device().arch)
    except Exception as error:  # noqa: BLE001 - the stage that needs this kernel will say so too
        return f"{key}: {type(error).__name__}: {str(error)[-800:]}", time.perf_counter() - started
    return "", time.perf_counter() - started


class _NoKernel:
    """Stands where a loaded kernel would: the code has been compiled and kept, nothing is launched."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: 1


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
    """measure.json from the lines: one list a section, ratios to ours at the same shape, and what was before."""
    report: dict[str, Any] = {"format": 2, "about": {}, "before": before()}
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


def before() -> dict[str, Any]:
    """First calls and calls without a graph as they were with torch.library.custom_op."""
    path = ROOT / "results" / "bench" / "h200-peers-400.json"
    if not path.exists():
        return {}
    old = json.loads(path.read_text())
    called = {r["batch"]: r["called_us"] for r in old["rows"] if "called_us" in r and r["hidden"] == 400}
    return {"file": path.name, "first_call": old.get("first_call"), "called_us": called}


# ---- stages in processes


def child(out: Path, name: str, device: str, tiny: bool, seconds: float) -> None:
    """One stage, in this process: rows until the time is over."""
    from deeprnn.bench.measure import surroundings

    started = time.perf_counter()
    stage, _ = stages()[name]
    if device == "cuda":
        put(out, "about", surroundings(device))
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
    parser.add_argument("--child", choices=NAMES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    started = time.perf_counter()
    args.out.mkdir(parents=True, exist_ok=True)
    if args.child:
        return child(args.out, args.child, args.device, args.tiny, args.seconds)
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
