// The playground of a music run, or of several: draw, drop, continue, play, take home.

import { file, lines, post, upload } from "./api.js";
import { button, seedField, slider, stoppable, whole } from "./controls.js";
import { h, save, toast, number, LETTERS } from "../parts/dom.js";
import { cells, regrid, sameGrid } from "./grid.js";
import { canListen, Keyboard } from "./keyboard.js";
import { CHORDS, PRIMERS } from "./primers.js";
import { Roll, roots } from "../parts/roll.js";
import { Player } from "../parts/synth.js";

/** What the colours mean where the notes of a chord depend on each other. */
const GLOW_OF_CHORDS = "The glow is each note's probability given the notes below it in the same chord, as chords are drawn; the strip under “next” is the mean over 64 drawn chords.";

export function musicBench(runs) {
  const several = runs.length > 1;
  const goOn = several ? `Continue ${runs.length === 2 ? "both" : "all"}` : "Continue";
  const player = new Player();
  const voices = runs.map((run, i) => voice(run, i));
  if (several) voices.forEach((v) => { v.roll.beside = voices.filter((o) => o !== v).map((o) => o.roll); });
  const alike = voices.every((v) => sameGrid(v.roll, voices[0].roll));
  let job = null;
  let mirroring = false;

  const temperature = slider("Temperature", { min: 0.2, max: 2, step: 0.05, value: 1, show: (v) => v.toFixed(2), id: "temperature" });
  const tempo = slider("Tempo", { min: 40, max: 240, step: 2, value: 100, show: (v) => `${v} bpm`, id: "tempo" });
  // Frames of two grids last differently: then beats are asked for.
  const perUnit = (v) => (alike ? 1 : v.roll.perBeat);
  const most = Math.floor(1024 / Math.max(...voices.map(perUnit)));
  const length = whole(alike ? "Frames" : "Beats", { min: 1, max: most, value: alike ? Math.min(256, 48 * voices[0].roll.perBeat) : Math.min(48, most), id: "length" });
  const seed = seedField();
  const go = button(goOn, sampleOrStop, { class: "button primary", id: "continue" });
  const expect = h("input", { type: "checkbox", checked: true, id: "expect", onchange: () => voices.forEach((v) => { v.roll.expect = expect.checked; v.roll.draw(); }) });
  const pick = h("input", { type: "file", accept: ".mid,.midi,audio/midi", class: "visually-hidden", id: "midi", onchange: () => { if (pick.files[0]) drop(pick.files[0]); pick.value = ""; } });
  const openings = runs.flatMap((run, i) => (run.openings || []).map((o) => ({ ...o, i })));
  const option = (value, text) => h("option", { value, text });
  const starts = h("select", { id: "start", "aria-label": "Begin with", onchange: () => { beginWith(starts.value); starts.value = ""; } },
    h("option", { value: "", text: "Begin with…" }),
    runs.map((run, i) => (run.openings?.length ? h("optgroup", { label: several ? `From the data of ${LETTERS[i]}, not trained on` : "From its data, not trained on" },
      openings.map((o, n) => (o.i === i ? option(`own ${n}`, o.name) : null)).filter(Boolean)) : null)),
    h("optgroup", { label: "Anything" }, PRIMERS.map(([name], i) => option(`any ${i}`, name))));
  const keyboard = new Keyboard(played);
  const listen = canListen() ? button("MIDI keyboard", toggleKeyboard, { id: "keyboard", "aria-pressed": "false", title: "Play a beginning on a MIDI keyboard" }) : null;
  const status = h("p", { class: "bench-status soft", role: "status" });

  function voice(run, i) {
    const roll = new Roll(run.grid, run.keys, {
      label: several ? `Piano roll ${LETTERS[i]}` : "Piano roll",
      onedit: (t, k, on) => edited(i, t, k, on),
      onplay: () => toggle(i),
    });
    const play = button("▶ Play", () => toggle(i), { class: "button play", "aria-label": several ? `Play ${LETTERS[i]}` : "Play" });
    const mean = h("span", { class: "soft surprise" });
    return { run, roll, play, mean, ask: null };
  }

  /** A note of the primer belongs to all, on whatever grids they are. */
  function edited(i, t, k, on) {
    stopPlaying();
    const { roll } = voices[i];
    if (several && !mirroring && t <= roll.primer) {
      mirroring = true;
      for (const v of voices) {
        if (v.roll === roll) continue;
        for (const cell of cells({ t, k }, roll, v.roll)) if (v.roll.has(cell) !== on) v.roll.put(cell, on);
      }
      mirroring = false;
    }
    predict(voices[i]);
  }

  /** Ask what the model expects, a moment after the last change. */
  function predict(v) {
    clearTimeout(v.wait);
    v.wait = setTimeout(async () => {
      v.ask?.abort();
      v.ask = new AbortController();
      try {
        const prediction = await post(`/api/runs/${v.run.id}/predict`, { frames: v.roll.lists() }, v.ask.signal);
        const all = roots(prediction.heat);
        v.roll.heat = v.roll.frames.map((_, t) => all.subarray(t * v.roll.keys, (t + 1) * v.roll.keys));
        v.roll.next = roots(prediction.next);
        v.mean.textContent = prediction.mean === null ? "" : `surprise ${number(prediction.mean, 2)} nats per frame`;
        v.roll.draw();
      } catch (error) {
        if (error.name !== "AbortError") toast(error.message);
      }
    }, 120);
  }

  function beginWith(name) {
    const [kind, n] = name.split(" ");
    if (kind === "any") put(PRIMERS[n][1], CHORDS);
    else put(openings[n].frames, voices[openings[n].i].roll);
  }

  /** Show a beginning that lies on some grid, on each one's own. */
  function put(frames, grid) {
    stop();
    for (const v of voices) show(v, regrid(frames, grid, v.roll));
  }

  function show(v, frames) {
    v.roll.sampled = false;
    v.roll.set(frames);
    v.roll.scroller.scrollLeft = 0;
    predict(v);
  }

  /** A file is read on each one's own grid: nothing is rounded twice. */
  async function drop(blob) {
    try {
      const primers = await Promise.all((alike ? voices.slice(0, 1) : voices).map((v) => upload(`/api/runs/${v.run.id}/primer`, blob)));
      stop();
      voices.forEach((v, i) => show(v, (primers[i] || primers[0]).frames));
      status.textContent = `${blob.name || "MIDI"}: ${primers[0].frames.length} frames${primers.some((f) => f.cut) ? ", cut to fit" : ""}`;
    } catch (error) { toast(error.message); }
  }

  async function toggleKeyboard() {
    if (keyboard.access) { closeKeyboard(); return; }
    try {
      await keyboard.listen((inputs) => { status.textContent = inputs ? "listening: play a beginning" : "no MIDI keyboard is there: plug one in"; });
      listen.setAttribute("aria-pressed", "true");
    } catch { toast("The browser may not use MIDI keyboards here: allow it in the site's settings."); }
  }

  function closeKeyboard() {
    keyboard.close();
    listen?.setAttribute("aria-pressed", "false");
    status.textContent = "";
  }

  /** A chord from the keyboard goes on with the beginning, for as long as it was held at this tempo. */
  function played(pitches, seconds) {
    stopPlaying();
    for (const v of voices) {
      const { roll } = v;
      const keys = pitches.map((p) => p - roll.low).filter((k) => k >= 0 && k < roll.keys);
      const count = Math.min(Math.max(1, Math.round((seconds * tempo.value * roll.perBeat) / 60)), 8 * roll.perBeat);
      roll.sampled = false;
      roll.set([...roll.lists().slice(0, roll.primer), ...Array.from({ length: keys.length ? count : 0 }, () => keys)]);
      roll.show(roll.frames.length, 0.9);
      predict(v);
    }
  }

  async function sampleOrStop() {
    if (job) { stop(); return; }
    stopPlaying();
    job = new AbortController();
    await stoppable({ button: go, status, label: "sampling…" }, job, async (signal) => {
      if (several) voices.forEach((v) => v.roll.set(v.roll.lists().slice(0, v.roll.primer)));  // all from the same beginning
      const made = await Promise.all(voices.map((v) => sample(v, signal)));
      return `${made.reduce((a, b) => a + b, 0)} frames`;
    });
    job = null;
    voices.forEach(predict);
  }

  async function sample(v, signal) {
    const { roll, run } = v;
    v.ask?.abort();
    clearTimeout(v.wait);
    v.mean.textContent = "";
    if (!roll.sampled) roll.primer = roll.frames.length;
    roll.sampled = true;
    let made = 0;
    const request = { frames: roll.lists(), length: length.value * perUnit(v), temperature: temperature.value, seed: seed.value };
    for await (const item of lines(`/api/runs/${run.id}/continue`, request, signal)) {
      if (item.frames) {
        roll.append(item.frames, roots(item.heat));
        made += item.frames.length;
        roll.show(roll.frames.length, 0.9);
      }
    }
    return made;
  }

  /** Play one, or stop it; while another plays go on with this one where that one is. */
  function toggle(i) {
    const v = voices[i];
    const was = v.playing;
    const other = voices.find((o) => o.playing && o !== v)?.roll;
    const beat = other ? (other.playhead ?? 0) / other.perBeat : null;
    stopPlaying();
    if (was) return;
    if (!v.roll.frames.length) { toast("There is nothing to play yet: place some notes or press Continue."); return; }
    v.playing = true;
    v.play.textContent = "■ Stop";
    v.play.setAttribute("aria-label", several ? `Stop ${LETTERS[i]}` : "Stop");
    const here = beat === null ? -1 : Math.floor(beat * v.roll.perBeat);
    const chosen = document.activeElement === v.roll.canvas ? Math.min(v.roll.cursor.t, v.roll.frames.length - 1) : 0;
    const from = here >= 0 && here < v.roll.frames.length ? here : chosen;
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
      v.play.setAttribute("aria-label", several ? `Play ${LETTERS[i]}` : "Play");
      if (v.roll.playhead !== null) { v.roll.playhead = null; v.roll.draw(); }
    });
  }

  function stop() {
    job?.abort();
    stopPlaying();
  }

  async function download(v, kind) {
    try {
      const blob = await file(`/api/runs/${v.run.id}/${kind}`, { frames: v.roll.lists(), tempo: tempo.value });
      save(blob, `${v.run.name.replaceAll("/", "-")}.${kind === "midi" ? "mid" : "wav"}`);
    } catch (error) { toast(error.message); }
  }

  function startOver() {
    stop();
    voices.forEach((v) => { v.roll.sampled = false; v.roll.set(v.roll.lists().slice(0, v.roll.primer)); predict(v); });
  }

  const stage = voices.map((v, i) => h("div", { class: "voice" },
    h("div", { class: "voice-head" }, several ? h("span", { class: `letter m${i}`, text: LETTERS[i] }) : null, several ? h("b", { text: v.run.label || v.run.name }) : null,
      v.play, button("MIDI", () => download(v, "midi"), { "aria-label": "Download MIDI", title: "Download MIDI" }), button("WAV", () => download(v, "wav"), { "aria-label": "Download WAV", title: "Download WAV" }), v.mean,
      h("span", { class: "next-label soft", text: "next ↓" })),
    v.roll.el,
    v.run.chords ? h("p", { class: "soft chords-legend", text: GLOW_OF_CHORDS }) : null));

  const el = h("section", { class: "panel bench", "aria-label": "Playground",
    ondragover: (event) => { event.preventDefault(); el.classList.add("dropping"); },
    ondragleave: () => el.classList.remove("dropping"),
    ondrop: (event) => { event.preventDefault(); el.classList.remove("dropping"); if (event.dataTransfer.files[0]) drop(event.dataTransfer.files[0]); } },
    h("div", { class: "bench-bar" }, go,
      button("Start over", startOver, { title: "Remove what was sampled" }), button("Clear", () => put([], CHORDS)),
      starts, h("label", { class: "button file", for: "midi", text: "Open MIDI…" }), pick, listen),
    stage,
    h("div", { class: "bench-bar knobs" }, temperature.el, tempo.el, length.el, seed.el,
      h("label", { class: "field check" }, expect, h("span", { text: "Show what it expected" })), status));

  beginWith(openings.length ? "own 0" : "any 1");
  return { el, dispose() { stop(); keyboard.close(); voices.forEach((v) => { v.ask?.abort(); clearTimeout(v.wait); v.roll.dispose(); }); } };
}
