"""Boxes and arrows as plain geometry, written as SVG text or drawn as PNG from the same numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING
from xml.sax.saxutils import escape

from deeprnn.render.style import INK, PAPER, SOFT, new_figure, png_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Point = tuple[float, float]

# kind -> (light, dark) colours; the SVG follows the reader's scheme, the PNG is always light.
FILLS = {
    "input": ("#e4ecdf", "#32402f"),
    "input_hidden": ("#eef2ea", "#2a352a"),
    "intermediate": ("#e3eaf4", "#2a3749"),
    "state": ("#c4d5ea", "#34527a"),
    "output_hidden": ("#f4e9d8", "#463a26"),
    "output": ("#f0dcc0", "#5a4524"),
}
STROKES = {
    "transition": ("#2f4a6d", "#a9c3e6"),
    "input": ("#5d8150", "#9dc48c"),
    "output": ("#a8752a", "#e0b26a"),
    "shortcut": ("#c2402e", "#ff8d78"),
    "skip": ("#8a4fa3", "#cf9be4"),
}
SERIF = "'STIX Two Text','Cambria Math',Georgia,'Times New Roman',serif"
LETTER_WIDTHS = {"x": 0.48, "f": 0.42, "z": 0.44, "h": 0.52, "o": 0.52, "y": 0.48, "W": 0.95, "U": 0.78, "V": 0.72,
                 "S": 0.54, "K": 0.72, "E": 0.68, "C": 0.7, "g": 0.5}  # fmt: skip
ARROW = 9.0  # length of an arrow's head
SANS = "system-ui,'Segoe UI',Helvetica,Arial,sans-serif"


@dataclass(frozen=True)
class Label:
    """A symbol with its decorations: h, subscript t−1, superscript (2)."""

    base: str
    sub: str = ""
    sup: str = ""


@dataclass(frozen=True)
class Box:
    """A layer; x and y are the centre, y points down."""

    x: float
    y: float
    w: float
    h: float
    label: Label
    note: str
    kind: str


@dataclass(frozen=True)
class Curve:
    """A chain of cubic curves: a start, then triples (control, control, end); an arrow head at the end."""

    start: Point
    parts: tuple[tuple[Point, Point, Point], ...]
    kind: str
    label: Label | None = None
    label_at: Point = (0.0, 0.0)
    head: bool = True

    def arrow_head(self) -> tuple[Point, Point, Point]:
        """The triangle at the end, along the last tangent."""
        control, end = self.parts[-1][1], self.parts[-1][2]
        before = control if math.dist(control, end) > 1e-6 else (self.parts[-1][0])
        angle = math.atan2(end[1] - before[1], end[0] - before[0])
        left, right = angle + math.pi - 0.42, angle + math.pi + 0.42
        return (
            end,
            (end[0] + ARROW * math.cos(left), end[1] + ARROW * math.sin(left)),
            (end[0] + ARROW * math.cos(right), end[1] + ARROW * math.sin(right)),
        )


@dataclass(frozen=True)
class Words:
    """A line of plain text."""

    x: float
    y: float
    text: str
    size: float = 12.0
    bold: bool = False
    anchor: str = "start"


@dataclass(frozen=True)
class Picture:
    """Everything to draw."""

    width: float
    height: float
    boxes: tuple[Box, ...]
    curves: tuple[Curve, ...]
    words: tuple[Words, ...] = ()
    title: str = ""


def svg_text(picture: Picture) -> str:
    """The picture as a self-contained SVG document that follows the reader's light or dark scheme."""
    w, h = picture.width, picture.height
    body = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_n(w)} {_n(h)}" width="{_n(w)}" '
        f'height="{_n(h)}" role="img" class="deeprnn-model">',
        f"<title>{escape(picture.title)}</title>",
        f"<style>{_css()}</style>",
        f'<rect class="paper" width="{_n(w)}" height="{_n(h)}"/>',
    ]
    body += [_svg_curve(curve) for curve in picture.curves]
    body += [_svg_box(box) for box in picture.boxes]
    body += [_svg_label(c.label, *c.label_at, 13, f"halo t-{c.kind}") for c in picture.curves if c.label]
    for line in picture.words:
        weight = ' font-weight="700"' if line.bold else ""
        body.append(
            f'<text class="words{"" if line.bold else " soft"}" x="{_n(line.x)}" y="{_n(line.y)}" '
            f'font-size="{_n(line.size)}" text-anchor="{line.anchor}"{weight}>{escape(line.text)}</text>'
        )
    return "\n".join([*body, "</svg>"]) + "\n"


def _css() -> str:
    def rules(dark: int) -> str:
        paper, ink, soft = (("#fdfcf9", INK, SOFT), ("#15191f", "#e8eaee", "#98a2b3"))[dark]
        out = [f".paper{{fill:{paper}}}.ink,.words{{fill:{ink}}}.soft{{fill:{soft}}}"]
        out.append(f".halo{{stroke:{paper};stroke-width:4;paint-order:stroke;stroke-linejoin:round}}")
        out += [f".b-{kind}{{fill:{fill[dark]};stroke:{ink}}}" for kind, fill in FILLS.items()]
        for kind, stroke in STROKES.items():
            out.append(f".c-{kind}{{stroke:{stroke[dark]}}}.t-{kind}{{fill:{stroke[dark]}}}")
        return "".join(
            f".deeprnn-model {rule}" for rule in "".join(out).replace("}", "}\n").split("\n") if rule
        )

    fixed = (
        f".deeprnn-model .math{{font-family:{SERIF};font-style:italic}}"
        f".deeprnn-model .words,.deeprnn-model .note{{font-family:{SANS}}}"
        ".deeprnn-model path{fill:none;stroke-width:1.8}.deeprnn-model .c-shortcut{stroke-width:2.4}"
        ".deeprnn-model polygon{stroke:none}.deeprnn-model .box{stroke-width:1.2}"
    )
    return f"{fixed}{rules(0)}@media (prefers-color-scheme:dark){{{rules(1)}}}"


def _svg_curve(curve: Curve) -> str:
    path = f"M{_p(curve.start)}" + "".join(f"C{_p(a)} {_p(b)} {_p(c)}" for a, b, c in curve.parts)
    out = f'<path class="c-{curve.kind}" d="{path}"/>'
    if curve.head:
        points = " ".join(_p(point) for point in curve.arrow_head())
        out += f'<polygon class="t-{curve.kind}" points="{points}"/>'
    return out


def _svg_box(box: Box) -> str:
    x, y = box.x - box.w / 2, box.y - box.h / 2
    rect = (
        f'<rect class="box b-{box.kind}" x="{_n(x)}" y="{_n(y)}" width="{_n(box.w)}" '
        f'height="{_n(box.h)}" rx="9"/>'
    )
    if not box.note:
        return rect + _svg_label(box.label, box.x, box.y, 21, "ink")
    note = (
        f'<text class="note soft" x="{_n(box.x)}" y="{_n(box.y + 17)}" font-size="10.5" text-anchor="middle">'
    )
    return rect + _svg_label(box.label, box.x, box.y - 7, 20, "ink") + note + f"{escape(box.note)}</text>"


def _svg_label(label: Label | None, x: float, y: float, size: float, css: str) -> str:
    """A symbol centred at (x, y); sub- and superscript stand above each other."""
    if label is None:
        return ""
    wide = LETTER_WIDTHS.get(label.base, 0.6) * size
    small = 0.62 * size
    tail = max(len(label.sub), len(label.sup)) * 0.48 * small
    left = x - (wide + tail) / 2
    base = y + 0.33 * size
    out = [(left, base, size, label.base)]
    after = left + wide + 0.03 * size
    if label.sub:
        out.append((after, base + 0.24 * size, small, label.sub))
    if label.sup:
        out.append((after + 0.06 * size, base - 0.48 * size, small, label.sup))
    return "".join(
        f'<text class="math {css}" x="{_n(px)}" y="{_n(py)}" font-size="{_n(ps)}">{escape(text)}</text>'
        for px, py, ps, text in out
    )


def _n(value: float) -> str:
    return f"{value:.1f}".rstrip("0").rstrip(".")


def _p(point: Point) -> str:
    return f"{_n(point[0])},{_n(point[1])}"


def diagram_png(picture: Picture, dpi: int = 150) -> bytes:
    """The picture as the bytes of a PNG file."""
    figure = new_figure(picture.width / 96, picture.height / 96)
    figure.set_layout_engine("none")
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_xlim(0, picture.width)
    axes.set_ylim(picture.height, 0)
    axes.axis("off")
    for curve in picture.curves:
        _draw_curve(axes, curve)
    for box in picture.boxes:
        _draw_box(axes, box)
    anchors = {"start": "left", "middle": "center", "end": "right"}
    for line in picture.words:
        axes.text(
            line.x, line.y, line.text, fontsize=line.size * 0.72, ha=anchors[line.anchor], va="baseline",
            color=INK if line.bold else SOFT, fontweight="bold" if line.bold else "normal",
        )  # fmt: skip
    return png_bytes(figure, dpi)


def _draw_curve(axes: Axes, curve: Curve) -> None:
    from matplotlib.patches import PathPatch, Polygon
    from matplotlib.path import Path

    colour = STROKES[curve.kind][0]
    points = [curve.start, *(point for part in curve.parts for point in part)]
    path = Path(points, [Path.MOVETO] + [Path.CURVE4] * (len(points) - 1))
    width = 1.75 if curve.kind == "shortcut" else 1.3
    axes.add_patch(PathPatch(path, facecolor="none", edgecolor=colour, linewidth=width, zorder=1))
    if curve.head:
        axes.add_patch(Polygon(curve.arrow_head(), facecolor=colour, linewidth=0, zorder=2))
    if curve.label:
        from matplotlib.patheffects import Normal, Stroke

        text = axes.text(*curve.label_at, _mathtext(curve.label), fontsize=10, color=colour, ha="center",
                         va="center", zorder=4, math_fontfamily="stix")  # fmt: skip
        text.set_path_effects([Stroke(linewidth=3, foreground=PAPER), Normal()])


def _draw_box(axes: Axes, box: Box) -> None:
    from matplotlib.patches import FancyBboxPatch

    axes.add_patch(
        FancyBboxPatch(
            (box.x - box.w / 2, box.y - box.h / 2), box.w, box.h, boxstyle="round,pad=0,rounding_size=9",
            facecolor=FILLS[box.kind][0], edgecolor=INK, linewidth=0.9, zorder=3,
        )
    )  # fmt: skip
    y = box.y - 7 if box.note else box.y
    axes.text(box.x, y, _mathtext(box.label), fontsize=15, color=INK, ha="center", va="center", zorder=5,
              math_fontfamily="stix")  # fmt: skip
    if box.note:
        axes.text(box.x, box.y + 14, box.note, fontsize=7.4, color=SOFT, ha="center", va="center", zorder=5)


def _mathtext(label: Label) -> str:
    sub = f"_{{{label.sub}}}" if label.sub else ""
    sup = f"^{{{label.sup}}}" if label.sup else ""
    return f"${label.base}{sub}{sup}$".replace("−", "-")
