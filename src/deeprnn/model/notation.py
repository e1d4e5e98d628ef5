"""A model as the paper writes it: its name, its equations line by line, and its size."""

from __future__ import annotations

from deeprnn.cells.lookup import label as cell_label
from deeprnn.model.explain import step_equations
from deeprnn.model.operator_specs import CellSpec
from deeprnn.model.specs import ModelSpec
from deeprnn.model.structure import Anatomy, Layer, cell_on_meta, dissect

SUBSCRIPTS = str.maketrans("0123456789+-t", "₀₁₂₃₄₅₆₇₈₉₊₋ₜ")
SUPERSCRIPTS = str.maketrans("0123456789()", "⁰¹²³⁴⁵⁶⁷⁸⁹⁽⁾")
NADE = "-NADE"
"""what a label ends with where ▷ is one"""


def label(spec: ModelSpec) -> str:
    """The name the paper would give: RNN, DT(S)-RNN, DOT-RNN, sRNN, sDT(S)-RNN, …, and RNN-NADE."""
    nade = NADE if spec.output == "nade" else ""
    if isinstance(spec.levels[0], CellSpec):
        deep = f"{'s' * (len(spec.levels) > 1)}{'DO-' * bool(spec.predict.sizes)}"
        return f"{deep}{cell_label(spec.levels[0].cell)}{nade}"
    deep_in = any(level.input_mlp_sizes for level in spec.levels)
    deep_transition = any(level.depth > 1 for level in spec.levels)
    shortcut = any(any(level.shortcuts) for level in spec.levels)
    letters = "I" * deep_in + "O" * bool(spec.predict.sizes) + "T" * deep_transition
    star = "*" if any(unit.startswith("lp") for level in spec.levels for unit in level.units) else ""
    stacked = "s" if len(spec.levels) > 1 else ""
    deep = f"D{letters}{'(S)' if shortcut else ''}-" if letters else ""
    return f"{stacked}{deep}RNN{star}{nade}"


def short_name(spec: ModelSpec) -> str:
    """The label as it is typed and as folders are named: rnn, dts, dots, srnn, sdts, dots-star, dots-nade."""
    full = label(spec).lower().replace("(s)", "s")
    name = full.removesuffix(NADE.lower())
    nade = full[len(name) :]
    return name.rstrip("*").removesuffix("-rnn") + "-star" * name.endswith("*") + nade


def short_count(count: int) -> str:
    """A count as the paper's Table 1 prints it, digits cut off: 465K, 1185K, 4.04M."""
    if count < 10_000:
        return str(count)
    return f"{count // 1000}K" if count < 2_000_000 else f"{count // 10_000 / 100:.2f}M"


def symbol(layer: Layer, time: str = "t") -> str:
    """A layer's name in plain text: h⁽²⁾ₜ₋₁, z₁."""
    level = f"({layer.level})".translate(SUPERSCRIPTS) if layer.level else ""
    index = str(layer.index).translate(SUBSCRIPTS) if layer.index else ""
    if not time:
        return f"{layer.letter}{index}{level}"
    comma = "," if index else ""
    return f"{layer.letter}{index}{comma}{time.translate(SUBSCRIPTS)}{level}"


def unit_symbol(unit: str) -> str:
    """A unit's name in an equation."""
    name, _, pool = unit.partition(":")
    return {"sigmoid": "σ", "identity": "", "maxout": f"max{pool}", "lp": f"L{pool}ₚ"}.get(name, name)


def equations(spec: ModelSpec) -> list[str]:
    """The model's equations, one line a layer, in the paper's letters."""
    anatomy = dissect(spec)
    lines = []
    for layer in anatomy.layers[1:]:
        level = spec.levels[max(layer.level, 1) - 1]
        if layer.role == "state" and isinstance(level, CellSpec):
            above = (
                f" at level {layer.level}, x being the output of the level below" if layer.level > 1 else ""
            )
            lines += [
                f"{cell_label(level.cell)}{above}:",
                *(f"  {line}" for line in step_equations(cell_on_meta(level))),
            ]
            continue
        if spec.predict.nade_size and layer.key in ("g", "y"):
            lines.append(_nade_equation(anatomy, layer))
            continue
        terms = []
        for link in anatomy.into(layer.key):
            source = symbol(anatomy.layer(link.source), "t-1" if link.delayed else "t")
            terms.append(f"{_matrix(link.matrix, layer)}{'ᵀ' * link.tied} {source}")
        if layer.bias:
            terms.append(_matrix(layer.bias, layer))
        lines.append(f"{symbol(layer)} = {unit_symbol(layer.unit)}({' + '.join(terms)})")
    return lines


def _nade_equation(anatomy: Anatomy, layer: Layer) -> str:
    """The line of a NADE's hidden layer or of its notes, i being the note."""
    links = [link for link in anatomy.into(layer.key) if link.matrix not in ("W", "V")]
    terms = [f"{_matrix(link.matrix, layer)} {symbol(anatomy.layer(link.source))}" for link in links]
    bias = " + ".join([*terms, *([_matrix(layer.bias, layer)] if layer.bias else [])])
    if layer.key == "g":
        return f"gᵢ,ₜ = σ({bias} + Σ_{{j<i}} Wⱼ yⱼ,ₜ)"
    return f"p(yᵢ,ₜ = 1 | y_{{<i}},ₜ) = σ(({bias})ᵢ + Vᵢ gᵢ,ₜ)"


def _matrix(name: str, layer: Layer) -> str:
    level = f"({layer.level})".translate(SUPERSCRIPTS) if layer.level else ""
    return name.translate(SUBSCRIPTS) + level
