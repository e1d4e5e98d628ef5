// Runs side by side, two to four: numbers, curves, and the same beginning continued by all.

import { get } from "./api.js";
import { h, number, count, LETTERS, UNITS } from "../parts/dom.js";
import { learning } from "./curves.js";
import { dagger, resultLine } from "./results.js";
import { compareWith, drawing, playground } from "./run.js";

const KINDS = { music: "music", char: "characters", word: "words" };

export async function compareView(store, ids) {
  const chosen = [...new Set(ids)].slice(0, LETTERS.length);
  const runs = await Promise.all(chosen.map((id) => get(`/api/runs/${id}`)));
  const alike = same(runs, (run) => run.kind);
  const bench = alike && runs.every((run) => run.playable)
    ? playground(runs)
    : { el: h("p", { class: "hint boxed", text: alike ? `${named(runs.filter((run) => !run.playable))} no parameters yet.` : `${each(runs, (run) => `learned ${KINDS[run.kind] || "something else"}`)}: their numbers and curves have different units.` }) };
  const curves = alike ? await learning(runs) : { el: null, dispose() {} };
  const el = h("article", {},
    h("a", { class: "back", href: "#/", text: "← Runs" }),
    h("div", { class: "title-row" }, h("h1", {}, LETTERS.slice(0, runs.length).split("").join("/")),
      runs.length === 2 ? h("a", { class: "button", href: address([...chosen].reverse()), text: "Swap" }) : null,
      compareWith(store, runs)),
    numbers(runs), caution(runs), same(runs, (run) => run.data) ? resultLine(store, runs) : null,
    bench.el, curves.el || "",
    h("section", { class: "panel" }, h("div", { class: "panel-head" }, h("h2", { text: "Models" })),
      h("div", { class: "pair" }, runs.map((run, i) => h("div", {}, h("h3", { class: `m${i}`, text: `${LETTERS[i]} ${run.label}` }), run.drawn ? drawing(run) : null)))));
  return { el, title: runs.map((run) => run.name).join(" and "), dispose() { bench.dispose?.(); curves.dispose(); } };
}

const address = (ids) => (ids.length > 1 ? `#/compare/${ids.join("/")}` : `#/run/${ids[0]}`);
const same = (runs, tell) => runs.every((run) => tell(run) === tell(runs[0]));
/** What is to be said of each: A learned this, B that. */
const each = (runs, tell) => runs.map((run, i) => `${LETTERS[i]} ${tell(run)}`).join(", ");
const named = (runs) => (runs.length === 1 ? `${runs[0].name} has` : `${runs.map((run) => run.name).join(" and ")} have`);

/** What keeps runs of one kind from being compared number by number. */
function caution(runs) {
  if (!same(runs, (run) => run.kind)) return null;
  const said = [];
  if (!same(runs, (run) => run.data)) said.push(`${each(runs, (run) => `learned ${run.data_name || run.data}`)}: their scores are of different data, and each expects what its own was like.`);
  const steps = (run) => run.grid?.steps_per_beat;
  if (runs[0].kind === "music" && runs.every(steps) && !same(runs, steps)) said.push(`${each(runs, (run) => `has ${steps(run)} frame${steps(run) === 1 ? "" : "s"} to a beat`)}: a beginning is laid on each one’s grid beat by beat, but nats per frame do not compare.`);
  else if (runs[0].kind !== "music" && !same(runs, (run) => run.symbols)) said.push("Their vocabularies differ, and so does what a surprise means.");
  return said.length ? h("div", { class: "caution", role: "note" }, said.map((text) => h("p", { text }))) : null;
}

function numbers(runs) {
  const line = (name, tell) => h("tr", {}, h("th", { scope: "row", text: name }), runs.map((run) => h("td", { text: tell(run) })));
  const unit = (run) => UNITS[run.metric] || run.metric;
  const alike = same(runs, (run) => run.metric);
  const without = (run) => address(runs.filter((other) => other !== run).map((other) => other.id));
  return h("div", { class: "scroll" }, h("table", { class: "versus" },
    h("thead", {}, h("tr", {}, h("th", {}), runs.map((run, i) => h("th", { scope: "col" },
      h("span", { class: `letter m${i}`, text: LETTERS[i] }), h("a", { href: `#/run/${run.id}`, text: run.name }),
      runs.length > 2 ? h("a", { class: "leave", href: without(run), text: "×", "aria-label": `Without ${LETTERS[i]}`, title: `Without ${LETTERS[i]}` }) : null)))),
    h("tbody", {},
      line("Model", (run) => run.label || "–"),
      line("Data", (run) => run.data_name || run.data),
      line("Parameters", (run) => count(run.parameters)),
      line(alike ? `Test, ${unit(runs[0])}` : "Test", (run) => number(run.test) + dagger(run) + (alike ? "" : ` ${unit(run)}`)),
      line("Validation", (run) => number(run.valid) + dagger(run)),
      runs.some((run) => Number.isFinite(run.paper)) ? line("The paper’s", (run) => number(run.paper)) : null,
      line("Epochs", (run) => String(run.epochs)),
      line("Status", (run) => [run.status, ...(run.marks || []).map((text) => `† ${text}`)].join(" · ")))));
}
