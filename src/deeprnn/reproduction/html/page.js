// A report in the browser: the page's own charts, rolls and synthesiser, filled from the JSON beside them.

import { lineChart } from "./parts/chart.js";
import { count, h } from "./parts/dom.js";
import { bars, parallel } from "./parts/parallel.js";
import { Roll, roots } from "./parts/roll.js";
import { Player } from "./parts/synth.js";

const player = new Player();
let stopShown = () => {};

function chart(box, { series, guides = [], legend = false, counted = false, ...options }) {
  const made = lineChart({ ...options, showX: counted ? count : null });
  made.update(series, guides);
  if (legend) box.append(made.legend);
  box.append(made.el);
}

function roll(box, { grid, keys, frames, heat, label, tempo = null, timbre = "piano" }) {
  const made = new Roll(grid, keys, { label, onplay: () => toggle(), onseek: (t) => { if (tempo) play(t); } });
  made.set(frames, 0);
  const all = heat ? roots(heat) : null;
  if (all) made.heat = frames.map((_, t) => all.subarray(t * keys, (t + 1) * keys));
  const button = h("button", { type: "button", text: "▶ Play", onclick: () => toggle() });
  if (tempo) box.append(h("div", { class: "player" }, button, h("span", { class: "quiet", text: `${Math.round((frames.length * 60) / tempo / made.perBeat)} s; click into the roll to play from there` })));
  box.append(made.el);

  function play(from) {
    stopShown();
    button.textContent = "■ Stop";
    stopShown = stop;
    player.play(made, { tempo, timbre, from: Math.min(from, frames.length - 1), onframe: (at) => { made.playhead = at; made.show(at, 0.1); made.draw(); }, onend: stop });
  }

  function stop() {
    player.stop();
    button.textContent = "▶ Play";
    made.playhead = null;
    made.draw();
    stopShown = () => {};
  }

  function toggle() {
    if (!tempo) return;
    if (made.playhead !== null || stopShown === stop) stop();
    else play(0);
  }
}

const MAKERS = { chart, roll, parallel: (box, content) => box.append(parallel(content)), bars: (box, content) => box.append(bars(content)) };
for (const box of document.querySelectorAll("[data-part]")) {
  MAKERS[box.dataset.part](box, JSON.parse(box.querySelector("script").textContent));
}
