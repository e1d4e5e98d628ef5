// Elements from plain calls; text is always text, never markup.

export function h(tag, props = {}, ...children) {
  const el = document.createElement(tag);
  set(el, props);
  el.append(...children.flat().filter((c) => c !== null && c !== undefined && c !== false));
  return el;
}

/** Replace what an element holds; nothing stands for nothing, not for the word null. */
export function fill(el, ...children) {
  el.replaceChildren(...children.flat().filter((c) => c !== null && c !== undefined && c !== false));
}

const SVG = "http://www.w3.org/2000/svg";

export function s(tag, props = {}, ...children) {
  const el = document.createElementNS(SVG, tag);
  set(el, props);
  el.append(...children.flat().filter((c) => c !== null && c !== undefined && c !== false));
  return el;
}

function set(el, props) {
  for (const [name, value] of Object.entries(props)) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "text") el.textContent = value;
    else if (name.startsWith("on")) el.addEventListener(name.slice(2), value);
    else if (name === "data") Object.assign(el.dataset, value);
    else if (name === "css") for (const [k, v] of Object.entries(value)) el.style.setProperty(k, v);
    else if (name === "value") el.value = value;
    else el.setAttribute(name, value === true ? "" : value);
  }
}

/** Draw anew, and give the focus back to the link that had it. */
export function keepFocus(el, draw) {
  const at = el.contains(document.activeElement) ? document.activeElement.getAttribute("href") : null;
  draw();
  if (at) [...el.querySelectorAll("a[href]")].find((link) => link.getAttribute("href") === at)?.focus({ preventScroll: true });
}

export function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

export function toast(message) {
  const box = document.getElementById("toasts");
  if ([...box.children].some((item) => item.firstChild.textContent === message)) return;
  const item = h("div", { class: "toast" },
    h("span", { text: message }),
    h("button", { type: "button", class: "quiet", "aria-label": "Dismiss", text: "×", onclick: () => item.remove() }));
  box.append(item);
  while (box.children.length > 3) box.firstChild.remove();
  setTimeout(() => item.remove(), 9000);
}

export function save(blob, name) {
  const url = URL.createObjectURL(blob);
  const link = h("a", { href: url, download: name });
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(url), 10000);
}

export const number = (value, digits = 3) =>
  value === null || value === undefined ? "–" : Math.abs(value) >= 100 ? value.toFixed(1) : value.toFixed(digits);

export function count(value) {
  if (value === null || value === undefined) return "–";
  if (value < 10000) return String(value);
  return value < 2000000 ? `${Math.floor(value / 1000)}K` : `${(value / 1e6).toFixed(2)}M`;
}

export function ago(stamp) {
  const then = Date.parse(stamp);
  if (!Number.isFinite(then)) return "";
  const seconds = Math.max(0, (Date.now() - then) / 1000);
  for (const [unit, size] of [["year", 31557600], ["month", 2629800], ["day", 86400], ["hour", 3600], ["minute", 60]]) {
    const n = Math.floor(seconds / size);
    if (n >= 1) return `${n} ${unit}${n > 1 ? "s" : ""} ago`;
  }
  return "just now";
}

/** Names of things that stand side by side, and so how many may. */
export const LETTERS = "ABCD";

export const UNITS = { "nats/frame": "nats per frame", bpc: "bits per character", perplexity: "perplexity" };
