// Two runs side by side: numbers, curves, and the same beginning continued by both.

import { get } from "./api.js";
import { h, number, count, UNITS } from "../parts/dom.js";
import { learning } from "./curves.js";
import { resultLine } from "./results.js";
import { compareWith, drawing, playground } from "./run.js";

export async function compareView(store, a, b) {
  const runs = await Promise.all([a, b].map((id) => get(`/api/runs/${id}`)));
  const alike = runs[0].kind === runs[1].kind;
  const kinds = { music: "music", char: "characters", word: "words" };
  const bench = alike && runs.every((run) => run.playable)
    ? playground(runs)
    : { el: h("p", { class: "hint boxed", text: alike ? "One of the two has no parameters yet." : `One learned ${kinds[runs[0].kind] || "something else"}, the other ${kinds[runs[1].kind] || "something else"}: their numbers and curves have different units.` }) };
  const curves = alike ? await learning(runs) : { el: null, dispose() {} };
  const el = h("article", {},
    h("a", { class: "back", href: "#/", text: "← Runs" }),
    h("div", { class: "title-row" }, h("h1", {}, "A/B"), h("a", { class: "button", href: `#/compare/${b}/${a}`, text: "Swap" }), compareWith(store, runs[0], b)),
    numbers(runs), caution(runs), runs[0].data === runs[1].data ? resultLine(store, runs) : null,
    bench.el, curves.el || "",
    h("section", { class: "panel" }, h("div", { class: "panel-head" }, h("h2", { text: "Models" })),
      h("div", { class: "pair" }, runs.map((run, i) => h("div", {}, h("h3", { class: `m${i}`, text: `${"AB"[i]} ${run.label}` }), run.drawn ? drawing(run) : null)))));
  return { el, title: `${runs[0].name} and ${runs[1].name}`, dispose() { bench.dispose?.(); curves.dispose(); } };
}

/** What keeps two runs of one kind from being compared number by number. */
function caution([a, b]) {
  if (a.kind !== b.kind) return null;
  const said = [];
  if (a.data !== b.data) said.push(`A learned ${a.data_name || a.data}, B ${b.data_name || b.data}: their scores are of different data, and each expects what its own was like.`);
  const steps = [a, b].map((run) => run.grid?.steps_per_beat);
  if (a.kind === "music" && steps[0] && steps[1] && steps[0] !== steps[1]) said.push(`A has ${steps[0]} frame${steps[0] === 1 ? "" : "s"} to a beat, B ${steps[1]}: a beginning is laid on each one’s grid beat by beat, but nats per frame do not compare.`);
  else if (a.kind !== "music" && a.symbols !== b.symbols) said.push("Their vocabularies differ, and so does what a surprise means.");
  return said.length ? h("div", { class: "caution", role: "note" }, said.map((text) => h("p", { text }))) : null;
}

function numbers(runs) {
  const line = (name, tell) => h("tr", {}, h("th", { scope: "row", text: name }), runs.map((run) => h("td", { text: tell(run) })));
  const unit = (run) => UNITS[run.metric] || run.metric;
  const same = runs[0].metric === runs[1].metric;
  return h("div", { class: "scroll" }, h("table", { class: "versus" },
    h("thead", {}, h("tr", {}, h("th", {}), runs.map((run, i) => h("th", { scope: "col" },
      h("span", { class: `letter m${i}`, text: "AB"[i] }), h("a", { href: `#/run/${run.id}`, text: run.name }))))),
    h("tbody", {},
      line("Model", (run) => run.label || "–"),
      line("Data", (run) => run.data_name || run.data),
      line("Parameters", (run) => count(run.parameters)),
      line(same ? `Test, ${unit(runs[0])}` : "Test", (run) => number(run.test) + (same ? "" : ` ${unit(run)}`)),
      line("Validation", (run) => number(run.valid)),
      runs.some((run) => Number.isFinite(run.paper)) ? line("The paper’s", (run) => number(run.paper)) : null,
      line("Epochs", (run) => String(run.epochs)),
      line("Status", (run) => run.status))));
}
