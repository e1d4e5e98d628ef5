// The shell: addresses to views, the list of runs kept fresh.

import { get } from "./api.js";
import { h } from "../parts/dom.js";
import { homeView } from "./home.js";
import { runList } from "./list.js";
import { runView } from "./run.js";
import { compareView } from "./compare.js";

const main = document.getElementById("main");
const store = { runs: null, paper: null, error: null, listeners: new Set() };
let view = null;
let key = null;

store.find = (id) => store.runs?.find((run) => run.id === id);

async function refresh() {
  try {
    const found = await get("/api/runs");
    const text = JSON.stringify(found.runs);
    const changed = text !== store.text || store.error;
    store.text = text;
    store.runs = found.runs;
    store.folders = found.folders;
    store.editable = found.editable;
    store.error = null;
    if (changed) store.listeners.forEach((tell) => tell());
  } catch (error) {
    store.error = error.message;
    store.listeners.forEach((tell) => tell());
  }
}

store.refresh = refresh;

async function route() {
  const parts = location.hash.replace(/^#\/?/, "").split("/").filter(Boolean);
  const name = parts.join("/");
  if (view && key === name) return;
  key = name;
  view?.dispose?.();
  store.listeners.delete(view?.tell);
  document.documentElement.dataset.at = parts.length ? "detail" : "home";
  view = null;
  let made;
  try {
    if (parts[0] === "run" && parts[1]) made = await runView(store, parts[1]);
    else if (parts[0] === "compare" && parts[2]) made = await compareView(store, parts.slice(1));
    else made = homeView(store);
  } catch (error) {
    made = { el: failure(error.message) };
  }
  if (key !== name || view) { made.dispose?.(); return; }  // the reader went on meanwhile, or came back
  view = made;
  main.replaceChildren(view.el);
  document.title = view.title ? `${view.title} · deeprnn` : "deeprnn";
  if (view.tell) store.listeners.add(view.tell);
  window.scrollTo(0, 0);
  list.select(parts.slice(1));
}

function failure(message) {
  return h("div", { class: "empty" },
    h("h1", { text: "That did not work" }),
    h("p", { text: message }),
    h("p", {}, h("a", { href: "#/", text: "Back to the overview" })));
}

const list = runList(store);
document.getElementById("side").append(list.el);
store.listeners.add(list.tell);
window.addEventListener("hashchange", route);
document.querySelector(".skip").addEventListener("click", (event) => { event.preventDefault(); main.focus(); });

await refresh();
try { store.paper = await get("/api/paper"); } catch { store.paper = { cells: [], labels: [], names: {} }; }
await route();
setInterval(() => { if (!document.hidden) refresh(); }, 5000);
document.addEventListener("visibilitychange", () => { if (!document.hidden) refresh(); });
