"""What more processes and machines give: measured here, modelled, and the model checked by simulation.

    python benchmarks/scaling.py            # on an idle machine: all of it, with the figures in docs/scaling.md
    python benchmarks/scaling.py model      # from what was measured before

One run on n processes: an update takes compute(lanes / n) + allreduce(n, bytes). compute(B) = fixed + B * each, fitted
to updates of one process, and for two to those of two that train beside each other, each for itself: busy cores share
caches and memory. allreduce is what two processes here measure, or α + 2 (n - 1) / n * bytes / β for a network.
A sweep of K trials on m machines: K / m trials after each other, and at the end a wait for the last one.
"""

from __future__ import annotations

import json
import math
import os
import re
import socket
import statistics
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]

from benchmarks.records import read  # noqa: E402
from benchmarks.shapes import OURS, Shape  # noqa: E402

from deeprnn.files import write_atomically, write_json  # noqa: E402
from deeprnn.runs.provenance import commit, environment  # noqa: E402
from deeprnn.training.loop import Trainer  # noqa: E402
from deeprnn.training.ranks import Ranks, joined  # noqa: E402
from deeprnn.training.recipe import DataPart, ModelPart, Recipe, RegulariserPart  # noqa: E402

MEASURED, MODELLED = ROOT / "results/scaling/cpu.json", ROOT / "results/scaling/model.json"
PICTURE, PAGE = ROOT / "docs/images/scaling.png", ROOT / "docs/scaling.md"
BUSY = 0.5
"""load from which others are said to have been at work"""
CHUNK, HIDDEN, PITCHES = 50, 200, 88
LANES = (2, 4, 8, 16, 32, 64, 128)
ROUNDS = 60
NETWORKS = {  # assumed, not measured: latency α in µs of an all-reduce, bandwidth β in bytes per µs
    "NVLink, one machine": (15.0, 200_000.0),
    "InfiniBand, one rack": (30.0, 40_000.0),
    "10 Gbit Ethernet": (100.0, 1_100.0),
}


# ---- measuring


def trainer(lanes: int, ranks: Ranks) -> Trainer:
    """An RNN of the size the paper gives to music, on random frames."""
    from deeprnn.data.music import MusicData, Songs

    rng = np.random.default_rng(0)
    songs = [(rng.random((CHUNK, PITCHES)) < 0.05).astype(np.uint8) for _ in range(2 * lanes)]
    data = MusicData(
        "random", {name: Songs.pack(songs, PITCHES) for name in ("train", "valid", "test")}, None
    )
    recipe = Recipe(
        data=DataPart(name="random", chunk=CHUNK, lanes=lanes),
        model=ModelPart(hidden=(HIDDEN,)),
        regulariser=RegulariserPart(),
    )
    return Trainer(recipe, data, ranks=ranks)


def least_us(call, ranks: Ranks) -> float:
    """µs of a call, the least of many rounds: others use the machine too, and what they take is not ours."""
    call()
    times = []
    for _ in range(ROUNDS):
        ranks.most(0.0)
        began = time.perf_counter()
        call()
        times.append(ranks.most(1e6 * (time.perf_counter() - began)))
    return min(times)


def measure_here(ranks: Ranks) -> dict[str, list[float]]:
    """µs of an update by all lanes, of one by this rank's share with nothing summed, and of an all-reduce."""
    torch.set_num_threads(1)
    out: dict[str, list[float]] = {"update_us": [], "beside_us": [], "allreduce_us": []}
    for lanes in LANES:
        one, own = trainer(lanes, ranks), trainer(lanes // ranks.count, Ranks())
        for key, made in (("update_us", one), ("beside_us", own)):
            batches = [plan[0] for plan in made.plans(1)]
            out[key].append(least_us(lambda made=made, b=batches: made.updater.update(b), ranks))
        message = one.updater.messages[0].whole.clone()
        out["allreduce_us"].append(0.0 if ranks.alone else least_us(lambda m=message: ranks.sum_(m), ranks))
        out["bytes"] = [4 * message.numel()]
    return out


def measure(place: Path) -> None:
    """One process, then two that share the lanes; this machine's figures as JSON."""
    runs, load = {}, os.getloadavg()[0]
    if load > BUSY:
        print(
            f"others keep this machine busy (load {load:.1f}): two processes will look slower than they are"
        )
    for count in (1, 2):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        words = ["--nproc-per-node", str(count), "--master-addr", "127.0.0.1", "--master-port", str(port)]
        command = [sys.executable, "-m", "torch.distributed.run", *words, __file__, "worker"]
        env = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, check=True)
        runs[str(count)] = json.loads(done.stdout.strip().splitlines()[-1])
    write_json(
        place,
        {
            "what": f"RNN of {HIDDEN} units, {PITCHES} inputs and outputs, chunks of {CHUNK} steps, fp32, SGD",
            "load_before": load,
            "commit": commit(),
            "versions": environment("cpu"),
            "lanes": LANES,
            "processes": runs,
        },
    )


# ---- the model


def fit(lanes: list[int], update_us: list[float]) -> tuple[float, float]:
    """compute(B) = fixed + B * each, by least squares of relative errors."""
    weight = 1 / np.asarray(update_us)
    system = np.stack([np.ones(len(lanes)), np.asarray(lanes)], 1) * weight[:, None]
    fixed, each = np.linalg.lstsq(system, np.ones(len(lanes)), rcond=None)[0]
    return float(max(fixed, 0.0)), float(each)


def update_us(n: int, lanes: int, fixed: float, each: float, reduce_us: float) -> float:
    """An update of `lanes` on n processes: the busiest has one lane more where they do not divide evenly."""
    return fixed + math.ceil(lanes / n) * each + (reduce_us if n > 1 else 0.0)


def network_us(n: int, size: int, alpha: float, beta: float) -> float:
    """A ring all-reduce: latency, and each byte sent and received once less a share."""
    return 0.0 if n == 1 else alpha + 2 * (n - 1) / n * size / beta


def break_even(fixed: float, each: float, reduce_us: float) -> float:
    """The lanes from which two processes are faster than one: B * each / 2 > all-reduce."""
    return 2 * reduce_us / each


def h200(place: Path) -> list[dict]:
    """A layer of 400 units with two transition layers over 200 steps, its batch split over GPUs.

    Times of one GPU are measured (`gpu_layers.py`); the all-reduce is that of the assumed network.
    """
    measured = read(place)
    shapes = {batch: Shape("dts", 400, batch, 200, 88, depth=2) for batch in (1, 16, 64, 256)}
    us = {batch: measured.layers[shape, OURS]["graph_train_us"] for batch, shape in shapes.items()}
    size = 4 * (88 * 2 * 400 + 3 * 400 * 400 + 2 * 400)  # DT(S): two products, a shortcut, inputs to both
    alpha, beta = NETWORKS["NVLink, one machine"]
    out = []
    for batch in us:
        for share in (share for share in us if share <= batch):
            n = batch // share
            total = us[share] + network_us(n, size, alpha, beta)
            out.append({"batch": batch, "gpus": n, "update_us": total, "times_faster": us[batch] / total})
    return out


# ---- simulation


def simulate_updates(n: int, lanes: int, fixed: float, each: float, reduce_us: float, jitter: float) -> float:
    """Mean µs of 2,000 updates in which every process takes its own time and all wait for the slowest."""
    rng = np.random.default_rng(n)
    share = fixed + math.ceil(lanes / n) * each
    own = share * rng.lognormal(-(jitter**2) / 2, jitter, (2000, n))
    return float(own.max(1).mean()) + (reduce_us if n > 1 else 0.0)


def straggling(n: int, jitter: float) -> float:
    """The expected slowest of n: exp(σ √(2 ln n)) is the usual bound for log-normal times."""
    return math.exp(jitter * math.sqrt(2 * math.log(n)) - jitter**2 / 2) if n > 1 else 1.0


def simulate_sweep(trials: int, machines: int, mean: float, spread: float) -> float:
    """Makespan of trials of log-normal length, each taken by the machine that is free first; mean of 200 sweeps."""
    rng, spans = np.random.default_rng(machines), []
    for _ in range(200):
        free = np.zeros(machines)
        for length in rng.lognormal(math.log(mean) - spread**2 / 2, spread, trials):
            free[free.argmin()] += length
        spans.append(free.max())
    return float(np.mean(spans))


def sweep_time(trials: int, machines: int, mean: float, spread: float) -> float:
    """The model: the work's share, and half of the longest trial of a round while others have ended."""
    if machines == 1:
        return trials * mean
    longest = mean * straggling(min(machines, trials), spread)
    return max(trials * mean / machines + longest / 2, longest)


def model(measured: Path, place: Path, picture: Path) -> None:
    """Compare model, simulation and measurement, and draw them."""
    data = json.loads(measured.read_text())
    one, two = data["processes"]["1"], data["processes"]["2"]
    lanes, size = data["lanes"], one["bytes"][0]
    fixed, each = fit(lanes, one["update_us"])
    beside = fit([B // 2 for B in lanes], two["beside_us"])
    reduce_us = statistics.median(two["allreduce_us"])
    points = [
        {
            "lanes": B,
            "one_us": a,
            "two_us": b,
            "one_model_us": update_us(1, B, fixed, each, 0),
            "two_model_us": update_us(2, B, *beside, reduce_us),
            "two_simulated_us": simulate_updates(2, B, *beside, reduce_us, 0.1),
        }
        for B, a, b in zip(lanes, one["update_us"], two["update_us"], strict=True)
    ]
    networks = [
        {
            "network": name,
            "alpha_us": alpha,
            "allreduce_2_us": network_us(2, size, alpha, beta),
            "break_even_lanes_this_cpu": break_even(fixed, each, network_us(2, size, alpha, beta)),
            "break_even_us_of_an_update": 2 * network_us(2, size, alpha, beta),
        }
        for name, (alpha, beta) in NETWORKS.items()
    ]
    sweeps = [
        {
            "machines": m,
            "model": sweep_time(1000, m, 1.0, 0.5),
            "simulated": simulate_sweep(1000, m, 1.0, 0.5),
        }
        for m in (1, 2, 4, 8, 16, 32, 64, 128, 256)
    ]
    write_json(
        place,
        {
            "measured": measured.name,
            "measured_at_commit": data["commit"],
            "commit": commit(),
            "versions": environment("cpu"),
            "cores": data["versions"]["cores"],
            "load_before": data["load_before"],
            "fixed_us": fixed,
            "each_lane_us": each,
            "beside_us": dict(zip(("fixed", "each_lane"), beside, strict=True)),
            "allreduce_us": reduce_us,
            "bytes": size,
            "break_even_lanes": break_even(fixed, each, reduce_us),
            "points": points,
            "networks_assumed": networks,
            "sweep_of_1000_trials": sweeps,
            "h200_layer": h200(ROOT / "results" / "bench" / "h200-layers"),
        },
    )
    write_atomically(picture, draw(points, sweeps))


# ---- the page


def table(headings: list[str], rows: list[list[str]], marks: str) -> str:
    """Markdown; `marks` has l or r for each column."""
    rule = ["---" if mark == "l" else "---:" for mark in marks]
    lines = ["| " + " | ".join(cells) + " |" for cells in (headings, *rows)]
    return "\n".join([lines[0], f"|{'|'.join(rule)}|", *lines[1:]])


def ms(us: float) -> str:
    """Three digits of milliseconds."""
    return f"{us / 1000:.3g}"


def measured_text(m: dict) -> str:
    """What was measured of one run, and how far the model is from it."""
    points, beside, busy = m["points"], m["beside_us"], m["load_before"] > BUSY
    noted = f"others kept the machine busy (a load of {m['load_before']:.1f})" if busy else "an idle machine"
    alone, each_beside = (
        f"{ms(first)} ms + {ms(each)} ms"
        for first, each in ((m["fixed_us"], m["each_lane_us"]), (beside["fixed"], beside["each_lane"]))
    )
    how = (
        f"**Measured** on {m['cores']} cores, CPU, {noted} (`cpu.json`, commit {m['measured_at_commit']}): RNN of "
        f"{HIDDEN} units, {PITCHES} inputs and outputs, chunks of {CHUNK} steps, one thread a process, gloo over "
        f"loopback; the least of {ROUNDS} rounds. The fit to one process is {alone} a lane; to each of two that train "
        f"beside each other and share nothing, {each_beside}; the all-reduce of {m['bytes'] / 1000:.0f} kB takes "
        f"{ms(m['allreduce_us'])} ms."
    )
    keys = ("one_us", "two_us", "two_model_us", "two_simulated_us")
    rows = [[str(p["lanes"]), *(ms(p[key]) for key in keys)] for p in points]
    heads = ["lanes", "one process, ms", "two, ms", "two by the model, ms", "two simulated, ms"]
    ratios = [p["two_us"] / p["two_model_us"] for p in points]
    gains = {p["lanes"]: p["one_us"] / p["two_us"] for p in points}
    faster = ", ".join(str(lanes) for lanes, gain in gains.items() if gain > 1)
    found = (
        f"Two processes are faster than one at {faster} lanes, at most {max(gains.values()):.2g} times."
        if faster
        else "Two processes are nowhere faster than one."
    )
    found += f" What two take is {min(ratios):.2g} to {max(ratios):.2g} times what the model says."
    if busy:
        found += (
            " Two that wait for each other at every update wait for two free cores at the same time, of which neither "
            "the model nor the simulation knows."
        )
    return "\n\n".join([textwrap.fill(how, 120), table(heads, rows, "rrrrr"), textwrap.fill(found, 120)])


def networks_text(m: dict) -> str:
    """From which update on two processes pay."""
    known = {
        "NVLink, one machine": "NVLink, in one machine",
        "InfiniBand, one rack": "InfiniBand, in one rack",
    }
    rows = [[f"{known.get(n['network'], n['network'])} (α = {n['alpha_us']:.0f} µs)", f"{n['allreduce_2_us']:,.0f}",
             f"{n['break_even_us_of_an_update']:,.0f}"] for n in m["networks_assumed"]]  # fmt: skip
    rows.append(
        ["measured: gloo, two processes here", f"{m['allreduce_us']:,.0f}", f"{2 * m['allreduce_us']:,.0f}"]
    )
    heads = [
        f"all-reduce of {m['bytes'] / 1000:.0f} kB between two",
        "µs",
        "an update must take more than, µs",
    ]
    return table(heads, rows, "lrr")


def write_figures(page: Path, modelled: Path) -> None:
    """Put the figures of this run between the page's marks."""
    m, text = json.loads(modelled.read_text()), page.read_text(encoding="utf-8")
    for name, made in (("measured", measured_text(m)), ("networks", networks_text(m))):
        mark = re.compile(rf"(<!-- {name}:begin -->\n).*?(\n<!-- {name}:end -->)", re.DOTALL)
        assert mark.search(text), f"{page} has no marks for {name}"
        text = mark.sub(lambda found, made=made: f"{found[1]}{made}{found[2]}", text)
    write_atomically(page, text)


def draw(points: list[dict], sweeps: list[dict]) -> bytes:
    """Both comparisons as a PNG."""
    import io

    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    B = [p["lanes"] for p in points]
    for key, label, style in (
        ("one_us", "one process, measured", "o"),
        ("one_model_us", "one process, model", "-"),
        ("two_us", "two processes, measured", "s"),
        ("two_model_us", "two processes, model", "--"),
        ("two_simulated_us", "two processes, simulated", ":"),
    ):
        left.loglog(B, [p[key] / 1000 for p in points], style, label=label)
    left.set(xlabel="lanes", ylabel="ms an update", title="One run: RNN of 200 units, 2 cores")
    m = [s["machines"] for s in sweeps]
    right.loglog(m, [1000 / s["simulated"] for s in sweeps], "o", label="simulated")
    right.loglog(m, [1000 / s["model"] for s in sweeps], "-", label="model")
    right.loglog(m, m, ":", color="grey", label="ideal")
    right.set(xlabel="machines", ylabel="times faster", title="A sweep of 1,000 trials")
    for axes in (left, right):
        axes.legend(frameon=False)
    out = io.BytesIO()
    figure.savefig(out, format="png", dpi=120)
    return out.getvalue()


def main(words: list[str]) -> None:
    """Everything, or one step."""
    if words == ["worker"]:
        with joined(torch.device("cpu")) as everyone:
            figures = measure_here(everyone)
            if everyone.lead:
                print(json.dumps(figures))
        return
    if words not in ([], ["model"]):
        sys.exit(__doc__)
    if not words:
        measure(MEASURED)
    model(MEASURED, MODELLED, PICTURE)
    write_figures(PAGE, MODELLED)
    print(measured_text(json.loads(MODELLED.read_text())))


if __name__ == "__main__":
    main(sys.argv[1:])
