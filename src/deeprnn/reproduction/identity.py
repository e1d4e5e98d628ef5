"""What makes two runs the same experiment: everything that decides what is learnt, first stages included."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from deeprnn.training.recipe import Recipe

EXEMPT = {
    "seeds": "an entry has its seed beside the identity: entries of one identity are the seeds of one cell",
    "save": "when the state is saved changes no update: a run that is cut off and goes on is bit for bit the same",
    "pretrain.recipe": "the first stage that it names is hashed in its place, whatever its file is called",
}
"""fields and sections of a recipe that an identity leaves out, and why"""

SCHEDULES = {
    "paper": ("beta", "patience", "restore_best"),
    "halving": ("patience", "factor", "minimum", "restore_best"),
    "cosine": ("floor",),
    "constant": (),
}
"""what each schedule reads beside its name and the warm-up"""


def identity(recipe: Recipe, first: Recipe | None = None) -> str:
    """A short hash of everything that decides what is learnt, except for the seed.

    `first` is the recipe of the first stage that the parameters come from, resolved: the name in `pretrain.recipe` says
    nothing about what stands under that name today. Only what differs from the defaults is hashed, so a new field with
    a default changes no identity.
    """
    plain = _changed(recipe)
    if first is not None:
        pretrain = {k: v for k, v in plain.pop("pretrain", {}).items() if k != "recipe"}
        plain |= {"pretrain": pretrain, "first_stage": _changed(first)}
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()[:10]


def _changed(recipe: Recipe) -> dict[str, Any]:
    """The fields of a recipe that differ from the defaults and that something reads."""
    plain, default = without_idle(recipe), Recipe().to_dict()
    out: dict[str, Any] = {}
    for name, part in plain.items():
        if name in EXEMPT:
            continue
        if isinstance(part, dict):
            part = {k: v for k, v in part.items() if v != default[name][k]}
        if part and part != default[name]:
            out[name] = part
    return out


def without_idle(recipe: Recipe) -> dict[str, Any]:
    """The recipe as plain data; settings that nothing reads in this model and schedule at their defaults."""
    plain, default, model = recipe.to_dict(), Recipe().to_dict(), recipe.model
    units = model.unit + model.intermediate_unit
    if model.output_hidden:
        units += model.output_unit
    else:
        plain["model"]["output_unit"] = default["model"]["output_unit"]
        plain["init"]["output_hidden_std"] = default["init"]["output_hidden_std"]
    if model.output == "plain":
        plain["model"]["nade_size"] = default["model"]["nade_size"]
    if "relu" not in units and not model.cell:  # a cell initialises itself, by whatever it likes
        plain["init"]["rectifier_bias"] = default["init"]["rectifier_bias"]
    read = ("name", "warmup", *SCHEDULES[recipe.schedule.name])
    plain["schedule"] |= {k: v for k, v in default["schedule"].items() if k not in read}
    if recipe.evaluation.streams == 1:  # exact but for rounding, however many steps are taken at a time
        plain["evaluation"] |= {k: default["evaluation"][k] for k in ("chunk", "width")}
    return plain
