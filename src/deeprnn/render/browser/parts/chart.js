// Line charts in SVG: a few series over epochs or frames, guides, a crosshair that reads the values; and dots.

import { h, s, number } from "./dom.js";

const PAD = { left: 50, right: 14, bottom: 36 };
const DIGIT = 7;  // pixels of an axis, at most

/** Round steps for an axis. */
export function ticks(low, high, most, whole = false) {
  const raw = (high - low || 1) / most;
  const size = 10 ** Math.floor(Math.log10(raw));
  let step = [1, 2, 5, 10].map((k) => k * size).find((k) => k >= raw);
  if (whole) step = Math.max(1, Math.round(step));
  const out = [];
  for (let v = Math.ceil(low / step - 1e-9) * step; v <= high + step * 1e-6; v += step) out.push(Number(v.toPrecision(12)));
  return out.length > 1 || most > 8 || (whole && step === 1) ? out : ticks(low, high, most + 2, whole);  // one says nothing of a scale
}

/** Values for a logarithmic axis: whole powers of ten where there are several, else 1, 2 and 5 of each, else round ones. */
function logTicks(low, high, most) {
  const all = [];
  for (let p = Math.floor(Math.log10(low)); p <= Math.ceil(Math.log10(high)); p++) for (const k of [1, 2, 5]) all.push([k, Number(`${k}e${p}`)]);
  const inside = all.filter(([, v]) => v >= low && v <= high);
  const powers = inside.filter(([k]) => k === 1);
  const kept = powers.length >= 3 || inside.length > 2 * most ? powers : inside;
  return kept.length >= 2 ? kept.map(([, v]) => v) : ticks(low, high, most);
}

/** As few digits as tell the values from each other. */
export function tickLabels(values) {
  for (let digits = 0; digits < 12; digits++) {
    const texts = values.map((v) => plain(v, digits));
    const exact = values.every((v, i) => Math.abs(Number(texts[i]) - v) <= 1e-9 * Math.max(Math.abs(v), 1e-12));
    if (exact && new Set(texts).size === values.length) return texts;
  }
  return values.map((v) => String(Number(v.toPrecision(3))));
}

function plain(v, digits) {
  return v !== 0 && Math.abs(v) < 1e-3 ? Number(v.toExponential(Math.min(digits, 6))).toExponential() : v.toFixed(digits);
}

/** The first plunge would press everything of interest into the bottom: leave it out of the range. */
function range(series, guides) {
  const values = [];
  for (const line of series) {
    const skip = line.points.length > 24 && !line.whole ? Math.floor(line.points.length / 8) : 0;
    for (const [, y, spread = 0] of line.points.slice(skip)) values.push(y - spread, y + spread);
  }
  for (const guide of guides) values.push(guide.value);
  if (!values.length) return [0, 1];
  const low = values.reduce((a, b) => Math.min(a, b));
  const high = values.reduce((a, b) => Math.max(a, b));
  const margin = (high - low) * 0.08 || Math.abs(high) * 0.05 || 0.5;
  return [low - margin, high + margin];
}

/**
 * A chart that fills the width it is given.
 *
 * A series has a name, a class and points [x, y]; `mark` rings its lowest point, `whole` keeps its start in the range,
 * `dots` draws points [x, y, spread, name] with error bars and names instead of a line. A guide is a level with a name.
 * `wide` allows a logarithmic scale, `x` and `y` name the axes, `showX` writes a value of x.
 */
export function lineChart({ height = 260, label = "", wide = false, digits = 3, x: xName = "epoch", y: yName = "", showX = null }) {
  const svg = s("svg", { class: "chart", role: "img", "aria-label": label, height });
  const tip = h("div", { class: "chart-tip", hidden: true });
  const legend = h("div", { class: "legend" });
  const el = h("div", { class: "chart-box", css: { "--chart-height": `${height}px` } }, svg, tip);
  const top = yName ? 24 : 12;
  const clip = `clip-${(lineChart.next = (lineChart.next || 0) + 1)}`;
  let series = [];
  let guides = [];
  let scales = null;
  let log = false;
  let left = PAD.left;

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
    measure(all, width);
    const { X, Y } = scales;
    svg.replaceChildren(
      s("defs", {}, s("clipPath", { id: clip },
        s("rect", { x: left - 4, y: top - 6, width: width - left - PAD.right + 10, height: height - top - PAD.bottom + 10 }))),
      axes(),
      s("g", { "clip-path": `url(#${clip})` },
        guides.map((guide) => s("line", { x1: left, x2: width - PAD.right, y1: Y(guide.value), y2: Y(guide.value), class: `guide ${guide.class || ""}` })),
        series.filter((line) => !line.dots).map((line) => path(line, X, Y)),
        series.filter((line) => line.mark && line.points.length).map((line) => mark(line, X, Y))),
      ...series.filter((line) => line.dots).map((line) => dots(line, X, Y, width)),
      s("line", { class: "cross", y1: top, y2: height - PAD.bottom, visibility: "hidden" }));
  }

  function measure(all, width) {
    const sizes = all.map((p) => p[1]);
    const least = sizes.reduce((a, b) => Math.min(a, b));
    log = wide && least > 0 && sizes.reduce((a, b) => Math.max(a, b)) > 8 * least;
    let x0 = all.reduce((a, p) => Math.min(a, p[0]), Infinity);
    let x1 = all.reduce((a, p) => Math.max(a, p[0]), -Infinity);
    const single = x0 === x1;
    if (single) { x0 -= 0.5; x1 += 0.5; }
    if (series.some((line) => line.dots)) { const air = (x1 - x0) * 0.08; x0 -= air; x1 += air; }
    const map = log ? (v) => Math.log10(Math.max(v, 1e-12)) : (v) => v;
    const [y0, y1] = range(series.map((l) => ({ ...l, points: l.points.map(([x, y, spread]) => [x, map(y), spread]) })),
      guides.map((g) => ({ value: map(g.value) })));
    const rows = Math.max(3, Math.floor(height / 56));
    const ys = log ? logTicks(10 ** y0, 10 ** y1, rows) : ticks(y0, y1, rows);
    const names = tickLabels(ys);
    left = Math.max(PAD.left, 10 + DIGIT * Math.max(...names.map((name) => name.length)));
    const X = (v) => left + ((v - x0) / (x1 - x0)) * (width - left - PAD.right);
    const Y = (v) => height - PAD.bottom - ((map(v) - y0) / (y1 - y0)) * (height - top - PAD.bottom);
    const whole = !showX && (x1 - x0 >= 2 || all.every((p) => Number.isInteger(p[0])));  // no half epochs but in a running one
    scales = { X, Y, x0, x1, width, single, whole, ys, names };
  }

  function axes() {
    const { X, Y, x0, x1, width, single, whole, ys, names } = scales;
    const g = s("g", { class: "axes" });
    names.forEach((text, i) => {
      const y = Y(ys[i]);
      g.append(s("line", { x1: left, x2: width - PAD.right, y1: y, y2: y, class: "gridline" }),
        s("text", { x: left - 8, y: y + 4, "text-anchor": "end", class: "tick-y", text }));
    });
    const xs = single ? [(x0 + x1) / 2] : ticks(x0, x1, Math.max(2, Math.floor(width / 90)), whole);
    (showX ? xs.map(showX) : tickLabels(xs)).forEach((text, i) => {
      g.append(s("text", { x: X(xs[i]), y: height - PAD.bottom + 17, "text-anchor": "middle", class: "tick-x", text }));
    });
    g.append(s("text", { x: width - PAD.right, y: height - 4, "text-anchor": "end", class: "axis-name", text: xName }));
    if (yName) g.append(s("text", { x: 2, y: 11, class: "axis-name", text: yName }));
    return g;
  }

  function move(event) {
    if (!scales) return;
    const box = svg.getBoundingClientRect();
    const at = ((event.clientX - box.left - left) / (scales.width - left - PAD.right)) * (scales.x1 - scales.x0) + scales.x0;
    const all = series.flatMap((line) => line.points);
    const nearest = all.reduce((a, b) => (Math.abs(b[0] - at) < Math.abs(a[0] - at) ? b : a))[0];
    const x = scales.X(nearest);
    const cross = svg.querySelector(".cross");
    cross.setAttribute("x1", x);
    cross.setAttribute("x2", x);
    cross.setAttribute("visibility", "visible");
    const rows = series.map((line) => [line, line.points.find((p) => p[0] === nearest)]).filter(([, p]) => p);
    tip.replaceChildren(h("b", { text: `${xName} ${showX ? showX(nearest) : Number(nearest.toFixed(2))}` }),
      ...rows.map(([line, p]) => h("span", { class: line.class, text: `${p[3] || line.name} ${log ? p[1].toPrecision(3) : number(p[1], digits)}` })));
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
      const named = new Map(series.map((line) => [line.name, line]));  // lines of one name share a key
      legend.replaceChildren(...[...named.values()].map((line) => h("span", { class: `key ${line.class}`, text: line.name })),
        ...guides.map((g) => h("span", { class: `key dashed ${g.class || ""}`, text: g.name })));
      svg.setAttribute("aria-label", `${label}: ${describe(series, xName)}`);
      draw();
    },
    dispose() { observer.disconnect(); },
  };
}

function path(line, X, Y) {
  if (line.points.length === 1) {
    const [x, y] = line.points[0];
    return s("circle", { cx: X(x), cy: Y(y), r: 3, class: `dot ${line.class}` });
  }
  const d = line.points.map(([x, y], i) => `${i ? "L" : "M"}${X(x).toFixed(1)} ${Y(y).toFixed(1)}`).join("");
  return s("path", { d, class: `line ${line.class}` });
}

function mark(line, X, Y) {
  const best = line.points.reduce((a, b) => (b[1] < a[1] ? b : a));
  return s("circle", { cx: X(best[0]), cy: Y(best[1]), r: 4.5, class: `best ${line.class}` });
}

function dots(line, X, Y, width) {
  return s("g", {}, line.points.map(([x, y, spread = 0, name = ""]) => {
    const left = X(x) > width * 0.75;  // the name stays inside the picture
    return s("g", {},
      spread ? s("line", { x1: X(x), x2: X(x), y1: Y(y - spread), y2: Y(y + spread), class: `line ${line.class}` }) : null,
      s("circle", { cx: X(x), cy: Y(y), r: 5, class: `dot ${line.class}` }),
      s("text", { x: X(x) + (left ? -9 : 9), y: Y(y) + 4, "text-anchor": left ? "end" : "start", class: "dot-name", text: name }));
  }));
}

function describe(series, xName) {
  return series.filter((line) => line.points.length).map((line) => {
    const [x, y, , name] = line.points[line.points.length - 1];
    return `${name || line.name} ${number(y)} at ${xName} ${Number(x.toFixed(2))}`;
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
