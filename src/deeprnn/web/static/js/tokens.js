// Text as symbols, each with its surprise for a colour and the model's alternatives behind it.

import { h } from "../parts/dom.js";

const SHOWN = { " ": "␣", "\n": "↵", "<eos>": "↵", "\t": "⇥" };
const percent = (p) => (p >= 0.0995 ? `${Math.round(100 * p)} %` : p >= 0.001 ? `${(100 * p).toFixed(1)} %` : "<0.1 %");

/** Bits up to which a symbol has each of the six shades; a word is chosen among many more than a character. */
const SHADES = { char: [1, 3, 5, 7, 10], word: [2, 5, 8, 11, 14] };
const shade = (bits, kind) => (bits === null ? 0 : SHADES[kind].filter((most) => bits >= most).length);

export class Tokens {
  constructor(kind, { label, onbranch }) {
    this.kind = kind;
    this.onbranch = onbranch;
    this.items = [];
    this.text = h("div", { class: `tokens ${kind}`, role: "group", "aria-label": `${label}: arrow keys walk through the symbols` });
    this.pop = h("div", { class: "pop", hidden: true, role: "tooltip" });
    this.el = h("div", { class: "token-box" }, this.text, this.pop);
    this.text.addEventListener("pointerover", (event) => { const at = this.index(event.target); if (at >= 0) this.show(at); });
    this.text.addEventListener("focusin", (event) => { const at = this.index(event.target); if (at >= 0) this.show(at); });
    this.text.addEventListener("keydown", (event) => this.key(event));
    this.pop.addEventListener("keydown", (event) => this.choose(event));
    this.el.addEventListener("pointerleave", () => this.hide());
    this.away = (event) => { if (!this.el.contains(event.target)) this.hide(); };
    document.addEventListener("pointerdown", this.away);
    this.clear();
  }

  dispose() { document.removeEventListener("pointerdown", this.away); }

  index(target) { return target.dataset?.i === undefined ? -1 : Number(target.dataset.i); }

  clear() {
    this.items = [];
    this.hide();
    this.text.replaceChildren(h("span", { class: "soft placeholder", text: "What it writes appears here." }));
  }

  append(tokens, given) {
    if (!tokens.length) return;
    if (!this.items.length) this.text.replaceChildren();
    const part = document.createDocumentFragment();
    for (const token of tokens) {
      const i = this.items.length;
      this.items.push(token);
      const ends = token.t === "\n" || token.t === "<eos>";
      part.append(h("span", { class: `tok heat${shade(token.bits, this.kind)}${given ? " given" : ""}${token.unknown ? " unknown" : ""}`, tabindex: i ? "-1" : "0", data: { i: String(i) },
        text: ends ? "↵" : token.t }));
      if (ends) part.append(h("br"));
      else if (this.kind === "word") part.append(" ");
    }
    this.text.append(part);
  }

  show(i) {
    const token = this.items[i];
    const el = this.text.querySelector(`[data-i="${i}"]`);
    this.text.querySelector(".shown")?.classList.remove("shown");
    el.classList.add("shown");
    const chance = token.bits === null ? "the first symbol: nothing came before it" : `${percent(2 ** -token.bits)} · ${token.bits.toFixed(1)} bits`;
    this.pop.replaceChildren(
      h("p", { class: "pop-head" }, h("b", { text: SHOWN[token.t] || token.t }), " ", h("span", { class: "soft", text: chance })),
      token.unknown ? h("p", { class: "soft", text: "not in the vocabulary: read as <unk>" }) : "",
      ...token.alt.map(([t, p]) => h("button", { type: "button", class: `alt${t === token.t ? " same" : ""}`, title: "Go on from here with this one", onclick: () => this.branch(i, t) },
        h("span", { class: "alt-name", text: SHOWN[t] || t }), h("span", { class: "alt-bar", css: { "--p": String(p) } }), h("span", { class: "alt-p", text: percent(p) }))));
    this.pop.hidden = false;
    const box = this.el.getBoundingClientRect();
    const at = el.getBoundingClientRect();
    const left = Math.min(Math.max(at.left - box.left - 20, 0), box.width - this.pop.offsetWidth);
    this.pop.style.left = `${Math.max(0, left)}px`;
    this.pop.style.top = `${at.bottom - box.top}px`;
  }

  hide() {
    this.pop.hidden = true;
    this.text.querySelector(".shown")?.classList.remove("shown");
  }

  /** Up and down through the alternatives, Escape back to the symbol. */
  choose(event) {
    const step = { ArrowDown: "nextElementSibling", ArrowUp: "previousElementSibling" }[event.key];
    if (event.key === "Escape") { this.text.querySelector(".shown")?.focus(); this.hide(); }
    else if (step && event.target[step]?.matches(".alt")) event.target[step].focus();
    else return;
    event.preventDefault();
  }

  branch(i, symbol) {
    const before = this.items.slice(0, i).map((token) => token.t).concat(symbol);
    this.hide();
    this.onbranch(this.kind === "char" ? before.join("") : before.join(" ").replaceAll(/ ?<eos> ?/g, "\n"));
  }

  key(event) {
    const at = this.index(event.target);
    if (at < 0) return;
    if (event.key === "Escape") { this.hide(); return; }
    if (event.key === "ArrowDown" || event.key === "Enter") { event.preventDefault(); this.pop.querySelector(".alt")?.focus(); return; }
    const to = event.key === "ArrowRight" ? at + 1 : event.key === "ArrowLeft" ? at - 1 : event.key === "Home" ? 0 : event.key === "End" ? this.items.length - 1 : null;
    if (to === null || to < 0 || to >= this.items.length) return;
    event.preventDefault();
    event.target.tabIndex = -1;
    const next = this.text.querySelector(`[data-i="${to}"]`);
    next.tabIndex = 0;
    next.focus();
  }
}
