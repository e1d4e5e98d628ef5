"""Where runs depart from the paper's text, what it leaves unsaid, and in what two models were not trained alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from deeprnn.model import paper
from deeprnn.model.init import CHAR, MUSIC, WORD
from deeprnn.reproduction.entries import Entry
from deeprnn.reproduction.identity import without_idle
from deeprnn.training.recipe import Recipe

CHUNKS = {"nottingham": 200, "musedata": 200, "jsb": 50}
BETAS = {"nottingham": 2330.0, "musedata": 1475.0, "jsb": 100.0}
INITS = {"ptb-char": CHAR, "ptb-word": WORD}


def deviations(entries: Sequence[Entry]) -> tuple[str, ...]:
    """Everything that a reader of the table must know about how the runs of a cell were trained."""
    recipe, first = entries[0].recipe, entries[0].first
    stage = () if first is None else (_first_stage(first, entries),)
    music = recipe.data.name in CHUNKS
    order = (f"one song order (seed {recipe.data.order_seed}) for all seeds",) * (
        music and recipe.data.order == "shared"
    )
    return (*departures(recipe), *stage, *order, *marks_of(entries))


def departures(recipe: Recipe) -> tuple[str, ...]:
    """Departures of one recipe from the paper's text; of DOT(S)-RNN*, whose training is unpublished, all of it."""
    data, part = recipe.data.name, recipe.optimiser
    music = data in CHUNKS
    star = recipe.model.kind == "dots-star"
    rate = "rates " + ", ".join(f"{r:g}" for r in recipe.rates) if recipe.rates else f"rate {part.rate:g}"
    schedule, published = recipe.schedule, "paper" if music else "halving"
    checks = {
        f"{recipe.data.lanes} lanes": recipe.data.lanes != 1,
        f"chunks of {recipe.data.chunk}": music and recipe.data.chunk != CHUNKS[data],
        _optimiser(recipe): part.name != "sgd",
        rate: music and (part.rate != 1.0 or bool(recipe.rates)),
        f"clipping at {part.clip:g}" if part.clip else "no clipping": music and not star and part.clip != 1.0,
        _schedule(recipe): schedule.name != published,
        f"beta {schedule.beta:g}": music and schedule.name == "paper" and schedule.beta != BETAS[data] and not star,
        _tau0(recipe): schedule.name == "paper" and (schedule.patience > 1 or schedule.restore_best),
        _noise(recipe): not star and recipe.regulariser.weight_noise != (0.0 if data == "ptb-char" else 0.075),
        _dropout(recipe): any(vars(recipe.regulariser.dropout).values()),
        "other initialisation": not star and _init(recipe) != _init(replace(recipe, init=INITS.get(data, MUSIC))),
        "no pretraining": recipe.model.kind in ("dots", "srnn") and not (recipe.pretrain.recipe or recipe.pretrain.run),
        "averaged weights": part.average != "none",
        "bf16": part.precision != "fp32",
        f"scored in {recipe.evaluation.streams} streams": recipe.evaluation.streams != 1,
    }  # fmt: skip
    return tuple(text for text, present in checks.items() if present)


def _tau0(recipe: Recipe) -> str:
    """The footnote's τ0 is the first rise of the validation cost, and nothing is restored there."""
    restored = " from the best parameters" if recipe.schedule.restore_best else ""
    return f"decay{restored} after {max(1, recipe.schedule.patience)} epochs without a new best"


def _first_stage(first: Recipe, entries: Sequence[Entry]) -> str:
    """What a cell's runs started from: model, size and epochs, and where it was trained otherwise."""
    units = " and ".join(map(str, first.model.hidden + first.model.intermediate[:1]))
    label = paper.LABELS.get(first.model.kind) or "DT-RNN"
    epochs = _range([e.stages[0]["epochs"] for e in entries])
    own = entries[0].recipe
    ways = [(way(first), way(own)) for way in (_optimiser, _noise, _dropout)]
    other = "".join(f", {a or 'no dropout'}" for a, b in ways if a != b)
    return f"first stage: {label} of {units} units, {epochs} epochs{other}"


def epochs_text(entries: Sequence[Entry]) -> str:
    """Epochs of every stage, over seeds: 93–98 + 56–104."""
    if not entries:
        return ""
    return " + ".join(
        _range([stage["epochs"] for stage in stages])
        for stages in zip(*(e.stages for e in entries), strict=True)
    )


def _range(counts: Sequence[int | None]) -> str:
    known = [c for c in counts if c is not None]
    if not known:
        return "?"
    text = "–".join(str(c) for c in dict.fromkeys((min(known), max(known))))
    return text if len(known) == len(counts) else f"{text} ({len(counts) - len(known)} unknown)"


def marks_of(entries: Sequence[Entry]) -> tuple[str, ...]:
    """What a reader must know of some runs, and of how many."""
    names = dict.fromkeys(mark for entry in entries for mark in entry.marks)
    return tuple(f"{sum(name in e.marks for e in entries)} of {len(entries)} {name}" for name in names)


def unlike_text(deep: Sequence[Entry], shallow: Sequence[Entry]) -> str:
    """In what two models are not alike: epochs of all stages, size, and how their last stages were trained."""
    a, b = deep[0], shallow[0]
    ways = [("epochs", epochs_text(deep), epochs_text(shallow)), ("parameters", _size(a), _size(b))]
    ways += [("", _planned(a), _planned(b))]
    ways += [("", way(a.recipe), way(b.recipe)) for way in (_optimiser, _noise, _dropout)]
    return "; ".join(
        f"{x or 'no dropout'}{f' {unit}' * bool(unit)} against {y or 'no dropout'}"
        for unit, x, y in ways
        if x != y
    )


def _size(entry: Entry) -> str:
    return f"{int(entry.raw['parameters']):,}"


def _planned(entry: Entry) -> str:
    """The schedule, of a cosine with the lengths of all stages."""
    recipes = [r for r in (entry.first, entry.recipe) if r is not None]
    if any(r.schedule.name != "cosine" for r in recipes):
        return f"{entry.recipe.schedule.name} schedule"
    return f"cosine schedule of {' + '.join(str(r.stop.epochs) for r in recipes)} epochs"


def _init(recipe: Recipe) -> Any:
    return without_idle(recipe)["init"]


def _optimiser(recipe: Recipe) -> str:
    part = recipe.optimiser
    if part.name == "momentum":
        return f"momentum {part.momentum:g}"
    return f"adamw with weight decay {part.weight_decay:g}" if part.name == "adamw" else part.name


def _schedule(recipe: Recipe) -> str:
    """A cosine's length decides as much as its shape: cells of one row may differ in it."""
    name = recipe.schedule.name
    return f"{name} schedule" + (f" of {recipe.stop.epochs} epochs" if name == "cosine" else "")


def _noise(recipe: Recipe) -> str:
    std = recipe.regulariser.weight_noise
    return f"weight noise {std:g}" if std else "no weight noise"


def _dropout(recipe: Recipe) -> str:
    rates = [f"{name} {p:g}" for name, p in vars(recipe.regulariser.dropout).items() if p]
    return "dropout " + ", ".join(rates) if rates else ""
