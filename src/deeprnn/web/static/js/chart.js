// Line charts in SVG: a few series over epochs, guides, a crosshair that reads the values.

import { h, s, number } from "./dom.js";

const PAD = { left: 46, right: 14, top: 12, bottom: 26 };

/** Round steps for an axis. */
export function ticks(low, high, most) {
  const span = high - low || 1;
  const raw = span / most;
  const size = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((k) => k * size).find((k) => k >= raw);
  const out = [];
  for (let v = Math.ceil(low / step - 1e-9) * step; v <= high + step * 1e-6; v += step) out.push(Number(v.toPrecision(12)));
  return out;
}

/** The first plunge would press everything of interest into the bottom: leave it out of the range. */
function range(series, guides) {
  const values = [];
  for (const line of series) {
    const skip = line.points.length > 24 ? Math.floor(line.points.length / 8) : 0;
    for (const [, y] of line.points.slice(skip)) values.push(y);
  }
  for (const guide of guides) values.push(guide.value);
  if (!values.length) return [0, 1];
  const low = Math.min(...values);
  const high = Math.max(...values);
  const margin = (high - low) * 0.08 || Math.abs(high) * 0.05 || 0.5;
  return [low - margin, high + margin];
}

export function lineChart({ height = 260, label = "", wide = false, digits = 3 }) {
  const svg = s("svg", { class: "chart", role: "img", "aria-label": label, height });
  const tip = h("div", { class: "chart-tip", hidden: true });
  const legend = h("div", { class: "legend" });
  const el = h("div", { class: "chart-box", css: { "--chart-height": `${height}px` } }, svg, tip);
  let series = [];
  let guides = [];
  let scales = null;
  let log = false;

  function draw() {
    const width = el.clientWidth;
    if (!width) return;
    svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    svg.setAttribute("width", width);
    const all = series.flatMap((line) => line.points);
    if (!all.length) {
      svg.replaceChildren(s("text", { x: width / 2, y: height / 2, class: "chart-empty", text: "nothing measured yet" }));
      scales = null;
      return;
    }
    const sizes = all.map((p) => p[1]);
    log = wide && Math.min(...sizes) > 0 && Math.max(...sizes) > 8 * Math.min(...sizes);
    let x0 = Math.min(...all.map((p) => p[0]));
    let x1 = Math.max(...all.map((p) => p[0]));
    if (x0 === x1) { x0 -= 0.5; x1 += 0.5; }
    const map = log ? (v) => Math.log10(Math.max(v, 1e-12)) : (v) => v;
    const [y0, y1] = range(series.map((l) => ({ points: l.points.map(([x, y]) => [x, map(y)]) })),
      guides.map((g) => ({ value: map(g.value) })));
    const X = (v) => PAD.left + ((v - x0) / (x1 - x0)) * (width - PAD.left - PAD.right);
    const Y = (v) => height - PAD.bottom - ((map(v) - y0) / (y1 - y0)) * (height - PAD.top - PAD.bottom);
    scales = { X, Y, x0, x1, width };
    svg.replaceChildren(
      s("defs", {}, s("clipPath", { id: `clip-${chartId}` },
        s("rect", { x: PAD.left, y: PAD.top - 6, width: width - PAD.left - PAD.right + 6, height: height - PAD.top - PAD.bottom + 6 }))),
      axes(x0, x1, y0, y1, X, Y, width),
      s("g", { "clip-path": `url(#clip-${chartId})` },
        guides.map((guide) => s("line", { x1: PAD.left, x2: width - PAD.right, y1: Y(guide.value), y2: Y(guide.value), class: `guide ${guide.class || ""}` })),
        series.map((line) => path(line, X, Y)),
        series.filter((line) => line.mark).map((line) => mark(line, X, Y))),
      s("line", { class: "cross", y1: PAD.top, y2: height - PAD.bottom, visibility: "hidden" }));
  }

  const chartId = lineChart.next = (lineChart.next || 0) + 1;

  function axes(x0, x1, y0, y1, X, Y, width) {
    const g = s("g", { class: "axes" });
    const inverse = log ? (v) => 10 ** v : (v) => v;
    for (const v of ticks(y0, y1, Math.max(3, Math.floor(height / 56)))) {
      const value = inverse(v);
      const y = Y(value);
      const text = log || Math.abs(value) < 0.01 ? Number(value.toPrecision(2)).toString() : Number(value.toFixed(3)).toString();
      g.append(s("line", { x1: PAD.left, x2: width - PAD.right, y1: y, y2: y, class: "gridline" }),
        s("text", { x: PAD.left - 8, y: y + 4, "text-anchor": "end", text }));
    }
    for (const v of ticks(x0, x1, Math.max(2, Math.floor(width / 90)))) {
      if (v !== Math.round(v)) continue;
      g.append(s("text", { x: X(v), y: height - 8, "text-anchor": "middle", text: String(v) }));
    }
    return g;
  }

  function move(event) {
    if (!scales) return;
    const box = svg.getBoundingClientRect();
    const at = ((event.clientX - box.left - PAD.left) / (scales.width - PAD.left - PAD.right)) * (scales.x1 - scales.x0) + scales.x0;
    const first = series.find((line) => line.points.length);
    const nearest = first.points.reduce((a, b) => (Math.abs(b[0] - at) < Math.abs(a[0] - at) ? b : a))[0];
    const x = scales.X(nearest);
    const cross = svg.querySelector(".cross");
    cross.setAttribute("x1", x);
    cross.setAttribute("x2", x);
    cross.setAttribute("visibility", "visible");
    const rows = series.map((line) => [line, line.points.find((p) => p[0] === nearest)]).filter(([, p]) => p);
    tip.replaceChildren(h("b", { text: `epoch ${nearest}` }),
      ...rows.map(([line, p]) => h("span", { class: line.class, text: `${line.name} ${log ? p[1].toPrecision(3) : number(p[1], digits)}` })));
    tip.hidden = false;
    tip.style.left = `${Math.min(Math.max(x + 10, 0), scales.width - 150)}px`;
  }

  function leave() {
    tip.hidden = true;
    svg.querySelector(".cross")?.setAttribute("visibility", "hidden");
  }

  svg.addEventListener("pointermove", move);
  svg.addEventListener("pointerleave", leave);
  const observer = new ResizeObserver(draw);
  observer.observe(el);

  return {
    el,
    legend,
    update(newSeries, newGuides = []) {
      series = newSeries;
      guides = newGuides.filter((g) => Number.isFinite(g.value));
      legend.replaceChildren(...series.map((line) => h("span", { class: `key ${line.class}`, text: line.name })),
        ...guides.map((g) => h("span", { class: `key dashed ${g.class || ""}`, text: g.name })));
      svg.setAttribute("aria-label", `${label}: ${describe(series)}`);
      draw();
    },
    dispose() { observer.disconnect(); },
  };
}

function path(line, X, Y) {
  const d = line.points.map(([x, y], i) => `${i ? "L" : "M"}${X(x).toFixed(1)} ${Y(y).toFixed(1)}`).join("");
  if (line.points.length === 1) {
    const [x, y] = line.points[0];
    return s("circle", { cx: X(x), cy: Y(y), r: 3, class: `dot ${line.class}` });
  }
  return s("path", { d, class: `line ${line.class}` });
}

function mark(line, X, Y) {
  const best = line.points.reduce((a, b) => (b[1] < a[1] ? b : a));
  return s("circle", { cx: X(best[0]), cy: Y(best[1]), r: 4.5, class: `best ${line.class}` });
}

function describe(series) {
  return series.filter((line) => line.points.length).map((line) => {
    const last = line.points[line.points.length - 1];
    return `${line.name} ${number(last[1])} at epoch ${last[0]}`;
  }).join(", ") || "nothing yet";
}

export const points = (rows, key) => rows
  .map((row, i) => [row.epoch ?? i + 1, row[key]])
  .filter(([x, y]) => Number.isFinite(x) && Number.isFinite(y));

/** A curve no larger than a word. */
export function spark(values, width = 64, height = 20) {
  const svg = s("svg", { class: "spark", width, height, viewBox: `0 0 ${width} ${height}`, preserveAspectRatio: "none", "aria-hidden": "true" });
  if (values.length < 2) return svg;
  const low = Math.min(...values);
  const high = Math.max(...values.slice(Math.floor(values.length / 10)));  // a steep start leaves the picture
  const Y = (v) => 2 + (1 - (v - low) / (high - low || 1)) * (height - 4);
  const d = values.map((v, i) => `${i ? "L" : "M"}${((i / (values.length - 1)) * (width - 2) + 1).toFixed(1)} ${Y(v).toFixed(1)}`).join("");
  svg.append(s("path", { d, class: "line valid", "vector-effect": "non-scaling-stroke" }));
  return svg;
}
