// The playground of a music run, or of two: draw, drop, continue, play, take home.

import { file, lines, post, roots, upload } from "./api.js";
import { button, seedField, slider, whole } from "./controls.js";
import { h, save, toast, number } from "./dom.js";
import { onGrid, PRIMERS } from "./primers.js";
import { Roll } from "./roll.js";
import { Player } from "./synth.js";

export function musicBench(runs) {
  const two = runs.length > 1;
  const player = new Player();
  const voices = runs.map((run, i) => voice(run, i));
  let job = null;
  let mirroring = false;

  const temperature = slider("Temperature", { min: 0.2, max: 2, step: 0.05, value: 1, show: (v) => v.toFixed(2), id: "temperature" });
  const tempo = slider("Tempo", { min: 40, max: 240, step: 2, value: 100, show: (v) => `${v} bpm`, id: "tempo" });
  const length = whole("Frames", { min: 1, max: 1024, value: Math.min(256, 48 * voices[0].roll.perBeat), id: "length" });
  const seed = seedField();
  const go = button(two ? "Continue both" : "Continue", proceed, { class: "button primary", id: "continue" });
  const expect = h("input", { type: "checkbox", checked: true, id: "expect", onchange: () => voices.forEach((v) => { v.roll.expect = expect.checked; v.roll.draw(); }) });
  const pick = h("input", { type: "file", accept: ".mid,.midi,audio/midi", class: "visually-hidden", id: "midi", onchange: () => { if (pick.files[0]) drop(pick.files[0]); pick.value = ""; } });
  const starts = h("select", { id: "start", "aria-label": "Begin with", onchange: () => { begin(PRIMERS[Number(starts.value)][1]); starts.value = ""; } },
    h("option", { value: "", text: "Begin with…" }), PRIMERS.map(([name], i) => h("option", { value: String(i), text: name })));
  const status = h("p", { class: "bench-status soft", role: "status" });

  function voice(run, i) {
    const roll = new Roll(run.grid, run.keys, {
      label: two ? `Piano roll ${"AB"[i]}` : "Piano roll",
      onedit: (t, k, on) => edited(i, t, k, on),
      onplay: () => toggle(i),
    });
    const play = button("▶ Play", () => toggle(i), { class: "button play", "aria-label": two ? `Play ${"AB"[i]}` : "Play" });
    const mean = h("span", { class: "soft surprise" });
    return { run, roll, play, mean, ask: null };
  }

  /** A note of the primer belongs to both. */
  function edited(i, t, k, on) {
    stopPlaying();
    if (two && !mirroring) {
      mirroring = true;
      voices.forEach((v, j) => { if (j !== i && v.roll.has({ t, k }) !== on && t <= voices[i].roll.primer) v.roll.put({ t, k }, on); });
      mirroring = false;
    }
    foresee(voices[i]);
  }

  /** Ask what the model expects, a moment after the last change. */
  function foresee(v) {
    clearTimeout(v.wait);
    v.wait = setTimeout(async () => {
      v.ask?.abort();
      v.ask = new AbortController();
      try {
        const found = await post(`/api/runs/${v.run.id}/predict`, { frames: v.roll.lists() }, v.ask.signal);
        const all = roots(found.heat);
        v.roll.heat = v.roll.frames.map((_, t) => all.subarray(t * v.roll.keys, (t + 1) * v.roll.keys));
        v.roll.next = roots(found.next);
        v.mean.textContent = found.mean === null ? "" : `surprise ${number(found.mean, 2)} nats per frame`;
        v.roll.draw();
      } catch (error) {
        if (error.name !== "AbortError") toast(error.message);
      }
    }, 120);
  }

  function begin(chords) { put(onGrid(chords, voices[0].roll)); }

  function put(frames) {
    stop();
    for (const v of voices) {
      v.roll.sampled = false;
      v.roll.set(frames);
      v.roll.scroller.scrollLeft = 0;
      foresee(v);
    }
  }

  async function drop(blob) {
    try {
      const found = await upload(`/api/runs/${voices[0].run.id}/primer`, blob);
      put(found.frames);
      status.textContent = `${blob.name || "MIDI"}: ${found.frames.length} frames${found.cut ? ", cut to fit" : ""}`;
    } catch (error) { toast(error.message); }
  }

  async function proceed() {
    if (job) { stop(); return; }
    stopPlaying();
    job = new AbortController();
    go.textContent = "Stop";
    status.textContent = "sampling…";
    const began = performance.now();
    try {
      if (two) voices.forEach((v) => v.roll.set(v.roll.lists().slice(0, v.roll.primer)));  // both from the same beginning
      const made = await Promise.all(voices.map((v) => sample(v, job.signal)));
      status.textContent = `${made.reduce((a, b) => a + b, 0)} frames in ${((performance.now() - began) / 1000).toFixed(1)} s`;
    } catch (error) {
      if (error.name === "AbortError") status.textContent = "stopped";
      else { status.textContent = ""; toast(error.message); }
      job.abort();  // the other of two goes no further alone
    }
    job = null;
    go.textContent = two ? "Continue both" : "Continue";
    voices.forEach(foresee);
  }

  async function sample(v, signal) {
    const { roll, run } = v;
    v.ask?.abort();
    clearTimeout(v.wait);
    v.mean.textContent = "";
    if (!roll.sampled) roll.primer = roll.frames.length;
    roll.sampled = true;
    let made = 0;
    const request = { frames: roll.lists(), length: length.value, temperature: temperature.value, seed: seed.value };
    for await (const item of lines(`/api/runs/${run.id}/continue`, request, signal)) {
      if (item.frames) {
        roll.append(item.frames, roots(item.heat));
        made += item.frames.length;
        roll.show(roll.frames.length, 0.9);
      }
    }
    return made;
  }

  function toggle(i) {
    const v = voices[i];
    const was = v.playing;
    stopPlaying();
    if (was) return;
    if (!v.roll.frames.length) { toast("There is nothing to play yet: place some notes or press Continue."); return; }
    v.playing = true;
    v.play.textContent = "■ Stop";
    v.play.setAttribute("aria-label", two ? `Stop ${"AB"[i]}` : "Stop");
    const from = document.activeElement === v.roll.canvas ? Math.min(v.roll.cursor.t, v.roll.frames.length - 1) : 0;
    player.play(v.roll, {
      tempo: tempo.value,
      from,
      onframe: (at) => { v.roll.playhead = at; v.roll.show(at, 0.1); v.roll.draw(); },
      onend: stopPlaying,
    });
  }

  function stopPlaying() {
    player.stop();
    voices.forEach((v, i) => {
      v.playing = false;
      v.play.textContent = "▶ Play";
      v.play.setAttribute("aria-label", two ? `Play ${"AB"[i]}` : "Play");
      if (v.roll.playhead !== null) { v.roll.playhead = null; v.roll.draw(); }
    });
  }

  function stop() {
    job?.abort();
    stopPlaying();
  }

  async function take(v, kind) {
    try {
      const blob = await file(`/api/runs/${v.run.id}/${kind}`, { frames: v.roll.lists(), tempo: tempo.value });
      save(blob, `${v.run.name.replaceAll("/", "-")}.${kind === "midi" ? "mid" : "wav"}`);
    } catch (error) { toast(error.message); }
  }

  function undo() {
    stop();
    voices.forEach((v) => { v.roll.sampled = false; v.roll.set(v.roll.lists().slice(0, v.roll.primer)); foresee(v); });
  }

  const stage = voices.map((v, i) => h("div", { class: "voice" },
    h("div", { class: "voice-head" }, two ? h("span", { class: `letter m${i}`, text: "AB"[i] }) : null, two ? h("b", { text: v.run.label || v.run.name }) : null,
      v.play, button("MIDI", () => take(v, "midi"), { "aria-label": "Download MIDI", title: "Download MIDI" }), button("WAV", () => take(v, "wav"), { "aria-label": "Download WAV", title: "Download WAV" }), v.mean,
      h("span", { class: "next-label soft", text: "next ↓" })),
    v.roll.el));

  const el = h("section", { class: "panel bench", "aria-label": "Playground",
    ondragover: (event) => { event.preventDefault(); el.classList.add("dropping"); },
    ondragleave: () => el.classList.remove("dropping"),
    ondrop: (event) => { event.preventDefault(); el.classList.remove("dropping"); if (event.dataTransfer.files[0]) drop(event.dataTransfer.files[0]); } },
    h("div", { class: "bench-bar" }, go,
      button("Start over", undo, { title: "Remove what was sampled" }), button("Clear", () => put([])),
      starts, h("label", { class: "button file", for: "midi", text: "Open MIDI…" }), pick),
    stage,
    h("div", { class: "bench-bar knobs" }, temperature.el, tempo.el, length.el, seed.el,
      h("label", { class: "field check" }, expect, h("span", { text: "Show what it expected" })), status));

  begin(PRIMERS[1][1]);
  return { el, dispose() { stop(); voices.forEach((v) => { v.ask?.abort(); clearTimeout(v.wait); v.roll.dispose(); }); } };
}
