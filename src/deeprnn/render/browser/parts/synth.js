// The synthesiser of deeprnn/render/synth.py on Web Audio: the same timbres, partials and envelopes, made key by key.

import { TIMBRES } from "./timbres.js";

const AHEAD = 0.25;  // seconds by which notes are handed over before they sound
const LONGEST = 8;  // seconds of a tone that are made
const MOST_TONES = 96;
const ROOM_SECONDS = 1.1;

/** Loudness of notes as a player would give it: see _velocities in notes.py. */
export function velocities(notes, frames, perBeat) {
  return notes.map(({ key, start }) => {
    const sounding = [...frames[start]];
    let loud = 66;
    if (key === Math.min(...sounding)) loud = 74;
    if (key === Math.max(...sounding)) loud = 88;
    if (start % perBeat === 0) loud += 5;
    return Math.round(loud + 4 * Math.sin((2 * Math.PI * start) / (16 * perBeat)));
  });
}

/** The sound of a key that is never let go, left and right: Σ Re(w·exp(s·n)) over the partials of two strings. */
export function tone(pitch, velocity, timbre, rate, samples) {
  const hertz = 440 * 2 ** ((pitch - 69) / 12);
  const loudness = (Math.floor(velocity / 8) * 8 + 4) / 127;
  const position = Math.min(0.35, Math.max(-0.35, (pitch - 62) / 60));
  return [-1, 1].map((side) => {
    const out = new Float32Array(samples);
    const strings = [[(side * timbre.detune) / 2, 0.7, 1.5], [-side * timbre.detune, 0.4, 0.6]];
    timbre.partials.forEach((amplitude, i) => {
      const n = i + 1;
      const bend = n ** (-0.9 * (1 - loudness) - Math.max(0, pitch - 60) / 40);
      const gain = amplitude * bend * loudness ** 1.6 * 2 ** ((60 - pitch) / 60) * (1 + side * position);
      const decay = timbre.decay ? Math.log(1000) * (1 + 0.35 * i) / (timbre.decay * 2 ** ((60 - pitch) / 14)) : 0;
      for (const [cents, share, fade] of strings) {
        const hz = hertz * n * Math.sqrt(1 + timbre.stretch * n * n) * 2 ** (cents / 1200);
        if (hz < 0.45 * rate) ring(out, (2 * Math.PI * hz) / rate, (fade * decay) / rate, share * gain, side * 0.4 * n - Math.PI / 2);
      }
    });
    return out;
  });
}

/** Add a damped oscillation; each sample is the one before it, turned and shrunk. */
function ring(out, omega, decay, weight, phase) {
  const turnRe = Math.exp(-decay) * Math.cos(omega);
  const turnIm = Math.exp(-decay) * Math.sin(omega);
  let re = weight * Math.cos(phase);
  let im = weight * Math.sin(phase);
  for (let n = 0; n < out.length; n++) {
    out[n] += re;
    const next = re * turnRe - im * turnIm;
    im = re * turnIm + im * turnRe;
    re = next;
  }
}

const FALL = Float32Array.from({ length: 33 }, (_, i) => Math.cos((Math.PI / 2) * (i / 32)) ** 4);

/** Decaying noise, darkened as walls do: the echo of a small hall. */
function hall(context) {
  const { sampleRate } = context;
  const length = Math.round(context.sampleRate * ROOM_SECONDS);
  const buffer = context.createBuffer(2, length, sampleRate);
  const width = Math.max(1, Math.floor(sampleRate / 6000));
  for (let side = 0; side < 2; side++) {
    const noise = Float32Array.from({ length }, (_, i) => (i / sampleRate > 0.012 ? (Math.random() + Math.random() + Math.random() - 1.5) * Math.exp((-6 * i) / length) : 0));
    const data = buffer.getChannelData(side);
    let sum = 0;
    let energy = 0;
    for (let i = 0; i < length; i++) {
      sum += noise[i] - (i >= width ? noise[i - width] : 0);
      data[i] = sum;
      energy += sum * sum;
    }
    for (let i = 0; i < length; i++) data[i] /= Math.sqrt(energy);
  }
  return buffer;
}

let shared = null;

/** One output for all players: dry and the room, loudness held by a compressor, as nobody knows the peak yet to come. */
function sound() {
  if (shared) return shared;
  const context = new AudioContext();
  const master = context.createGain();
  const press = context.createDynamicsCompressor();
  const room = context.createConvolver();
  const wet = context.createGain();
  master.gain.value = 0.5;
  room.normalize = false;
  room.buffer = hall(context);
  master.connect(press);
  master.connect(room).connect(wet).connect(press);
  press.connect(context.destination);
  shared = { context, master, wet, tones: new Map() };
  return shared;
}

/** A key's tone with its soft attack, made once and then longer where it has to be; half the rate holds its partials. */
function buffered({ context, tones }, name, pitch, velocity, seconds) {
  const key = `${name} ${pitch} ${Math.floor(velocity / 8)}`;
  const rate = Math.max(8000, context.sampleRate / 2);
  const samples = Math.ceil(Math.min(seconds, LONGEST) * rate);
  let buffer = tones.get(key);
  tones.delete(key);
  if (!buffer || buffer.length < samples) {
    buffer = context.createBuffer(2, samples, rate);
    const rise = Math.max(1, Math.round(TIMBRES[name].attack * rate));
    tone(pitch, velocity, TIMBRES[name], rate, samples).forEach((data, side) => {
      for (let i = 0; i < Math.min(rise, samples); i++) data[i] *= Math.sin((Math.PI / 2) * (i / rise)) ** 2;
      buffer.copyToChannel(data, side);
    });
  }
  tones.set(key, buffer);  // the last used comes last
  if (tones.size > MOST_TONES) tones.delete(tones.keys().next().value);
  return buffer;
}

/** Sound a note at a time of the context's clock; without a length it is held until `release`. */
function strike(audio, name, pitch, velocity, start, seconds = LONGEST) {
  const { context, master } = audio;
  const timbre = TIMBRES[name];
  audio.wet.gain.value = timbre.room;
  const held = Math.min(seconds, LONGEST - timbre.release);
  const source = context.createBufferSource();
  const gain = context.createGain();
  const off = context.createGain();
  source.buffer = buffered(audio, name, pitch, velocity, held + timbre.release);
  const begin = Math.max(start, context.currentTime);  // making the tone may have taken longer than there was time
  gain.gain.setValueCurveAtTime(FALL, begin + held, timbre.release);
  source.connect(gain).connect(off).connect(master);
  source.start(begin);
  source.stop(begin + held + timbre.release);
  return { source, off };
}

/** Let a note go before its time. */
function release({ source, off }) {
  const time = shared.context.currentTime;
  off.gain.setTargetAtTime(0, time, 0.04);
  source.stop(time + 0.3);
}

/** A key pressed by hand; gives the function that lets it go. */
export function press(pitch, velocity = 80, timbre = "piano") {
  const audio = sound();
  audio.context.resume();
  const note = strike(audio, timbre, pitch, velocity, audio.context.currentTime);
  return () => release(note);
}

/** Plays a roll from a frame on; tells the frame it is at, and when it is over. */
export class Player {
  constructor() {
    this.playing = false;
    this.turn = 0;
    this.voices = [];
  }

  async play(roll, { tempo, timbre = "piano", from = 0, onframe, onend }) {
    this.stop();
    const turn = this.turn;
    const audio = sound();
    await Promise.race([audio.context.resume(), new Promise((done) => setTimeout(done, 400))]);
    if (turn !== this.turn) return;  // stopped or begun anew meanwhile
    // Where there is no sound device the clock of the audio stands still: then the page's own has to do.
    const silent = audio.context.state !== "running";
    const now = () => (silent ? performance.now() / 1000 : audio.context.currentTime);
    const frame = 60 / tempo / roll.perBeat;
    const start = now() + 0.08 - from * frame;
    const notes = roll.notes();
    const loud = velocities(notes, roll.frames, roll.perBeat);
    const coming = notes.map((note, i) => ({ ...note, velocity: loud[i] })).filter((note) => note.end > from).sort((a, b) => a.start - b.start);
    const length = roll.frames.length;
    let next = 0;
    this.playing = true;
    const look = () => {
      const time = now();
      while (next < coming.length && start + coming[next].start * frame < time + AHEAD) {
        const note = coming[next++];
        const at = Math.max(start + note.start * frame, time);
        if (!silent) this.voices.push(strike(audio, timbre, note.key + roll.low, note.velocity, at, (note.end - Math.max(note.start, from)) * frame));
      }
      const at = (time - start) / frame;
      if (at >= length) { this.stop(); onend?.(); return; }
      onframe?.(Math.max(at, from));
    };
    this.timer = setInterval(look, 25);
    look();
  }

  stop() {
    this.turn++;
    clearInterval(this.timer);
    this.playing = false;
    this.voices.forEach(release);
    this.voices = [];
  }
}
