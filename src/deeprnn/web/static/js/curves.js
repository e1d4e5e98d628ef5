// Learning curves of one run or several, live where a run is in progress.

import { get } from "./api.js";
import { h, LETTERS, UNITS } from "../parts/dom.js";
import { lineChart, points } from "../parts/chart.js";

export async function learning(runs, tell = () => {}) {
  const several = runs.length > 1;
  const loss = lineChart({ height: 290, label: "Learning curve", y: UNITS[runs[0].metric] || runs[0].metric });
  const rate = lineChart({ height: 150, label: "Learning rate", wide: true });
  const norm = lineChart({ height: 150, label: "Gradient norm", wide: true });
  const news = h("span", { class: "news", role: "status" });
  const rows = await Promise.all(runs.map(async (run) => (await get(`/api/runs/${run.id}/metrics`)).rows));
  const now = runs.map(() => []);  // of the running epoch
  const paper = runs.every((run) => run.data === runs[0].data) ? runs[0].paper : null;

  /** The running epoch goes on where the last one ended. */
  function current(i, key) {
    const here = points(now[i], key);
    return here.length ? [...points(rows[i], key).slice(-1), ...here] : [];
  }

  function draw() {
    const series = several
      ? rows.map((r, i) => ({ name: `${LETTERS[i]} validation`, class: `m${i}`, points: points(r, "valid"), mark: true }))
      : [{ name: "training", class: "train", points: points(rows[0], "train") },
        { name: "validation", class: "valid", points: points(rows[0], "valid"), mark: true },
        ...(now[0].length ? [{ name: "training, this epoch", class: "train now", points: current(0, "train"), whole: true }] : [])];
    loss.update(series, Number.isFinite(paper) ? [{ name: "paper, test", value: paper, class: "paper" }] : []);
    const small = (key) => rows.map((r, i) => ({ name: several ? LETTERS[i] : key.replace("_", " "), class: several ? `m${i}` : "train", points: [...points(r, key), ...points(now[i], key)] }));
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
    source.addEventListener("progress", (event) => {
      const { reset, rows: fresh } = JSON.parse(event.data);
      now[i] = reset ? fresh : now[i].concat(fresh);
      draw();
    });
    source.addEventListener("status", (event) => { news.textContent = "live"; tell(JSON.parse(event.data), i); });
    source.addEventListener("end", (event) => {
      source.close();
      now[i] = [];
      draw();
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
