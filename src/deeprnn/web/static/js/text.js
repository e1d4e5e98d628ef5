// The playground of a text run, or of several: type a beginning, watch it go on, see every surprise.

import { lines, post } from "./api.js";
import { button, seedField, slider, whole } from "./controls.js";
import { h, number, toast, LETTERS } from "../parts/dom.js";
import { Tokens } from "./tokens.js";

export function textBench(runs) {
  const several = runs.length > 1;
  const goOn = several ? `Continue ${runs.length === 2 ? "both" : "all"}` : "Continue";
  const kind = runs[0].kind;
  let job = null;
  const input = h("textarea", { rows: 3, id: "beginning", spellcheck: "false", placeholder: "Type a beginning, or paste any text" });
  const own = runs[0].openings || [];
  input.value = own[0]?.text || "";
  const starts = own.length ? h("select", { id: "start", "aria-label": "Begin with", onchange: () => { if (starts.value) input.value = own[Number(starts.value)].text; starts.value = ""; } },
    h("option", { value: "", text: "Begin with…" }),
    h("optgroup", { label: "From its data, not trained on" }, own.map((o, i) => h("option", { value: String(i), text: o.name })))) : null;
  const temperature = slider("Temperature", { min: 0.1, max: 2, step: 0.05, value: 0.8, show: (v) => v.toFixed(2), id: "temperature" });
  const length = whole(kind === "char" ? "Characters" : "Words", { min: 1, max: 2000, value: kind === "char" ? 300 : 80, id: "length" });
  const seed = seedField();
  const go = button(goOn, press, { class: "button primary", id: "continue" });
  const look = button("Show surprise", surprise, { id: "surprise" });
  const status = h("p", { class: "soft", role: "status" });
  const voices = runs.map((run, i) => {
    const tokens = new Tokens(kind, { label: several ? `Text ${LETTERS[i]}` : "Text", onbranch: (text) => { input.value = text; proceed(); } });
    return { run, tokens, mean: h("span", { class: "soft surprise" }) };
  });

  let over = Promise.resolve();  // when what goes on now has ended
  let turn = 0;  // only the last wish waits for that

  /** Continue, which is Stop while something goes on. */
  function press() {
    if (job) job.abort();
    else proceed();
  }

  function together(label, work) {
    job?.abort();
    const mine = ++turn;
    over = over.then(() => (mine === turn ? run(label, work) : null));
    return over;
  }

  async function run(label, work) {
    job = new AbortController();
    go.textContent = "Stop";
    status.textContent = label;
    const began = performance.now();
    try {
      await Promise.all(voices.map((v) => work(v, job.signal)));
      status.textContent = `${((performance.now() - began) / 1000).toFixed(1)} s`;
    } catch (error) {
      if (error.name === "AbortError") status.textContent = "stopped";
      else { status.textContent = ""; toast(error.message); }
      job.abort();  // the others go no further alone
    }
    job = null;
    go.textContent = goOn;
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
      const found = await post(`/api/runs/${v.run.id}/score`, { text: input.value }, signal);
      v.tokens.clear();
      v.tokens.append(found.tokens, false);
      v.mean.textContent = found.mean === null ? "" : kind === "char" ? `${number(found.mean, 2)} bits per character` : `perplexity ${number(found.perplexity, 1)}`;
    });
  }

  input.addEventListener("keydown", (event) => { if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) { event.preventDefault(); proceed(); } });

  const el = h("section", { class: "panel bench", "aria-label": "Playground" },
    h("div", { class: "field-head" }, h("label", { for: "beginning", text: "Beginning" }), starts),
    h("div", { class: "field wide" }, input),
    h("div", { class: "bench-bar lined" }, go, look, temperature.el, length.el, seed.el),
    h("div", { class: several ? "pair" : "" }, voices.map((v, i) => h("div", { class: "voice" },
      several ? h("div", { class: "voice-head" }, h("span", { class: `letter m${i}`, text: LETTERS[i] }), h("b", { text: v.run.label || v.run.name }), v.mean) : null,
      v.tokens.el))),
    h("div", { class: "scale" }, h("span", { text: "expected" }), [0, 1, 2, 3, 4, 5].map((i) => h("i", { class: `heat${i}` })), h("span", { text: "surprising" }),
      h("div", { class: "bench-status" }, several ? null : voices[0].mean, status)),
    h("p", { class: "soft small", text: "Point at a symbol to see what the model would rather have seen; press an alternative to go on from there." }));
  return { el, dispose() { turn++; job?.abort(); voices.forEach((v) => v.tokens.dispose()); } };
}
