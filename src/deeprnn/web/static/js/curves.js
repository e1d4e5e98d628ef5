// Learning curves of one run or two, live where a run is in progress.

import { get } from "./api.js";
import { h } from "./dom.js";
import { lineChart, points } from "./chart.js";

export async function learning(runs, tell = () => {}) {
  const two = runs.length > 1;
  const loss = lineChart({ height: 280, label: "Learning curve" });
  const rate = lineChart({ height: 130, label: "Learning rate", wide: true });
  const norm = lineChart({ height: 130, label: "Gradient norm", wide: true });
  const news = h("span", { class: "news", role: "status" });
  const rows = await Promise.all(runs.map(async (run) => (await get(`/api/runs/${run.id}/metrics`)).rows));
  const paper = runs[0].paper;

  function draw() {
    const series = two
      ? rows.map((r, i) => ({ name: `${"AB"[i]} validation`, class: `m${i}`, points: points(r, "valid"), mark: true }))
      : [{ name: "training", class: "train", points: points(rows[0], "train") },
        { name: "validation", class: "valid", points: points(rows[0], "valid"), mark: true }];
    loss.update(series, Number.isFinite(paper) ? [{ name: "paper, test", value: paper, class: "paper" }] : []);
    const small = (key) => rows.map((r, i) => ({ name: two ? "AB"[i] : key.replace("_", " "), class: two ? `m${i}` : "train", points: points(r, key) }));
    rate.update(small("rate"));
    norm.update(small("grad_norm"));
  }

  const sources = runs.map((run, i) => run.status === "running" ? live(run, i) : null);

  function live(run, i) {
    const source = new EventSource(`/api/runs/${run.id}/events`);
    news.textContent = "live";
    source.addEventListener("rows", (event) => {
      const { reset, rows: fresh } = JSON.parse(event.data);
      rows[i] = reset ? fresh : rows[i].concat(fresh);
      draw();
    });
    source.addEventListener("status", (event) => { news.textContent = "live"; tell(JSON.parse(event.data), i); });
    source.addEventListener("end", (event) => {
      source.close();
      news.textContent = JSON.parse(event.data).status;
    });
    source.onerror = () => { news.textContent = source.readyState === EventSource.CLOSED ? "not live: reload to try again" : "connection lost, trying again…"; };
    return source;
  }

  draw();
  return {
    el: h("section", { class: "panel", "aria-labelledby": "learning" },
      h("div", { class: "panel-head" }, h("h2", { id: "learning", text: "Learning" }), news, loss.legend),
      loss.el,
      h("div", { class: "pair" },
        h("div", {}, h("h3", { text: "Learning rate" }), rate.el),
        h("div", {}, h("h3", { text: "Gradient norm" }), norm.el))),
    dispose() {
      sources.forEach((source) => source?.close());
      [loss, rate, norm].forEach((chart) => chart.dispose());
    },
  };
}
