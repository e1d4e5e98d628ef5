// Labelled sliders, numbers and buttons, and work that a button stops, as the playgrounds need them.

import { h, toast } from "../parts/dom.js";

export function slider(text, { min, max, step, value, show = (v) => v, id }) {
  const out = h("b", { text: show(value) });  // no <output>: the label would name it instead of the slider
  const input = h("input", { type: "range", min, max, step, value: String(value), id, oninput: () => { out.textContent = show(Number(input.value)); } });
  return { el: h("label", { class: "field slider" }, h("span", {}, text, " ", out), input), get value() { return Number(input.value); }, input };
}

export function whole(text, { min, max, value, step = 1, id }) {
  const input = h("input", { type: "number", min, max, step, value: String(value), inputmode: "numeric", id });
  const read = () => Math.min(max, Math.max(min, Math.round(Number(input.value) || min)));
  input.addEventListener("change", () => { input.value = String(read()); });
  return { el: h("label", { class: "field" }, h("span", { text }), input), get value() { return read(); }, set value(v) { input.value = String(v); }, input };
}

export function seedField() {
  const field = whole("Seed", { min: 0, max: 2 ** 32, value: 1, id: "seed" });
  const dice = h("button", { type: "button", class: "quiet dice", "aria-label": "Another seed", title: "Another seed", text: "⚄",
    onclick: () => { field.value = Math.floor(Math.random() * 1e6); } });
  return { el: h("div", { class: "seed" }, field.el, dice), get value() { return field.value; } };
}

export function button(text, onclick, props = {}) {
  return h("button", { type: "button", class: "button", text, onclick, ...props });
}

/** Work that the button stops; the status line says how it gets on and how long it took, after what `work` came to. */
export async function stoppable({ button, status, label }, job, work) {
  const idle = button.textContent;
  button.textContent = "Stop";
  status.textContent = label;
  const began = performance.now();
  try {
    const result = await work(job.signal);
    status.textContent = `${result ? `${result} in ` : ""}${((performance.now() - began) / 1000).toFixed(1)} s`;
  } catch (error) {
    if (error.name === "AbortError") status.textContent = "stopped";
    else { status.textContent = ""; toast(error.message); }
    job.abort();  // the others go no further alone
  }
  button.textContent = idle;
}
