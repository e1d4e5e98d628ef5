// The playground of a text run, or of several: type a beginning, watch it go on, see every surprise.

import { lines, post } from "./api.js";
import { button, seedField, slider, stoppable, whole } from "./controls.js";
import { h, number, LETTERS } from "../parts/dom.js";
import { Tokens } from "./tokens.js";

export function textBench(runs) {
  const several = runs.length > 1;
  const goOn = several ? `Continue ${runs.length === 2 ? "both" : "all"}` : "Continue";
  const kind = runs[0].kind;
  let job = null;
  const input = h("textarea", { rows: 3, id: "beginning", spellcheck: "false", placeholder: "Type a beginning, or paste any text" });
  const openings = runs[0].openings || [];
  input.value = openings[0]?.text || "";
  const starts = openings.length ? h("select", { id: "start", "aria-label": "Begin with", onchange: () => { if (starts.value) input.value = openings[Number(starts.value)].text; starts.value = ""; } },
    h("option", { value: "", text: "Begin with…" }),
    h("optgroup", { label: "From its data, not trained on" }, openings.map((o, i) => h("option", { value: String(i), text: o.name })))) : null;
  const temperature = slider("Temperature", { min: 0.1, max: 2, step: 0.05, value: 0.8, show: (v) => v.toFixed(2), id: "temperature" });
  const length = whole(kind === "char" ? "Characters" : "Words", { min: 1, max: 2000, value: kind === "char" ? 300 : 80, id: "length" });
  const seed = seedField();
  const go = button(goOn, press, { class: "button primary", id: "continue" });
  const show = button("Show surprise", surprise, { id: "surprise" });
  const status = h("p", { class: "soft", role: "status" });
  const voices = runs.map((run, i) => {
    const tokens = new Tokens(kind, { label: several ? `Text ${LETTERS[i]}` : "Text", onbranch: (text) => { input.value = text; proceed(); } });
    return { run, tokens, mean: h("span", { class: "soft surprise" }) };
  });

  let previous = Promise.resolve();  // when what goes on now has ended
  let turn = 0;  // only the last request waits for that

  /** Continue, which is Stop while something goes on. */
  function press() {
    if (job) job.abort();
    else proceed();
  }

  function together(label, work) {
    job?.abort();
    const asked = ++turn;
    previous = previous.then(() => (asked === turn ? run(label, work) : null));
    return previous;
  }

  async function run(label, work) {
    job = new AbortController();
    await stoppable({ button: go, status, label }, job, async (signal) => {
      await Promise.all(voices.map((v) => work(v, signal)));
    });
    job = null;
  }

  function proceed() {
    return together("sampling…", async (v, signal) => {
      v.tokens.clear();
      v.mean.textContent = "";
      const request = { text: input.value, length: length.value, temperature: temperature.value, seed: seed.value };
      for await (const item of lines(`/api/runs/${v.run.id}/continue`, request, signal)) {
        if (item.given) v.tokens.append(item.given, true);
        if (item.tokens) v.tokens.append(item.tokens, false);
      }
    });
  }

  function surprise() {
    return together("reading…", async (v, signal) => {
      const score = await post(`/api/runs/${v.run.id}/score`, { text: input.value }, signal);
      v.tokens.clear();
      v.tokens.append(score.tokens, false);
      v.mean.textContent = score.mean === null ? "" : kind === "char" ? `${number(score.mean, 2)} bits per character` : `perplexity ${number(score.perplexity, 1)}`;
    });
  }

  input.addEventListener("keydown", (event) => { if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) { event.preventDefault(); proceed(); } });

  const el = h("section", { class: "panel bench", "aria-label": "Playground" },
    h("div", { class: "field-head" }, h("label", { for: "beginning", text: "Beginning" }), starts),
    h("div", { class: "field wide" }, input),
    h("div", { class: "bench-bar lined" }, go, show, temperature.el, length.el, seed.el),
    h("div", { class: several ? "pair" : "" }, voices.map((v, i) => h("div", { class: "voice" },
      several ? h("div", { class: "voice-head" }, h("span", { class: `letter m${i}`, text: LETTERS[i] }), h("b", { text: v.run.label || v.run.name }), v.mean) : null,
      v.tokens.el))),
    h("div", { class: "scale" }, h("span", { text: "expected" }), [0, 1, 2, 3, 4, 5].map((i) => h("i", { class: `heat${i}` })), h("span", { text: "surprising" }),
      h("div", { class: "bench-status" }, several ? null : voices[0].mean, status)),
    h("p", { class: "soft small", text: "Point at a symbol to see what the model would rather have seen; press an alternative to go on from there." }));
  return { el, dispose() { turn++; job?.abort(); voices.forEach((v) => v.tokens.dispose()); } };
}
