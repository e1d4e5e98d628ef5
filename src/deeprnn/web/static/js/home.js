// The overview: what is learning now, what can be played with, and everything beside the paper.

import { fill, h, keepFocus, number, count } from "../parts/dom.js";
import { spark } from "../parts/chart.js";
import { dagger, paperTable, remarks } from "./results.js";

export function homeView(store) {
  const el = h("div", { class: "home" });

  function draw() {
    if (!store.runs) {
      fill(el, problem(store.error));
      return;
    }
    if (!store.runs.length) {
      fill(el, empty(store));
      return;
    }
    const running = store.runs.filter((run) => run.status === "running");
    const stage = /\/pretrain(\/|$)/;  // a first stage is there to be built upon
    const playable = store.runs.filter((run) => run.playable && run.status !== "running" && !stage.test(run.name));
    const best = ["music", "char", "word"].flatMap((kind) => pick(playable.filter((run) => run.kind === kind), kind === "music" ? 2 : 1));
    fill(el,
      h("section", { class: "hero" },
        h("h1", { text: "What the networks learned" }),
        h("p", { text: "Pick a run to draw a few notes and hear how it goes on, or to type a line and see what it expects." })),
      running.length ? shelf("Learning now", running.slice(0, 6)) : null,
      best.length ? shelf("Play with", best) : null,
      table(store));
  }

  draw();
  return { el, tell: () => keepFocus(el, draw) };
}

/** The best by validation, one for each data set first. */
function pick(runs, most) {
  const sorted = [...runs].sort((a, b) => (a.valid ?? Infinity) - (b.valid ?? Infinity));
  const seen = new Set();
  const first = sorted.filter((run) => !seen.has(run.data) && seen.add(run.data));
  return [...first, ...sorted.filter((run) => !first.includes(run))].slice(0, Math.max(most, 1));
}

function shelf(title, runs) {
  return h("section", {}, h("h2", { text: title }), h("ul", { class: "cards" }, runs.map((run) =>
    h("li", {}, h("a", { href: `#/run/${run.id}`, class: `card ${run.status}` },
      h("span", { class: `badge ${run.kind}`, text: { music: "♪ music", char: "¶ characters", word: "¶ words" }[run.kind] || run.kind }),
      h("b", { text: run.label || run.name }),
      h("small", { class: "soft", text: run.label ? run.name : "" }),
      spark(run.spark || [], 220, 44),
      h("span", { class: "card-foot" },
        h("span", {}, h("b", { text: number(run.test ?? run.valid) + dagger(run), title: remarks(run) || null }), h("small", { class: "soft", text: run.test === null ? " validation" : " test" })),
        h("small", { class: "soft", text: run.status === "running" ? `epoch ${run.epochs}` : `${count(run.parameters)} params` }))))))); 
}

/** The paper's tables, where some run stands beside one of their numbers. */
function table(store) {
  if (!store.paper?.cells.length || !store.runs.some((run) => Number.isFinite(run.paper))) return null;
  return h("section", {}, h("h2", { text: "Beside the paper" }),
    h("p", { class: "soft", text: "For each cell the run with the best validation score, by its test result. Lower is better." }),
    paperTable(store));
}

function empty(store) {
  const where = (store.folders || []).join(", ");
  return h("section", { class: "empty" },
    h("h1", { text: "No runs yet" }),
    h("p", { text: `Nothing was found in ${where || "the given folder"}. Train something small and it appears here by itself:` }),
    h("pre", {}, h("code", { text: "deeprnn demo                 # Bach chorales, a few minutes\ndeeprnn train my_midi_folder/\ndeeprnn train book.txt --level char" })));
}

function problem(message) {
  return h("section", { class: "empty" }, h("h1", { text: "The server does not answer" }),
    h("p", { text: message || "" }), h("p", { class: "soft", text: "This page tries again every few seconds." }));
}
