// An editable piano roll on canvas: keys at the left, time to the right, what comes next at the far edge.

import { h, colour } from "./dom.js";

const NAMES = ["C", "C♯", "D", "D♯", "E", "F", "F♯", "G", "G♯", "A", "A♯", "B"];
const BLACK = new Set([1, 3, 6, 8, 10]);
const GUTTER = 46;
const STRIP = 40;

export const pitchName = (midi) => `${NAMES[midi % 12]}${Math.floor(midi / 12) - 1}`;

/** Base64 bytes of square roots of probabilities, as numbers between 0 and 1. */
export function roots(text) {
  const raw = atob(text);
  const out = new Float32Array(raw.length);
  for (let i = 0; i < raw.length; i++) out[i] = raw.charCodeAt(i) / 255;
  return out;
}

export class Roll {
  /** Without `onedit` the roll is there to be looked at: a click names a frame to `onseek`. */
  constructor(grid, keys, { label = "Piano roll", onedit = null, onplay = () => {}, onseek = () => {}, most = 4096 } = {}) {
    this.low = grid?.low ?? 21;
    this.perBeat = grid?.steps_per_beat ?? 1;
    this.keys = keys;
    this.most = most;
    this.onedit = onedit;
    this.onplay = onplay;
    this.onseek = onseek;
    this.frames = [];
    this.primer = 0;  // frames that were given
    this.sampled = false;  // whether frames follow that were not
    this.heat = [];
    this.next = null;
    this.expect = true;
    this.playhead = null;
    this.beside = [];  // rolls that one compares with this: all show the same keys
    this.cursor = { t: 0, k: Math.min(60 - this.low, keys - 1) };
    this.cell = this.narrow = Math.max(8, Math.round(26 / this.perBeat));
    this.canvas = h("canvas", { class: "roll-canvas", tabindex: "0", role: "application", "aria-roledescription": "piano roll",
      "aria-label": `${label}. Arrow keys move, ${onedit ? "space toggles a note, page up and down jump an octave, " : ""}P plays.` });
    this.gutter = h("canvas", { class: "roll-keys", "aria-hidden": "true" });
    this.strip = h("canvas", { class: "roll-next", role: "img", "aria-label": "Probabilities for the next frame" });
    this.spacer = h("div", { class: "roll-spacer" }, this.canvas);
    this.scroller = h("div", { class: "roll-scroll" }, this.spacer);
    this.said = h("p", { class: "visually-hidden", role: "status", "aria-live": "polite" });
    this.tip = h("div", { class: "roll-tip", hidden: true });
    this.el = h("div", { class: onedit ? "roll" : "roll fixed" }, this.gutter, this.scroller, onedit ? this.strip : null, this.tip, this.said);
    this.listen();
    this.observer = new ResizeObserver(() => this.draw());
    this.observer.observe(this.el);
    this.redraw = () => this.draw();
    document.addEventListener("themechange", this.redraw);
    this.media = matchMedia("(prefers-color-scheme: dark)");
    this.media.addEventListener("change", this.redraw);
  }

  dispose() {
    this.observer.disconnect();
    document.removeEventListener("themechange", this.redraw);
    this.media.removeEventListener("change", this.redraw);
  }

  /** Lists of keys, as the server takes them. */
  lists() { return this.frames.map((frame) => [...frame].sort((a, b) => a - b)); }

  set(lists, primer = lists.length) {
    this.frames = lists.map((keys) => new Set(keys));
    this.primer = primer;
    this.heat = [];
    this.next = null;
    this.draw();
  }

  append(lists, heat) {
    for (let i = 0; i < lists.length; i++) {
      if (heat) this.heat[this.frames.length] = heat.subarray(i * this.keys, (i + 1) * this.keys);
      this.frames.push(new Set(lists[i]));
    }
    this.draw();
  }

  /** Pitches of all notes. */
  pitches() { return this.frames.flatMap((frame) => [...frame]).map((key) => key + this.low); }

  /** The keys shown: what sounds, here or in rolls beside this one, and at least four octaves to draw in, or two to look at. */
  compass() {
    const sounding = [this, ...this.beside].flatMap((roll) => roll.pitches());
    const [bottom, top] = [this.low, this.low + this.keys - 1];
    let low = sounding.reduce((a, b) => Math.min(a, b), 127) - 2;
    let high = sounding.reduce((a, b) => Math.max(a, b), 0) + 2;
    if (this.onedit || !sounding.length) [low, high] = [Math.min(low + 2, 36), Math.max(high - 2, 84)];
    else [low, high] = [Math.min(low, high - 24), Math.max(high, low + 24)];
    return [Math.max(bottom, low), Math.min(top, high)];
  }

  geometry() {
    const [low, high] = this.compass();
    const height = this.scroller.clientHeight || 400;
    const rows = high - low + 1;
    return { low, high, height, rowH: height / rows, width: this.scroller.clientWidth,
      y: (midi) => ((high - midi) * height) / rows };
  }

  columns() {
    return Math.min(this.most, Math.max(this.frames.length + (this.onedit ? 8 : 0), Math.ceil((this.scroller.clientWidth || 600) / this.cell)));
  }

  draw() {
    this.refresh();
    this.beside.forEach((roll) => roll.refresh());  // a note may have changed the keys they show
  }

  refresh() {
    if (this.queued) return;
    this.queued = true;
    requestAnimationFrame(() => { this.queued = false; this.paint(); });
  }

  paint() {
    if (!this.el.isConnected || !this.scroller.clientWidth) return;
    if (!this.onedit && this.frames.length) this.cell = Math.max(this.narrow, this.scroller.clientWidth / this.frames.length);  // a short one fills the width
    this.spacer.style.width = `${this.columns() * this.cell}px`;
    Object.assign(this.el.dataset, { frames: this.frames.length, primer: this.primer, notes: this.notes().length, playhead: this.playhead?.toFixed(2) ?? "" });
    const g = this.geometry();
    const ink = palette();
    this.paintRoll(g, ink);
    this.paintKeys(g, ink);
    if (this.onedit) this.paintNext(g, ink);
  }

  paintRoll(g, ink) {
    const c = surface(this.canvas, g.width, g.height);
    const left = this.scroller.scrollLeft;
    const first = Math.floor(left / this.cell);
    const last = Math.min(this.columns(), Math.ceil((left + g.width) / this.cell));
    const X = (t) => t * this.cell - left;
    c.fillStyle = ink.paper;
    c.fillRect(0, 0, g.width, g.height);
    c.fillStyle = ink.black;
    for (let midi = g.low; midi <= g.high; midi++) if (BLACK.has(midi % 12)) c.fillRect(0, g.y(midi), g.width, g.rowH);
    if (this.expect) this.paintHeat(c, g, ink, first, last, X);
    c.fillStyle = ink.primer;
    if (this.primer) c.fillRect(X(0), 0, this.primer * this.cell, g.height);
    for (let midi = g.low; midi <= g.high; midi++) {
      if (midi % 12 === 0) line(c, 0, g.y(midi) + g.rowH, g.width, g.y(midi) + g.rowH, ink.rule, 1);
    }
    for (let t = first; t <= last; t++) {
      if (t % this.perBeat) continue;
      const bar = t % (4 * this.perBeat) === 0;
      line(c, X(t), 0, X(t), g.height, bar ? ink.bar : ink.rule, bar ? 1 : 0.5);
    }
    if (this.frames.length > this.primer) line(c, X(this.primer), 0, X(this.primer), g.height, ink.soft, 1.5);
    this.paintNotes(c, g, ink, X, first, last);
    if (document.activeElement === this.canvas) {
      c.strokeStyle = ink.accent;
      c.lineWidth = 2;
      c.strokeRect(X(this.cursor.t) + 1, g.y(this.cursor.k + this.low) + 1, this.cell - 2, g.rowH - 2);
    }
    if (this.playhead !== null) line(c, X(this.playhead), 0, X(this.playhead), g.height, ink.accent, 2);
    if (!this.frames.length) {
      c.fillStyle = ink.soft;
      c.font = `15px ${getComputedStyle(this.el).fontFamily}`;
      c.textAlign = "center";
      c.fillText(g.width < 500 ? "Tap to place notes" : "Click to place notes, or drop a MIDI file here", g.width / 2, g.height / 2);
    }
  }

  paintHeat(c, g, ink, first, last, X) {
    for (let t = first; t < last; t++) {
      const p = this.heat[t];
      if (!p) continue;
      for (let midi = g.low; midi <= g.high; midi++) {
        const root = p[midi - this.low];
        if (root < 0.16) continue;
        c.fillStyle = ink.heat;
        c.globalAlpha = Math.min(0.85, root * 0.95);
        c.fillRect(X(t), g.y(midi), this.cell, g.rowH);
      }
    }
    c.globalAlpha = 1;
  }

  paintNotes(c, g, ink, X, first, last) {
    for (const note of this.notes()) {
      if (note.end < first || note.start > last) continue;
      const midi = note.key + this.low;
      const sounding = this.playhead !== null && this.playhead >= note.start && this.playhead < note.end;
      c.fillStyle = sounding ? ink.accent : note.start < this.primer ? ink.given : ink.note;
      c.beginPath();
      c.roundRect(X(note.start) + 0.5, g.y(midi) + 0.5, (note.end - note.start) * this.cell - 1.5, g.rowH - 1, Math.min(3, g.rowH / 2));
      c.fill();
    }
  }

  /** Runs of frames as held notes. */
  notes() {
    const out = [];
    const open = new Map();
    for (let t = 0; t <= this.frames.length; t++) {
      const frame = this.frames[t] || new Set();
      for (const [key, start] of open) if (!frame.has(key)) { out.push({ key, start, end: t }); open.delete(key); }
      for (const key of frame) if (!open.has(key)) open.set(key, t);
    }
    return out;
  }

  paintKeys(g, ink) {
    const c = surface(this.gutter, GUTTER, g.height);
    c.fillStyle = ink.white;
    c.fillRect(0, 0, GUTTER, g.height);
    for (let midi = g.low; midi <= g.high; midi++) {
      const y = g.y(midi);
      const black = BLACK.has(midi % 12);
      if (black) { c.fillStyle = ink.key; c.fillRect(0, y + 0.5, GUTTER * 0.58, g.rowH - 1); }
      if ([0, 5].includes(midi % 12)) line(c, 0, y + g.rowH, GUTTER, y + g.rowH, ink.bar, 1);
      if (midi % 12 === 0) {
        c.fillStyle = ink.key;
        c.font = "10px system-ui, sans-serif";
        c.textAlign = "right";
        c.fillText(pitchName(midi), GUTTER - 4, Math.min(Math.max(y + g.rowH / 2 + 3.5, 9), g.height - 3));
      }
    }
    line(c, GUTTER - 0.5, 0, GUTTER - 0.5, g.height, ink.bar, 1);
  }

  paintNext(g, ink) {
    const c = surface(this.strip, STRIP, g.height);
    c.fillStyle = ink.paper;
    c.fillRect(0, 0, STRIP, g.height);
    for (let midi = g.low; midi <= g.high; midi++) {
      if (BLACK.has(midi % 12)) { c.fillStyle = ink.black; c.fillRect(0, g.y(midi), STRIP, g.rowH); }
      if (!this.next) continue;
      c.globalAlpha = Math.min(1, this.next[midi - this.low] * 1.05);
      c.fillStyle = ink.heat;
      c.fillRect(0, g.y(midi), STRIP, g.rowH);
      c.globalAlpha = 1;
    }
    line(c, 0.5, 0, 0.5, g.height, ink.bar, 1);
    this.strip.setAttribute("aria-label", this.expectation());
  }

  /** The likeliest keys of the next frame, in words. */
  expectation() {
    if (!this.next) return "Probabilities for the next frame: not known yet";
    const best = [...this.next].map((root, key) => [root * root, key]).sort((a, b) => b[0] - a[0]).slice(0, 5);
    return `Probabilities for the next frame: ${best.map(([p, key]) => `${pitchName(key + this.low)} ${Math.round(100 * p)} %`).join(", ")}`;
  }

  at(event) {
    const g = this.geometry();
    const box = this.canvas.getBoundingClientRect();
    const t = Math.floor((event.clientX - box.left + this.scroller.scrollLeft) / this.cell);
    const midi = g.high - Math.floor((event.clientY - box.top) / g.rowH);
    return { t: Math.min(Math.max(t, 0), this.most - 1), k: Math.min(Math.max(midi - this.low, 0), this.keys - 1) };
  }

  has({ t, k }) { return Boolean(this.frames[t]?.has(k)); }

  put({ t, k }, on) {
    if (on) {
      while (this.frames.length <= t) this.frames.push(new Set());
      this.frames[t].add(k);
    } else {
      this.frames[t]?.delete(k);
      while (this.frames.length && !this.frames[this.frames.length - 1].size) this.frames.pop();
    }
    this.primer = this.sampled ? Math.min(this.primer, this.frames.length) : this.frames.length;
    this.heat.length = Math.min(this.heat.length, t);
    this.next = null;
    this.draw();
    this.onedit?.(t, k, on);
  }

  listen() {
    let paint = null;
    let press = null;
    this.scroller.addEventListener("scroll", () => this.draw(), { passive: true });
    this.canvas.addEventListener("pointerdown", (event) => {
      if (event.button) return;
      const cell = this.at(event);
      this.cursor = cell;
      if (!this.onedit) { this.onseek(cell.t); return; }
      if (event.pointerType === "touch") { press = cell; return; }  // a drag scrolls, a tap toggles
      paint = !this.has(cell);
      this.put(cell, paint);
      this.canvas.setPointerCapture(event.pointerId);
    });
    this.canvas.addEventListener("pointermove", (event) => {
      this.hover(event);
      if (paint === null) return;
      const cell = { ...this.at(event), k: this.cursor.k };  // along one key, as notes are held
      if (this.has(cell) !== paint) this.put(cell, paint);
    });
    this.canvas.addEventListener("pointerup", () => {
      if (press) this.put(press, !this.has(press));
      paint = press = null;
    });
    for (const name of ["pointercancel", "lostpointercapture"]) this.canvas.addEventListener(name, () => { paint = press = null; });
    this.canvas.addEventListener("pointerleave", () => { this.tip.hidden = true; });
    this.canvas.addEventListener("keydown", (event) => this.key(event));
    this.canvas.addEventListener("focus", () => this.draw());
    this.canvas.addEventListener("blur", () => this.draw());
    this.strip.addEventListener("pointermove", (event) => this.hover(event, true));
    this.strip.addEventListener("pointerleave", () => { this.tip.hidden = true; });
  }

  hover(event, strip = false) {
    const { t, k } = this.at(event);
    const root = strip ? this.next?.[k] : this.heat[t]?.[k];
    const chance = root === undefined || root === null ? "" : ` · expected ${Math.round(100 * root * root)} %`;
    this.tip.textContent = `${pitchName(k + this.low)}${strip ? "" : ` · frame ${t + 1}`}${chance}`;
    const box = this.el.getBoundingClientRect();
    this.tip.hidden = event.pointerType === "touch";
    this.tip.style.left = `${Math.min(event.clientX - box.left + 14, box.width - 190)}px`;
    this.tip.style.top = `${Math.max(event.clientY - box.top - 34, 2)}px`;
  }

  key(event) {
    const steps = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, 1], ArrowDown: [0, -1], PageUp: [0, 12], PageDown: [0, -12] };
    const move = steps[event.key];
    if (move) {
      const [low, high] = this.compass();
      this.cursor = { t: Math.min(Math.max(this.cursor.t + move[0], 0), this.most - 1),
        k: Math.min(Math.max(this.cursor.k + move[1], low - this.low), high - this.low) };
    } else if (event.key === "Home") this.cursor.t = 0;
    else if (event.key === "End") this.cursor.t = Math.max(0, this.frames.length - 1);
    else if (this.onedit && (event.key === " " || event.key === "Enter")) this.put(this.cursor, !this.has(this.cursor));
    else if (event.key === "p" || event.key === "P") this.onplay();
    else return;
    event.preventDefault();
    this.show(this.cursor.t);
    this.said.textContent = `${pitchName(this.cursor.k + this.low)}, frame ${this.cursor.t + 1}, ${this.has(this.cursor) ? "on" : "off"}`;
    this.draw();
  }

  /** Scroll a frame into sight, to the given share of the width where it was not. */
  show(t, share = 0.5) {
    const left = t * this.cell;
    const view = this.scroller;
    if (left < view.scrollLeft || left + this.cell * 2 > view.scrollLeft + view.clientWidth) {
      this.spacer.style.width = `${this.columns() * this.cell}px`;
      view.scrollLeft = Math.max(0, left - view.clientWidth * share);
    }
  }
}

function surface(canvas, width, height) {
  const ratio = window.devicePixelRatio || 1;
  if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
    canvas.style.width = `${width}px`;
    canvas.style.height = `${height}px`;
  }
  const c = canvas.getContext("2d");
  c.setTransform(ratio, 0, 0, ratio, 0, 0);
  return c;
}

function line(c, x0, y0, x1, y1, style, width) {
  c.strokeStyle = style;
  c.lineWidth = width;
  c.beginPath();
  c.moveTo(x0, y0);
  c.lineTo(x1, y1);
  c.stroke();
}

function palette() {
  const names = { paper: "--roll-paper", black: "--roll-black", rule: "--roll-rule", bar: "--roll-bar", primer: "--roll-primer", given: "--roll-given",
    note: "--roll-note", heat: "--roll-heat", accent: "--accent", soft: "--soft", white: "--roll-white", key: "--roll-key" };
  return Object.fromEntries(Object.entries(names).map(([k, v]) => [k, colour(v)]));
}
