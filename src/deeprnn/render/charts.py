"""Small line charts and piano rolls as inline SVG, coloured by CSS classes so that a page can be dark or light."""

from __future__ import annotations

import base64
import math
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

import numpy as np

from deeprnn.render.notes import as_roll, held_notes

LEFT, RIGHT, TOP, BOTTOM = 52.0, 14.0, 12.0, 30.0


@dataclass(frozen=True)
class Series:
    """One line of a chart."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    css: str = "s0"


def line_chart(
    series: Sequence[Series],
    *,
    width: float = 640,
    height: float = 250,
    level: tuple[float, str] | None = None,
    log: bool = False,
    skip: float = 0.0,
    label: str = "",
) -> str:
    """Lines over epochs.

    `level` is a dashed line with its name; `skip` is the share of each line's start that may leave the scale.
    """
    xs = [x for s in series for x in s.x]
    kept = [y for s in series for y in s.y[int(len(s.y) * skip) :] if math.isfinite(y)]
    kept += [level[0]] if level else []
    if not xs or not kept:
        return '<p class="quiet">nothing to draw yet</p>'
    log = log and min(kept) > 0
    scale = math.log10 if log else float
    low, high = _span(scale(min(kept)), scale(max(kept)))
    first, last = min(xs), max(max(xs), min(xs) + 1)

    def px(x: float) -> float:
        return LEFT + (x - first) / (last - first) * (width - LEFT - RIGHT)

    def py(y: float) -> float:
        value = scale(y) if not log or y > 0 else low
        return TOP + (high - max(2 * low - high, min(2 * high - low, value))) / (high - low) * (
            height - TOP - BOTTOM
        )

    out = [
        f'<div class="scroll"><svg class="chart" viewBox="0 0 {width:g} {height:g}" role="img" '
        f'aria-label="{escape(label)}">'
    ]
    for tick in _log_ticks(low, high) if log else _ticks(low, high, 5):
        y = py(10**tick if log else tick)
        text = f"{10**tick:.3g}" if log else _tidy(tick, high - low)
        out.append(f'<path class="rule" d="M{LEFT:g},{y:.1f}H{width - RIGHT:g}"/>')
        out.append(f'<text x="{LEFT - 7:g}" y="{y + 4:.1f}" text-anchor="end">{text}</text>')
    for tick in dict.fromkeys(round(tick) for tick in _ticks(first, last, 8)):
        out.append(
            f'<text x="{px(tick):.1f}" y="{height - 9:g}" text-anchor="middle">{_tidy(tick, last - first)}</text>'
        )
    if level:
        y = py(level[0])
        out.append(f'<path class="level" d="M{LEFT:g},{y:.1f}H{width - RIGHT:g}"/>')
        out.append(
            f'<text class="level" x="{width - RIGHT:g}" y="{y - 5:.1f}" text-anchor="end">{escape(level[1])}</text>'
        )
    # An svg of its own cuts off what leaves the scale; drawn along its edge it would look like a plateau.
    box = f"{LEFT - 6:g} {TOP:g} {width - LEFT - RIGHT + 12:g} {height - TOP - BOTTOM:g}"
    x0, y0, w, h = box.split()
    out.append(f'<svg x="{x0}" y="{y0}" width="{w}" height="{h}" viewBox="{box}">')
    for s in series:
        points = " ".join(
            f"{px(x):.1f},{py(y):.1f}" for x, y in zip(s.x, s.y, strict=True) if math.isfinite(y)
        )
        dot = len(s.x) == 1
        mark = f'<circle class="{s.css}" cx="{px(s.x[0]):.1f}" cy="{py(s.y[0]):.1f}" r="4"/>' if dot else ""
        out.append(
            mark or f'<polyline class="{s.css}" points="{points}"><title>{escape(s.name)}</title></polyline>'
        )
    return "".join([*out, "</svg></svg></div>"])


def scatter(
    points: Sequence[tuple[float, float, float, str]], *, level: tuple[float, str] | None = None
) -> str:
    """Points (x, y, spread, name) with error bars and names beside them: size against quality."""
    width, height = 640.0, 260.0
    ys = [y + s * d for _, y, s, _ in points for d in (-1, 1)] + ([level[0]] if level else [])
    low, high = _span(min(ys), max(ys))
    left, right = _span(0.0, max(x for x, *_ in points))
    out = [
        f'<div class="scroll"><svg class="chart" viewBox="0 0 {width:g} {height:g}" role="img" '
        'aria-label="size against result">'
    ]

    def px(x: float) -> float:
        return LEFT + (x - left) / (right - left) * (width - LEFT - RIGHT - 90)

    def py(y: float) -> float:
        return TOP + (high - y) / (high - low) * (height - TOP - BOTTOM)

    for tick in _ticks(low, high, 5):
        out.append(f'<path class="rule" d="M{LEFT:g},{py(tick):.1f}H{width - RIGHT:g}"/>')
        out.append(
            f'<text x="{LEFT - 7:g}" y="{py(tick) + 4:.1f}" text-anchor="end">{_tidy(tick, high - low)}</text>'
        )
    for tick in _ticks(max(0.0, left), right, 6):
        text = f"{tick / 1e6:g}M" if right >= 2e6 else f"{tick / 1e3:g}K"
        out.append(f'<text x="{px(tick):.1f}" y="{height - 9:g}" text-anchor="middle">{text}</text>')
    if level:
        out.append(f'<path class="level" d="M{LEFT:g},{py(level[0]):.1f}H{width - RIGHT:g}"/>')
    for number, (x, y, spread, name) in enumerate(points):
        css = f"s{number % 8}"
        out.append(f'<path class="{css}" d="M{px(x):.1f},{py(y - spread):.1f}V{py(y + spread):.1f}"/>')
        out.append(f'<circle class="{css}" cx="{px(x):.1f}" cy="{py(y):.1f}" r="5"/>')
        out.append(f'<text class="name" x="{px(x) + 9:.1f}" y="{py(y) + 4:.1f}">{escape(name)}</text>')
    return "".join([*out, "</svg></div>"])


def roll_svg(
    frames: np.ndarray,
    *,
    probabilities: np.ndarray | None = None,
    primer: int = 0,
    steps_per_beat: int = 4,
    low: int = 21,
    cell: float = 7.0,
    label: str = "piano roll",
) -> str:
    """A piano roll (T, K) with its probabilities as a glow, and a cursor line for playing."""
    roll = as_roll(frames, low)
    used = np.flatnonzero(roll.any(axis=0))
    bottom, top = (int(used[0]) - 2, int(used[-1]) + 3) if len(used) else (27, 51)
    bottom, top = max(0, bottom), min(roll.shape[1], max(top, bottom + 24))
    wide = max(cell, 900 / max(1, len(roll)))
    width, height = 30 + wide * len(roll), cell * (top - bottom)
    out = [
        f'<svg class="roll" viewBox="0 0 {width:.1f} {height:.1f}" role="img" aria-label="{escape(label)}">'
    ]
    if probabilities is not None:
        image = base64.b64encode(_glow(probabilities[:, bottom:top])).decode()
        out.append(
            f'<image x="30" y="0" width="{wide * len(roll):.1f}" height="{height:.1f}" '
            f'preserveAspectRatio="none" href="data:image/png;base64,{image}"/>'
        )
    if primer:
        out.append(f'<rect class="primer" x="30" y="0" width="{wide * primer:.1f}" height="{height:.1f}"/>')
    bar = 4 * steps_per_beat
    bars = "".join(f"M{30 + wide * t:.1f},0V{height:.1f}" for t in range(0, len(roll) + 1, bar))
    octaves = [k for k in range(bottom, top) if (k + low) % 12 == 0]
    lines = "".join(f"M30,{height - cell * (k - bottom):.1f}H{width:.1f}" for k in octaves)
    out.append(f'<path class="rule" d="{bars}{lines}"/>')
    for k in octaves:
        y = height - cell * (k - bottom) - 1
        out.append(f'<text x="26" y="{y:.1f}" text-anchor="end">C{(k + low) // 12 - 1}</text>')
    for note in held_notes(roll, low, steps_per_beat):
        given = " given" if note.start < primer else ""
        y = height - cell * (note.pitch - low - bottom + 1)
        out.append(
            f'<rect class="note{given}" x="{30 + wide * note.start + 0.6:.1f}" y="{y + 0.8:.1f}" '
            f'width="{wide * note.length - 1.2:.1f}" height="{cell - 1.6:.1f}" rx="2"/>'
        )
    out.append(f'<path class="cursor" d="M30,0V{height:.1f}" data-from="30" data-to="{width:.1f}"/>')
    return "".join([*out, "</svg>"])


def _glow(probabilities: np.ndarray) -> bytes:
    """Probabilities (T, K) as a PNG, a pixel a note: ember-coloured, as opaque as the note is likely."""
    alpha = np.rint(255 * np.sqrt(np.clip(probabilities.T[::-1], 0, 1))).astype(np.uint8)
    pixels = np.empty((*alpha.shape, 4), np.uint8)
    pixels[..., :3] = (224, 128, 64)
    pixels[..., 3] = alpha
    return tiny_png(pixels)


def tiny_png(pixels: np.ndarray) -> bytes:
    """An RGBA picture (H, W, 4) uint8 as a PNG file."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    height, width, _ = pixels.shape
    rows = np.concatenate(
        [np.zeros((height, 1), np.uint8), pixels.reshape(height, -1)], axis=1
    )  # filter: none
    header = struct.pack(">IIBBBBB", width, height, 8, 6, 0, 0, 0)
    body = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows.tobytes(), 9)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + body


def _span(low: float, high: float) -> tuple[float, float]:
    """A little air above and below."""
    margin = 0.06 * (high - low) or 0.05 * abs(high) or 0.5
    return low - margin, high + margin


def _ticks(low: float, high: float, count: int) -> list[float]:
    """Round numbers within a span."""
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= raw * 0.999)
    return [i * step for i in range(math.ceil(low / step), math.floor(high / step + 1e-9) + 1)]


def _log_ticks(low: float, high: float) -> list[float]:
    whole = [float(p) for p in range(math.ceil(low), math.floor(high) + 1)]
    return whole if len(whole) >= 2 else _ticks(low, high, 3)


def _tidy(value: float, span: float) -> str:
    digits = max(0, 2 - math.floor(math.log10(span))) if span < 100 else 0
    if digits > 6 and abs(value) < 1e-3:
        return f"{value:.3g}"
    text = f"{value:.{digits}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text
