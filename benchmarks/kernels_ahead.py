"""All GPU kernels of some recipes into the cache on disk before they are needed, by as many processes as cores.

A run compiles its kernels when it meets them, and holds others up meanwhile: runs that share a card build and capture
one after the other. Here workers go through the first update and the scoring of every recipe with the card's double
(`rehearsal.py`) to learn which kernels it will ask for, then compile each of them once. They are forked before this
process touches the card.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from multiprocessing import get_context
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from rehearsal import rehearsal

from deeprnn.backends.cuda import nvrtc
from deeprnn.data.batching import music_chunks, text_chunks
from deeprnn.data.music import MusicData
from deeprnn.training import evaluate
from deeprnn.training.loading import load_data
from deeprnn.training.loop import Trainer
from deeprnn.training.members import members_of
from deeprnn.training.recipe import Recipe


class Request(NamedTuple):
    """One compilation, as `nvrtc.cubin` is asked for it."""

    source: str
    macros: tuple[tuple[str, str], ...]
    arch: str
    generated: tuple[tuple[str, str], ...]


def workers(count: int | None = None) -> ProcessPoolExecutor:
    """Processes for this and other work beside the card; they exist when this returns."""
    pool = ProcessPoolExecutor(
        count or os.cpu_count(),
        mp_context=get_context("fork"),
        initializer=torch.set_num_threads,
        initargs=(1,),
    )
    pool.submit(os.getpid).result()
    return pool


def requests_of(recipe: Recipe) -> list[Request]:
    """The kernels that training and scoring by a recipe ask for."""
    found: dict[Request, None] = {}

    def cubin(
        source: str, macros: dict[str, Any], arch: str, generated: dict[str, str] | None = None
    ) -> bytes:
        texts = tuple(sorted((name, str(value)) for name, value in macros.items()))
        found[Request(source, texts, arch, tuple(sorted((generated or {}).items())))] = None
        return b""

    with rehearsal(training=True), patch.object(nvrtc, "cubin", cubin):
        data = load_data(recipe.data)
        trainer = Trainer(recipe, data)
        _train(trainer, data)
        _score(trainer, data)
    return list(found)


def _train(trainer: Trainer, data: Any) -> None:
    """One update of every chunk length that a GPU's plan has."""
    part = trainer.recipe.data
    if isinstance(data, MusicData):
        plan = music_chunks(data.splits["train"], chunk=part.chunk, lanes=part.lanes, seed=0, epoch=1)
    else:
        plan = text_chunks(data.splits["train"], chunk=part.chunk, lanes=part.lanes)
    for length in plan.distinct_lengths:
        trainer.updater.update([plan[plan.lengths.index(length)]])


def _score(trainer: Trainer, data: Any) -> None:
    """One batch of every length of every split: through time alone, but for a NADE, whose output has kernels too."""
    model = trainer.model.eval()
    views = {name: view[0] for name, view in trainer.layout.views(trainer.updater.parameters).items()}
    for split in data.splits:
        plan = evaluate.evaluation_plan(data, split, trainer.recipe.evaluation)
        for length in plan.distinct_lengths:
            x, y, _, reset = plan[plan.lengths.index(length)]
            state = model.initial_state(plan.lanes)
            with torch.no_grad():
                if trainer.spec.output == "nade":
                    whole = {f"model.{name}": view for name, view in views.items()}
                    evaluate._call(evaluate.StepNats(model), whole, x, y, state, reset)
                else:
                    torch.func.functional_call(_Levels(model), {f"model.{n}": v for n, v in views.items()},
                                               (x, state, reset))  # fmt: skip


class _Levels(torch.nn.Module):
    """A model without its output."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Any, state: Any, reset: Any) -> Any:
        return self.model.level_states(x, state, reset, None)


def compile_one(request: Request) -> float:
    """Into the cache on disk; the seconds it took."""
    began = time.perf_counter()
    nvrtc.cubin(request.source, dict(request.macros), request.arch, dict(request.generated))
    return time.perf_counter() - began


def compile_all(pool: ProcessPoolExecutor, recipes: Sequence[Recipe], seconds: float) -> dict[str, Any]:
    """All kernels of the recipes, the first recipe's first; how many, in which time, and what failed."""
    began, known, failures = time.perf_counter(), set[Request](), list[str]()
    collecting: dict[Future[Any], Recipe] = {pool.submit(requests_of, r): r for r in _distinct(recipes)}
    compiling: dict[Future[Any], Request] = {}
    spent = 0.0
    while collecting or compiling:
        left = seconds - (time.perf_counter() - began)
        done, _ = wait([*collecting, *compiling], timeout=max(0.0, left), return_when=FIRST_COMPLETED)
        if not done:
            failures.append(f"not all compiled in {seconds:.0f} s")
            break
        for future in done:
            recipe = collecting.pop(future, None)
            request = compiling.pop(future, None)
            if (error := future.exception()) is not None:
                what = f"{recipe.data.name}/{recipe.model.kind}" if recipe else request and request.source
                failures.append(f"{what}: {type(error).__name__}: {str(error)[-300:]}")
            elif recipe is not None:
                new = [r for r in future.result() if r not in known]
                known.update(new)
                compiling |= {pool.submit(compile_one, r): r for r in new}
            else:
                spent += future.result()
    return {"kernels": len(known), "seconds": round(time.perf_counter() - began, 1),
            "core_seconds": round(spent, 1), "failures": failures[:10]}  # fmt: skip


def _distinct(recipes: Sequence[Recipe]) -> list[Recipe]:
    """One of those that ask for the same kernels: the shape of a model decides, not how it is trained."""
    found: dict[Any, Recipe] = {}
    for recipe in recipes:
        drop = recipe.regulariser.dropout
        key = (recipe.data.name, recipe.data.chunk, recipe.data.lanes, recipe.model, drop, recipe.evaluation,
               recipe.optimiser.name, len(members_of(recipe)))  # fmt: skip
        found.setdefault(key, recipe)
    return list(found.values())
