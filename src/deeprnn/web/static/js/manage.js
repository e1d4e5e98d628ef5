// Renaming, tagging and deleting a run, each behind a small dialog.

import { post } from "./api.js";
import { button } from "./controls.js";
import { h, toast } from "../parts/dom.js";

export function manage(store, run) {
  if (!store.editable) return null;
  return h("div", { class: "actions", role: "group", "aria-label": "Change this run" },
    button("Rename", () => rename(store, run), { class: "quiet" }),
    button("Tags", () => tag(store, run), { class: "quiet" }),
    button("Delete", () => remove(store, run), { class: "quiet" }));
}

/** A question with one way to agree; closed by whatever answers it. */
function ask(title, content, agree, act, css = "button primary") {
  const go = h("button", { class: css, text: agree });
  const dialog = h("dialog", { class: "ask", "aria-label": title },
    h("form", { method: "dialog", onsubmit: async (event) => {
      event.preventDefault();
      go.disabled = true;
      try {
        await act();
        dialog.close();
      } catch (error) { toast(error.message); }
      go.disabled = false;
    } },
      h("h2", { text: title }), content,
      h("div", { class: "ask-bar" }, button("Cancel", () => dialog.close()), go)));
  dialog.addEventListener("close", () => dialog.remove());
  document.body.append(dialog);
  dialog.showModal();
  dialog.querySelector("input")?.select();
}

function rename(store, run) {
  const input = h("input", { type: "text", value: run.name.split("/").pop(), required: true, maxlength: "80", "aria-label": "New name" });
  ask("Rename this run", h("label", { class: "field" }, h("span", { text: "Its folder gets this name, too" }), input), "Rename", async () => {
    const { id } = await post(`/api/runs/${run.id}/rename`, { name: input.value.trim() });
    await store.refresh();
    location.hash = `#/run/${id}`;
  });
}

function tag(store, run) {
  const input = h("input", { type: "text", value: (run.tags || []).join(", "), "aria-label": "Tags" });
  ask("Tags of this run", h("label", { class: "field" }, h("span", { text: "Separated by commas; they stay with its folder" }), input), "Save", async () => {
    const tags = [...new Set(input.value.split(",").map((word) => word.trim()).filter(Boolean))];
    await post(`/api/runs/${run.id}/tags`, { tags });
    await store.refresh();
  });
}

function remove(store, run) {
  const text = `The folder of ${run.name} is deleted from disk, with its parameters, checkpoints and curves. This cannot be undone.`;
  ask("Delete this run?", h("p", { text }), "Delete for good", async () => {
    await post(`/api/runs/${run.id}/delete`, { name: run.name });
    await store.refresh();
    location.hash = "#/";
    toast(`${run.name} is deleted.`);
  }, "button danger");
}
