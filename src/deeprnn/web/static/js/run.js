// One run: its number, its playground, its curves, its picture.

import { get } from "./api.js";
import { h, number, count, ago, LETTERS, UNITS } from "../parts/dom.js";
import { learning } from "./curves.js";
import { manage } from "./manage.js";
import { dagger, difference, remarks, resultLine } from "./results.js";
import { musicBench } from "./music.js";
import { textBench } from "./text.js";

export async function runView(store, id) {
  let run = await get(`/api/runs/${id}`);
  const head = h("div", { class: "run-head" });
  const drawHead = () => head.replaceChildren(...heading(store, run));
  drawHead();
  const bench = run.playable ? playground([run]) : waiting(run);
  const curves = await learning([run], (summary) => {
    const ready = summary.playable && !run.playable;
    run = { ...run, ...summary };
    drawHead();
    if (ready) bench.el.replaceWith(h("p", { class: "hint" }, "The first parameters are there: ", h("a", { href: `#/run/${id}`, text: "open the playground", onclick: () => location.reload() })));
  });
  const el = h("article", {}, h("a", { class: "back", href: "#/", text: "← Runs" }), head, bench.el, curves.el, model(run), settings(run), details(run));
  const tell = () => {  // tags change without the run
    const { tags } = store.find(id) || {};
    if (tags && String(tags) !== String(run.tags)) { run = { ...run, tags }; drawHead(); }
  };
  return { el, title: run.name, tell, dispose() { bench.dispose?.(); curves.dispose(); } };
}

export function playground(runs) {
  return runs[0].kind === "music" ? musicBench(runs) : textBench(runs);
}

function waiting(run) {
  const text = run.status === "running" ? "This run has just begun. It can be played with after its first epoch." : "This run left no parameters, so there is nothing to play with.";
  return { el: h("p", { class: "hint boxed", text }) };
}

export function chips(run) {
  return h("p", { class: "facts" },
    h("span", { class: `status ${run.status}` }, h("span", { class: "dot", "aria-hidden": "true" }), run.status),
    run.label ? h("span", { text: run.label }) : null,
    h("span", { text: run.data_name || run.data }),
    h("span", { text: `${count(run.parameters)} parameters` }),
    Number.isInteger(run.seed) ? h("span", { text: `seed ${run.seed}` }) : null,
    (run.marks || []).map((text) => h("span", { text: `† ${text}` })),
    run.status === "running" && run.updated ? h("span", { text: `news ${ago(run.updated)}` }) : null);
}

function heading(store, run) {
  const value = run.test ?? run.valid;
  const gap = run.test === null ? null : difference(run.test, run.paper);
  return [
    h("div", { class: "title-row" }, h("h1", { text: run.name }), manage(store, run), compareWith(store, [run])),
    chips(run),
    run.tags?.length ? h("p", { class: "tags" }, run.tags.map((text) => h("span", { class: "tag", text }))) : "",
    run.error ? h("p", { class: "caution", role: "note", text: run.error }) : "",
    h("div", { class: "scores" },
      h("div", { class: "score" },
        h("b", { text: number(value) + dagger(run), title: remarks(run) || null }),
        h("span", { text: `${UNITS[run.metric] || run.metric}, ${run.test === null ? "validation so far" : "test"}` }),
        gap ? h("span", { class: gap.better ? "better" : "worse", text: `${gap.text} to the paper’s ${number(run.paper)}` })
          : Number.isFinite(run.paper) ? h("span", { class: "soft", text: `paper ${number(run.paper)}` }) : null,
        h("span", { class: "soft", text: run.best_epoch && run.epochs > 1 ? `best of ${run.epochs} epochs: ${run.best_epoch}` : `${run.epochs} epoch${run.epochs === 1 ? "" : "s"}` })),
      resultLine(store, [run])),
  ];
}

/** A choice of one run more to stand beside these. */
export function compareWith(store, runs) {
  const here = runs.map((run) => run.id);
  const peers = (store.runs || []).filter((r) => !here.includes(r.id) && r.kind === runs[0].kind);
  if (!peers.length || runs.length >= LETTERS.length) return null;
  const alike = peers.filter((r) => r.data === runs[0].data);
  const rest = peers.filter((r) => r.data !== runs[0].data);
  const option = (r) => h("option", { value: r.id, text: `${r.name} · ${r.label} ${number(r.test ?? r.valid)}` });
  const select = h("select", { onchange: () => { if (select.value) location.hash = `#/compare/${[...here, select.value].join("/")}`; } },
    h("option", { value: "", text: "choose a run…" }),
    alike.length ? h("optgroup", { label: "Same data" }, alike.map(option)) : null,
    rest.length ? h("optgroup", { label: "Other data" }, rest.map(option)) : null);
  return h("label", { class: "compare" }, runs.length > 1 ? "And with " : "Compare with ", select);
}

function model(run) {
  if (!run.drawn) return "";
  return h("section", { class: "panel" }, h("div", { class: "panel-head" }, h("h2", { text: "Model" })),
    h("div", { class: "model" }, drawing(run),
      h("div", { class: "equations" }, run.equations.map((text) => h("p", { text })),
        h("table", { class: "layers" }, h("tbody", {}, run.layers.map((layer) => h("tr", {},
          h("th", { scope: "row", text: layer.name }), h("td", { text: count(layer.size) }), h("td", { class: "soft", text: layer.role === "input" ? "input" : layer.unit }))))))));
}

export function drawing(run) {
  return h("div", { class: "drawing" }, h("img", { src: `/api/runs/${run.id}/drawing.svg`, alt: `${run.label}, unfolded over two steps: ${run.equations.join("; ")}`, loading: "lazy" }));
}

/** What decided the run: its recipe, section by section. */
function settings(run) {
  const sections = Object.entries(run.recipe || {}).filter(([, values]) => Object.keys(values).length);
  if (!sections.length) return "";
  return h("details", { class: "panel", open: true }, h("summary", {}, h("h2", { text: "Settings" }), h("small", { class: "soft", text: " recipe.toml" })),
    h("div", { class: "settings" }, sections.map(([name, values]) => h("section", {},
      h("h3", { text: name || "run" }),
      h("dl", {}, Object.entries(values).flatMap(([k, v]) => [h("dt", { text: k.replaceAll("_", " ") }), h("dd", { text: v === "" ? "–" : v })]))))));
}

const SPLITS = ["train", "valid", "test"];

function details(run) {
  const scored = SPLITS.filter((split) => run.result && run.result[split] !== undefined && run.result[split] !== null);
  const names = [...new Set(scored.flatMap((split) => (typeof run.result[split] === "object" ? Object.keys(run.result[split]) : [run.metric])))];
  const value = (split, name) => (typeof run.result[split] === "object" ? run.result[split][name] : run.result[split]);
  const facts = Object.entries({ ...(typeof run.environment === "object" ? run.environment : {}), version: run.version, commit: run.commit, created: run.created, updated: run.updated })
    .filter(([, v]) => ["string", "number", "boolean"].includes(typeof v));
  return h("details", { class: "panel" }, h("summary", {}, h("h2", { text: "Details" })),
    scored.length ? h("div", { class: "scroll" }, h("table", {}, h("thead", {}, h("tr", {}, h("th", { text: "" }), scored.map((split) => h("th", { scope: "col", text: split })))),
      h("tbody", {}, names.map((name) => h("tr", {}, h("th", { scope: "row", text: name.replaceAll("_", " ") }),
        scored.map((split) => h("td", { text: Number.isInteger(value(split, name)) ? String(value(split, name)) : number(value(split, name), 4) }))))))) : null,
    h("dl", { class: "environment" }, facts.flatMap(([k, v]) => [h("dt", { text: k.replaceAll("_", " ") }), h("dd", { text: String(v) })])));
}
