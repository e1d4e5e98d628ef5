// Labelled sliders, numbers and buttons, as the playgrounds need them.

import { h } from "../parts/dom.js";

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
