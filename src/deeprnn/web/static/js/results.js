// A number beside the paper's: on one line, and in one table.

import { h, s, number, LETTERS, UNITS } from "../parts/dom.js";

export const lower = (run) => run.test ?? run.valid;

/** A number's mark where its run was cut off by time or made by code with changes in no commit. */
export const dagger = (run) => (run?.marks?.length ? "†" : "");
export const remarks = (run) => (run?.marks || []).join("; ");

export function paperCells(store, data) {
  return (store.paper?.cells || []).filter((cell) => cell.data === data);
}

export function difference(value, paper) {
  if (value === null || value === undefined || !Number.isFinite(paper)) return null;
  const percent = (100 * (value - paper)) / paper;
  const shown = Math.abs(percent).toFixed(1);
  return { percent, text: `${shown === "0.0" ? "±" : percent > 0 ? "+" : "−"}${shown} %`, better: percent <= 0 };
}

/** The paper's models and one or two runs on an axis; lower is better, to the left. */
export function resultLine(store, runs) {
  const cells = paperCells(store, runs[0].data).filter((cell) => cell.metric === runs[0].metric);
  const early = (run) => (run.test === null ? ", validation" : "");
  const own = runs.map((run, i) => ({ value: lower(run), name: (runs.length > 1 ? LETTERS[i] : "this run") + early(run), run: true, i }));
  const marks = [...cells.map((cell) => ({ value: cell.value, name: cell.label })), ...own].filter((m) => Number.isFinite(m.value));
  if (!cells.length || !marks.some((m) => m.run)) return null;
  const printed = cells.map((cell) => cell.value);
  const span = Math.max(...printed) - Math.min(...printed) || 1;
  // A run far off stands at the edge with an arrow: the paper's numbers stay apart.
  const low = Math.max(Math.min(...marks.map((m) => m.value)), Math.min(...printed) - span);
  const high = Math.min(Math.max(...marks.map((m) => m.value)), Math.max(...printed) + span);
  const margin = (high - low) * 0.06;
  const width = 560;
  const X = (v) => 24 + ((Math.min(Math.max(v, low), high) - low + margin) / (high - low + 2 * margin)) * (width - 48);
  const svg = s("svg", { viewBox: `0 0 ${width} 104`, class: "result-line", role: "img",
    "aria-label": `${UNITS[runs[0].metric] || runs[0].metric}, lower is better: ${marks.map((m) => `${m.name} ${number(m.value)}`).join(", ")}` });
  svg.append(s("line", { x1: 8, x2: width - 8, y1: 50, y2: 50, class: "rule" }));
  for (const { mark, row } of rows(marks.filter((m) => !m.run), X, 56, 3)) {
    const x = X(mark.value);
    svg.append(s("line", { x1: x, x2: x, y1: 45, y2: 56 + 15 * row, class: "tick" }),
      s("text", { x, y: 68 + 15 * row, "text-anchor": "middle", class: "soft", text: mark.name.replace("-RNN", "") }));
  }
  for (const { mark, row } of rows(marks.filter((m) => m.run), X, 96, 2)) {
    const x = X(mark.value);
    svg.append(s("circle", { cx: x, cy: 50, r: 7, class: `mine m${mark.i}` }),
      s("text", { x: Math.min(Math.max(x, 64), width - 64), y: row ? 14 : 34, "text-anchor": "middle", class: `mine-text m${mark.i}`, text: `${mark.value < low ? "← " : ""}${mark.name} ${number(mark.value)}${mark.value > high ? " →" : ""}` }));
  }
  return h("figure", { class: "beside" },
    h("figcaption", {}, "Beside the paper ", h("span", { class: "soft", text: `· ${UNITS[runs[0].metric] || runs[0].metric} on the test set, left is better` })), svg);
}

/** Names that would overlap go to another row. */
function rows(marks, X, room, most) {
  const ends = Array(most).fill(-Infinity);
  return [...marks].sort((a, b) => a.value - b.value).map((mark) => {
    const x = X(mark.value);
    const free = ends.findIndex((end) => x - end >= room);
    const row = free < 0 ? most - 1 : free;
    ends[row] = x;
    return { mark, row };
  });
}

/** All of the paper's cells with the best run of each. */
export function paperTable(store) {
  const { cells, labels, names } = store.paper;
  const best = new Map();
  for (const run of store.runs || []) {
    // Only runs that set out to be the paper's: others of the same family have other sizes.
    if (run.status !== "finished" || !Number.isFinite(run.test) || !Number.isFinite(run.paper)) continue;
    const at = `${run.data}|${run.label}`;
    const held = best.get(at);
    if (!held || (run.valid ?? run.test) < (held.valid ?? held.test)) best.set(at, run);  // chosen by validation
  }
  const data = [...new Set(cells.map((cell) => cell.data))];
  return h("div", { class: "scroll" }, h("table", { class: "paper-table" },
    h("thead", {}, h("tr", {}, h("th", { scope: "col", text: "Test set" }), labels.map((text) => h("th", { scope: "col", text })))),
    h("tbody", {}, data.map((name) => h("tr", {},
      h("th", { scope: "row" }, names[name] || name, h("small", { text: UNITS[cells.find((c) => c.data === name).metric] })),
      labels.map((text) => cellOf(cells.find((c) => c.data === name && c.label === text), best.get(`${name}|${text}`))))))));
}

function cellOf(cell, run) {
  if (!cell && !run) return h("td", { class: "none", text: "" });
  const gap = run && cell ? difference(run.test, cell.value) : null;
  const mine = run
    ? h("a", { href: `#/run/${run.id}`, class: gap ? (gap.better ? "better" : "worse") : "", title: [run.name, remarks(run)].filter(Boolean).join(": "), text: number(run.test) + dagger(run) })
    : h("span", { class: "soft", text: "–" });
  return h("td", {}, mine, h("small", { text: cell ? `paper ${number(cell.value)}` : "" }),
    gap ? h("small", { class: gap.better ? "better" : "worse", text: gap.text }) : null);
}
