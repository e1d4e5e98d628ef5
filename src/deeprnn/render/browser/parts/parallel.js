// Parallel coordinates and bars in SVG: a line a trial across one axis a field; a bar a share.

import { h, s } from "./dom.js";

const PAD = { left: 34, right: 60, top: 30, bottom: 12 };
const LABEL = 16;  // pixels between two labels of an axis, at the least
const LETTER = 6.5;  // pixels of a letter of an axis' name, about

/**
 * One line a trial. An axis has a name and ticks [place, text]; a line has a place from 0 (bottom) to 1 on every axis,
 * a `rank` from 0 (the best) to 1, and a title. The best lie on top; pointing at one tells of it.
 */
export function parallel({ axes, lines, label = "", height = 320 }) {
  const svg = s("svg", { class: "chart parallel", role: "img", "aria-label": label, height });
  const told = h("p", { class: "quiet told", text: "Point at a line for its trial." });
  const el = h("div", { class: "chart-box", css: { "--chart-height": `${height}px` } }, svg);

  function draw() {
    const width = el.clientWidth;
    if (!width) return;
    svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    svg.setAttribute("width", width);
    const X = (i) => PAD.left + (axes.length > 1 ? i / (axes.length - 1) : 0.5) * (width - PAD.left - PAD.right);
    const Y = (place) => height - PAD.bottom - place * (height - PAD.top - PAD.bottom);
    const worstFirst = [...lines].sort((a, b) => b.rank - a.rank);
    const room = (width - PAD.left - PAD.right) / Math.max(1, axes.length - 1);
    const named = fitting(axes.map((axis) => axis.name), room);
    svg.replaceChildren(
      s("g", {}, worstFirst.map((line) => trial(line, X, Y))),
      ...axes.map((axis, i) => drawn(axis, named[i], X(i), Y, i, axes.length)));
  }

  function trial(line, X, Y) {
    const d = line.places.map((place, i) => `${i ? "L" : "M"}${X(i).toFixed(1)} ${Y(place).toFixed(1)}`).join("");
    const tone = line.rank === 0 ? "s1" : "s0";
    const path = s("path", { d, class: `line ${tone}`, "stroke-opacity": line.rank === 0 ? 1 : (0.75 - 0.6 * line.rank).toFixed(2) });
    path.addEventListener("pointerenter", () => { told.textContent = line.title; path.classList.add("seen"); });
    path.addEventListener("pointerleave", () => path.classList.remove("seen"));
    return path;
  }

  function drawn(axis, { name, row }, x, Y, i, count) {
    const anchor = i === 0 ? "start" : i === count - 1 ? "end" : "middle";
    let last = Infinity;
    const shown = axis.ticks.filter(([place]) => { const free = last - Y(place) >= LABEL || last === Infinity; if (free) last = Y(place); return free; });
    return s("g", { class: "axes" },
      s("line", { x1: x, x2: x, y1: Y(0), y2: Y(1), class: "axis" }),
      s("text", { x: i === count - 1 ? x + PAD.right - 2 : i === 0 ? 2 : x, y: 11 + 12 * row, "text-anchor": anchor, class: "axis-name", text: name }),
      shown.map(([place, text]) => s("text", { x: x + 6, y: Y(place) + 4, class: "dot-name", text })));
  }

  new ResizeObserver(draw).observe(el);
  return h("div", {}, el, told);
}

/** Names that do not run into each other: without their section where that is too long, every other one a row lower. */
function fitting(names, room) {
  const fits = (name) => name.length * LETTER <= room;
  const short = names.every(fits) ? names : names.map((name) => name.slice(name.lastIndexOf(".") + 1));
  return short.map((name, i) => ({ name, row: short.every(fits) ? 0 : i % 2 }));
}

/** Shares from 0 to 1 as bars: [[name, share], …]. */
export function bars({ rows, label = "" }) {
  return h("div", { class: "bars", role: "img", "aria-label": label }, rows.flatMap(([name, share]) => [
    h("span", { class: "bar-name", text: name }),
    h("span", { class: "bar-track" }, h("span", { class: "bar", css: { width: `${(100 * share).toFixed(1)}%` } })),
    h("span", { class: "bar-share", text: `${Math.round(100 * share)} %` })]));
}
