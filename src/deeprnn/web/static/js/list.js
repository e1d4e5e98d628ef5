// The runs at the side: searched, filtered, grouped by data.

import { h, keepFocus, number } from "../parts/dom.js";
import { spark } from "../parts/chart.js";
import { dagger, remarks } from "./results.js";

const FILTERS = [["all", "All"], ["music", "Music"], ["text", "Text"], ["running", "Running"]];

const matches = (run, filter) =>
  filter === "all" ||
  (filter === "running" ? run.status === "running" : filter === "music" ? run.kind === "music" : ["char", "word"].includes(run.kind));

export function runList(store) {
  let filter = "all";
  let chosen = [];
  let wanted = null;  // a tag
  const search = h("input", { type: "search", placeholder: "Search runs", "aria-label": "Search runs", oninput: draw });
  const chips = h("div", { class: "chips", role: "group", "aria-label": "Show" }, FILTERS.map(([name, text]) =>
    h("button", { type: "button", class: "chip", "aria-pressed": String(name === filter), data: { filter: name }, text, onclick: () => pick(name) })));
  const tags = h("div", { class: "chips", role: "group", "aria-label": "Tags", hidden: true });
  const body = h("div", { class: "run-list" });
  const el = h("div", {}, h("div", { class: "side-head" }, search, chips, tags), body);

  function pick(name) {
    filter = name;
    for (const chip of chips.children) chip.setAttribute("aria-pressed", String(chip.dataset.filter === name));
    draw();
  }

  function drawTags() {
    const counts = new Map();
    for (const run of store.runs) for (const tag of run.tags || []) counts.set(tag, (counts.get(tag) || 0) + 1);
    if (!counts.has(wanted)) wanted = null;
    const most = [...counts].sort((a, b) => b[1] - a[1]).slice(0, 12).map(([tag]) => tag);
    tags.hidden = !most.length;
    tags.replaceChildren(...most.map((tag) => h("button", { type: "button", class: "chip tag", "aria-pressed": String(tag === wanted), text: tag,
      onclick: () => { wanted = tag === wanted ? null : tag; draw(); } })));
  }

  function draw() {
    if (!store.runs) {
      body.replaceChildren(h("p", { class: "hint", text: store.error || "Loading…" }));
      return;
    }
    drawTags();
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    const shown = store.runs.filter((run) => matches(run, filter) && (!wanted || run.tags?.includes(wanted)) &&
      words.every((word) => `${run.name} ${run.label} ${run.data} ${run.status} ${(run.tags || []).join(" ")}`.toLowerCase().includes(word)));
    if (!shown.length) {
      const text = store.runs.length ? "No run matches." : "No runs yet.";
      body.replaceChildren(h("p", { class: "hint", text }));
      return;
    }
    const groups = new Map();
    for (const run of shown) {
      const name = run.data ? store.paper?.names[run.data] || run.data : "unreadable";
      groups.set(name, [...(groups.get(name) || []), run]);
    }
    const lost = store.error ? [h("p", { class: "lost", role: "alert", text: store.error })] : [];
    body.replaceChildren(...lost, ...[...groups].map(([name, runs]) => h("section", { "aria-label": name },
      h("h2", { class: "group" }, name, h("span", { class: "soft", text: ` ${runs.length}` })),
      h("ul", {}, runs.map(row)))));
  }

  function row(run) {
    const current = chosen.includes(run.id);
    const value = run.test ?? run.valid;
    return h("li", {}, h("a", { href: `#/run/${run.id}`, class: `run-row ${run.status}`, "aria-current": current ? "page" : null, title: run.error || run.name },
      h("span", { class: "dot", title: run.status, role: "img", "aria-label": run.status }),
      h("span", { class: "who" }, h("b", { text: run.name }), h("small", { text: run.error || [run.label, run.status === "finished" ? null : run.status, ...(run.tags || [])].filter(Boolean).join(" · ") })),
      spark(run.spark || []),
      h("span", { class: "value", title: [run.test === null ? "validation" : "test", remarks(run)].filter(Boolean).join("; "), text: number(value) + dagger(run) })));
  }

  return {
    el,
    tell: () => keepFocus(body, draw),
    select(ids) {
      chosen = ids;
      keepFocus(body, draw);
      body.querySelector("[aria-current]")?.scrollIntoView({ block: "nearest" });
    },
  };
}
