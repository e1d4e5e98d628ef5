"""What training costs beyond one layer's call: python benchmarks/training_speed.py FILE [--device cpu]

    population  DT(S) 400/400, batch 1, T = 200: loop and weight gradients of P models at once, through vmap; each
                compared with float64 first. On a GPU in a CUDA graph
    epochs      Nottingham by the paper's recipe for DT(S), its whole update, one seed and fifteen: setting up, then
                epoch by epoch. A process before it has compiled the kernels
    first_call  the first call of a process, with kernels compiled and with kernels on disk

Rows are added to FILE as soon as they are known. `--tiny` tries the script.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing import get_context
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]

import torch  # noqa: E402
from benchmarks.records import Row, append  # noqa: E402
from torch import Tensor  # noqa: E402

from deeprnn.backends import plain, unroll  # noqa: E402
from deeprnn.backends.call import Inputs  # noqa: E402
from deeprnn.backends.cuda import describe_plan  # noqa: E402
from deeprnn.backends.cuda.device import device_of  # noqa: E402
from deeprnn.bench import measure  # noqa: E402
from deeprnn.bench.first_call import first_calls  # noqa: E402
from deeprnn.bench.peers import Captured, Peer, Work  # noqa: E402

STEPS, HIDDEN, MEMBERS, COMPARED = 200, 400, (1, 2, 5, 8, 10, 15, 30), 8
TOLERANCE, REPEATS = 1e-5, 9


# ---- a population


def population(device: str, tiny: bool) -> Iterator[Row]:
    """All members of a population at once."""
    for members in (1, 2) if tiny else MEMBERS:
        work = Work(10 if tiny else STEPS, 1, 8 if tiny else HIDDEN, device=device)
        row: Row = {"members": members, "hidden": work.hidden, "depth": 2, "steps": work.steps, "batch": 1}
        if device == "cuda":
            row["kernels"] = describe_plan(work.cell, 1, members, device=device_of(0))
        row["error"] = error_of(dataclasses.replace(work, steps=min(work.steps, COMPARED)), members)
        if not row["error"] <= TOLERANCE:
            yield {**row, "failed": f"off by {row['error']:.1e}: not timed"}
            continue
        for name, call in calls_of(work, members).items():
            call()
            times = [measure.seconds_of(call, device) for _ in range(REPEATS)]
            row[f"{name}_us"] = round(statistics.median(times) * 1e6 / work.steps, 4)
        yield row


def calls_of(work: Work, members: int) -> dict[str, Callable[[], Any]]:
    """Forward alone and with the backward pass; on a GPU captured."""
    leaves, g = draw(work, members)

    def run() -> Tensor:
        return states(work, leaves)

    if work.device == "cuda":
        captured = Captured(Peer("ours", run, leaves, lambda: (g, [])), g)
        return {"forward": captured.forward, "train": captured.train}
    return {"forward": measure.without_gradients(run), "train": lambda: torch.autograd.grad(run(), leaves, g)}


def draw(work: Work, members: int) -> tuple[list[Tensor], Tensor]:
    """A, the first state and the matrices of all members as leaves; a gradient."""
    generator = torch.Generator(work.device).manual_seed(members)

    def normal(*size: int) -> Tensor:
        return torch.randn(members, *size, device=work.device, generator=generator)

    cell, B = work.cell, work.batch
    leaves = [normal(work.steps, B, cell.entry_width), normal(B, work.hidden)]
    leaves += [normal(*shape) * 0.7 / shape[1] ** 0.5 for shape in cell.matrices]
    return [x.requires_grad_() for x in leaves], normal(work.steps, B, work.hidden)


def states(work: Work, leaves: list[Tensor]) -> Tensor:
    """All states of all members."""

    def one(A: Tensor, h: Tensor, matrices: list[Tensor]) -> Tensor:
        return unroll(work.cell, Inputs(A, [h], matrices, [], []))[-1]

    return torch.func.vmap(one)(leaves[0], leaves[1], leaves[2:])


def error_of(work: Work, members: int) -> float:
    """The largest relative error of states and gradients of the first and the last member."""
    leaves, g = draw(work, members)
    h = states(work, leaves)
    found, worst = [h, *torch.autograd.grad(h, leaves, g)], 0.0
    for p in {0, members - 1}:
        own = [x[p].detach().double().requires_grad_() for x in leaves]
        truth = plain.forward(work.cell, Inputs(own[0], [own[1]], own[2:], [], []))[-1]
        slopes = torch.autograd.grad(truth, own, g[p].double())
        for got, want in zip(found, (truth, *slopes), strict=True):
            error = measure.relative(got[p], want.detach().cpu())
            worst = max(worst, error if error == error else float("inf"))
    return worst


# ---- epochs


def epochs(device: str, tiny: bool, counts: tuple[tuple[int, int], ...] = ((1, 6), (15, 5))) -> Iterator[Row]:
    """Setting up and epoch after epoch, for each number of seeds and epochs."""
    from deeprnn.data import load as load_data
    from deeprnn.training.loop import Trainer
    from deeprnn.training.recipe import load_recipe, override

    recipe = load_recipe("paper/nottingham/dts")
    data: Any = load_data(recipe.data.name)
    if tiny:
        data = dataclasses.replace(data, splits={name: part[:2] for name, part in data.splits.items()})
    for seeds, count in counts:
        changes = {"pretrain.recipe": "", "seeds": list(range(1, seeds + 1)), "stop.epochs": 1000}
        started = time.perf_counter()
        trainer = Trainer(override(recipe, changes), data, device=device)
        setup = time.perf_counter() - started
        for number in range(1, count + 1):
            times = [time.perf_counter()]
            trainer.train_epoch()
            _wait(device)
            times.append(time.perf_counter())
            rows = trainer.end_epoch()
            _wait(device)
            times.append(time.perf_counter())
            frames = sum(len(song) for song in data.splits["train"])
            row: Row = {"seeds": seeds, "epoch": number, "updates": trainer.length, "frames": frames}
            row |= {"updates_s": round(times[1] - times[0], 4), "validation_s": round(times[2] - times[1], 4)}
            row |= {"valid": [round(r["valid"], 4) for r in rows if r is not None][:3]}
            yield row | ({"setup_s": round(setup, 4)} if number == 1 else {})


def epochs_with_kernels_on_disk(device: str, tiny: bool) -> Iterator[Row]:
    """The same after a process that has compiled what they launch."""
    before = get_context("spawn").Process(target=_one_epoch, args=(device, tiny))
    before.start()
    before.join()
    if before.exitcode:
        raise RuntimeError(f"the epochs that compile the kernels ended with status {before.exitcode}")
    yield from epochs(device, tiny, ((1, 2), (2, 2)) if tiny else ((1, 6), (15, 5)))


def _one_epoch(device: str, tiny: bool) -> None:
    for _ in epochs(device, tiny, ((1, 1), (2, 1)) if tiny else ((1, 1), (15, 1))):
        pass


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


# ---- first calls


def first(device: str, tiny: bool) -> Iterator[Row]:
    """The first call of a process, kernels compiled and on disk."""
    yield first_calls(Work(5 if tiny else STEPS, 1, 9 if tiny else HIDDEN, device=device))


PARTS = {"population": population, "epochs": epochs_with_kernels_on_disk, "first_call": first}


def main() -> None:
    """Measure part by part; one that fails costs no other."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path, help="JSON lines; rows are added to it")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--tiny", action="store_true", help="small sizes, to try the script")
    given = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    append(given.file, {"about": measure.surroundings(given.device)})
    failed = []
    for name in given.only:
        try:
            for row in PARTS[name](given.device, given.tiny):
                append(given.file, {"part": name, **row})
                print(name, row, flush=True)
        except Exception as error:  # noqa: BLE001 - the other parts still have something to tell
            failed.append(f"{name}: {type(error).__name__}: {str(error)[:300]}")
            append(given.file, {"part": name, "failed": failed[-1]})
    if failed:
        sys.exit("\n".join(failed))


if __name__ == "__main__":
    main()
