"""A model drawn in the manner of the paper's Figure 2: unfolded over two steps, one box per layer.

Time runs to the right and depth runs up. A transition's layers stand in a row between two states;
shortcuts arch over them. Boxes stand on whole columns, so that the lanes halfway between are free for
the lines that pass a level by.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from deeprnn.model.notation import label, short_count
from deeprnn.model.specs import ModelSpec
from deeprnn.model.structure import Anatomy, Layer, Link, dissect
from deeprnn.render.diagram import Box, Curve, Label, Picture, Point, Words, diagram_png, svg_text

COLUMN, ROW, WIDE, HIGH = 148.0, 98.0, 88.0, 54.0
MARGIN, HEAD, STUB = 46.0, 58.0, 40.0
TIMES = ("t−1", "t")


def model_svg(spec: ModelSpec, title: str | None = None) -> str:
    """The model as SVG text."""
    return svg_text(model_picture(spec, title))


def model_png(spec: ModelSpec, title: str | None = None, dpi: int = 150) -> bytes:
    """The model as the bytes of a PNG file."""
    return diagram_png(model_picture(spec, title), dpi)


@dataclass(frozen=True)
class DiagramLayout:
    """Where the layers of one step stand: columns to the right, heights upward in pixels."""

    column: dict[str, float]
    height: dict[str, float]
    period: int  # columns from one step to the next
    floor: float  # y of height zero

    def centre(self, key: str, step: int) -> Point:
        """The middle of a layer's box."""
        x = MARGIN + STUB + WIDE / 2 + (self.column[key] + step * self.period) * COLUMN
        return x, self.floor - self.height[key]


def model_picture(spec: ModelSpec, title: str | None = None) -> Picture:
    """The geometry of a model's picture."""
    anatomy = dissect(spec)
    layout = _lay_out(spec, anatomy)
    boxes = [_box(layout, layer, step) for step in (0, 1) for layer in anatomy.layers]
    # A cell may have several matrices between the same two boxes: one arrow stands for all.
    drawn = {(k.source, k.target, k.kind): k for k in reversed(anatomy.links)}
    links = [k for k in anatomy.links if drawn[k.source, k.target, k.kind] is k]
    curves = [curve for link in links for curve in _curves(layout, anatomy, link)]
    title = label(spec) if title is None else title
    count, short = f"{anatomy.weights:,}", short_count(anatomy.weights)
    weights = f"{count} weights" + (f" ({short})" if not short.isdigit() else "")
    words = [
        Words(MARGIN, 32, title, 18, bold=True),
        Words(MARGIN, 50, weights, 11.5),
    ]
    width = max(box.x for box in boxes) + WIDE / 2 + STUB + MARGIN
    height = layout.floor + HIGH / 2 + MARGIN * 0.6
    return Picture(
        width, height, tuple(boxes), tuple(curves), tuple(words), f"{title}, unfolded over two steps"
    )


def _lay_out(spec: ModelSpec, anatomy: Anatomy) -> DiagramLayout:
    """Give every layer a column and a height.

    Each level starts above the state of the level below, so that every arrow points right or up.
    """
    column: dict[str, float] = {}
    height: dict[str, float] = {"x": 0.0}
    at, top = 0, 0.0
    for number, level in enumerate(spec.levels, 1):
        tag = f"^{number}" if len(spec.levels) > 1 else ""
        entry = _entry_column(spec, number) + at
        if number == 1:
            column["x"] = entry
            if spec.embedding is not None:
                top += ROW
                column["e"], height["e"] = entry, top
        for i in range(1, len(level.input_mlp_sizes) + 1):
            top += ROW
            column[f"e{i}{tag}"], height[f"e{i}{tag}"] = (entry if number == 1 else at), top
        top += ROW
        for n in range(1, level.depth + 1):
            key = f"h{tag}" if n == level.depth else f"z{n}{tag}"
            column[key], height[key] = at + n - 1, top
        at += level.depth - 1
        top += _arch(level.depth) * (level.shortcut != "none" and level.depth > 1)
    for layer in anatomy.layers:
        if layer.role in ("output_hidden", "output"):
            top += ROW
            column[layer.key], height[layer.key] = at, top
    period = max(level.depth for level in spec.levels)
    return DiagramLayout(column, height, period, HEAD + HIGH / 2 + 20 + top)


def _entry_column(spec: ModelSpec, number: int) -> float:
    """Where the input of a level stands below it: under the layer it enters, or amid them all."""
    level = spec.levels[number - 1]
    if level.input_to == "first":
        return 0
    if level.input_to == "last":
        return level.depth - 1
    middle = (level.depth - 1) / 2
    return math.floor(middle) if level.input_mlp_sizes else middle


def _arch(span: int) -> float:
    """How high a shortcut rises over `span` columns."""
    return 20.0 + 16.0 * span


def _box(layout: DiagramLayout, layer: Layer, step: int) -> Box:
    x, y = layout.centre(layer.key, step)
    level = f"({layer.level})" if layer.level else ""
    sub = f"{layer.index},{TIMES[step]}" if layer.index else TIMES[step]
    unit = "" if layer.role == "input" else f" {layer.unit}"
    note = f"{layer.size}{unit}" if step == 1 else ""
    return Box(x, y, WIDE, HIGH, Label(layer.letter, sub, level), note, layer.role)


def _curves(layout: DiagramLayout, anatomy: Anatomy, link: Link) -> list[Curve]:
    """The arrows of one link: at both steps, and cut off at the edges of time where it comes from before."""
    name = Label(
        link.matrix[0], link.matrix[1:], f"({level})" if (level := anatomy.layer(link.target).level) else ""
    )
    if link.kind == "chain":
        return [_back(layout, link, step, name if step else None) for step in (0, 1)]
    if not link.delayed:
        return [_upward(layout, link, step, name if step else None) for step in (0, 1)]
    draw = _over if link.kind == "shortcut" else _across
    return [draw(layout, link, step, name if step == 1 else None) for step in (0, 1, 2)]


def _across(layout: DiagramLayout, link: Link, step: int, name: Label | None) -> Curve:
    """From a state to the first layer of the next step, straight to the right."""
    x0, y = layout.centre(link.source, step - 1)
    x1, _ = layout.centre(link.target, step)
    start, end = x0 + WIDE / 2, x1 - WIDE / 2
    if step == 0:
        start = end - STUB
    if step == 2:
        end = start + STUB
    middle = ((start + end) / 2, y)
    return Curve((start, y), ((middle, middle, (end, y)),), link.kind, name, (middle[0] - 3, y - 13))


def _back(layout: DiagramLayout, link: Link, step: int, name: Label | None) -> Curve:
    """Down on the left, from the notes of a frame to the layer that they came from."""
    x0, y0 = layout.centre(link.source, step)
    x1, y1 = layout.centre(link.target, step)
    a, b = (x0 - WIDE / 2, y0), (x1 - WIDE / 2, y1)
    side = min(a[0], b[0]) - 22
    middle = (side, (y0 + y1) / 2)
    parts = (((side, y0), (side, y0 + 10), middle), ((side, y1 - 10), (side, y1), b))
    return Curve(a, parts, "shortcut", name, (side - 9, middle[1]))


def _over(layout: DiagramLayout, link: Link, step: int, name: Label | None) -> Curve:
    """A shortcut: an arch from a state over the layers it leaves out."""
    x0, y0 = layout.centre(link.source, step - 1)
    x1, y1 = layout.centre(link.target, step)
    start, end = (x0 + WIDE * 0.28, y0 - HIGH / 2), (x1 - WIDE * 0.28, y1 - HIGH / 2)
    crown = y0 - HIGH / 2 - _arch(round((x1 - x0) / COLUMN))
    reach = 0.45 * COLUMN
    rise = ((start[0], crown + 8), (start[0] + 0.2 * reach, crown), (start[0] + reach, crown))
    fall = ((end[0] - 0.2 * reach, crown), (end[0], crown + 8), end)
    if step == 0:
        first = (x0 + WIDE - STUB, crown)
        middle = (end[0] - reach, crown)
        return Curve(first, ((first, middle, middle), fall), link.kind)
    if step == 2:
        stop = (start[0] + WIDE * 0.22 + STUB, crown)
        return Curve(start, (((start[0], crown + 8), (start[0] + 10, crown), stop),), link.kind)
    level_part = ((start[0] + reach, crown), (end[0] - reach, crown), (end[0] - reach, crown))
    at = ((start[0] + end[0]) / 2, crown)
    return Curve(start, (rise, level_part, fall), link.kind, name, at)


def _upward(layout: DiagramLayout, link: Link, step: int, name: Label | None) -> Curve:
    """A line within one step: straight where neighbours are joined, else through a free lane."""
    x0, y0 = layout.centre(link.source, step)
    x1, y1 = layout.centre(link.target, step)
    if link.kind == "transition":
        a, b = (x0 + WIDE / 2, y0), (x1 - WIDE / 2, y1)
        middle = ((a[0] + b[0]) / 2, y0)
        return Curve(a, ((middle, middle, b),), link.kind, name, (middle[0] - 3, y0 - 13))
    if link.kind == "skip":
        return _through_lane(layout, link, step, name)
    aside = max(-1.0, min(1.0, (x1 - x0) / COLUMN / 1.5)) * WIDE * 0.22
    a, b = (x0 + aside, y0 - HIGH / 2), (x1 - aside * 0.6, y1 + HIGH / 2)
    half = (a[1] - b[1]) * 0.45
    parts = (((a[0], a[1] - half), (b[0], b[1] + half), b),)
    at = ((a[0] + b[0]) / 2 + (13 if x1 == x0 else 0), (a[1] + b[1]) / 2)
    return Curve(a, parts, link.kind, name, at)


def _through_lane(layout: DiagramLayout, link: Link, step: int, name: Label | None) -> Curve:
    """Around the layers between: out to the lane beside the source, up, and in from below."""
    x0, y0 = layout.centre(link.source, step)
    x1, y1 = layout.centre(link.target, step)
    column = layout.column[link.source]
    side = -1 if link.source == "x" else 1  # the input passes on the left, states on the right
    on_lane = column != int(column)
    # A little off the middle of the gap: the neighbouring step's lane shares it.
    lane = x0 if on_lane else x0 + side * (COLUMN / 2 - 11)
    spread = 0.34 * WIDE * (1 if x1 < lane else -1)
    a, b = (x0 if on_lane else x0 + side * WIDE * 0.36, y0 - HIGH / 2), (x1 + spread, y1 + HIGH / 2)
    low, high = a[1] - 34, b[1] + 30
    first = ((a[0], a[1] - 22), (lane, low + 18), (lane, low))
    straight = ((lane, low), (lane, high), (lane, high))
    last = ((lane, high - 14), (b[0], b[1] + 26), b)
    return Curve(a, (first, straight, last), link.kind, name, (lane, high + 8))
