// A small synthesiser on Web Audio: struck partials, a soft room, notes handed over just ahead of time.

const AHEAD = 0.25;
const PARTIALS = [0, 1, 0.5, 0.28, 0.17, 0.1, 0.06, 0.04, 0.02];

let shared = null;

function sound() {
  if (shared) return shared;
  const context = new AudioContext();
  const master = context.createGain();
  const press = context.createDynamicsCompressor();
  const room = context.createConvolver();
  const wet = context.createGain();
  master.gain.value = 0.5;
  wet.gain.value = 0.22;
  room.buffer = hall(context);
  master.connect(press);
  master.connect(room).connect(wet).connect(press);
  press.connect(context.destination);
  const real = Float32Array.from(PARTIALS, () => 0);
  const wave = context.createPeriodicWave(real, Float32Array.from(PARTIALS));
  shared = { context, master, wave };
  return shared;
}

/** Decaying noise: the echo of a small hall. */
function hall(context) {
  const length = Math.round(context.sampleRate * 1.3);
  const buffer = context.createBuffer(2, length, context.sampleRate);
  for (let side = 0; side < 2; side++) {
    const data = buffer.getChannelData(side);
    for (let i = 0; i < length; i++) data[i] = (Math.random() * 2 - 1) * Math.exp((-6 * i) / length);
  }
  return buffer;
}

function strike({ context, master, wave }, midi, start, seconds, loud) {
  const tone = context.createOscillator();
  const gain = context.createGain();
  const dull = context.createBiquadFilter();
  const hertz = 440 * 2 ** ((midi - 69) / 12);
  tone.setPeriodicWave(wave);
  tone.frequency.value = hertz;
  dull.type = "lowpass";
  dull.frequency.setValueAtTime(Math.min(hertz * 9, 9000), start);
  dull.frequency.setTargetAtTime(Math.min(hertz * 3, 4000), start, 0.4);
  const peak = loud * 0.2 * 2 ** ((60 - midi) / 48);
  gain.gain.setValueAtTime(0.0001, start);
  gain.gain.linearRampToValueAtTime(peak, start + 0.008);
  gain.gain.setTargetAtTime(peak * 0.25, start + 0.01, 1.1);
  gain.gain.setTargetAtTime(0.0001, start + seconds, 0.07);
  tone.connect(dull).connect(gain).connect(master);
  tone.start(start);
  tone.stop(start + seconds + 0.6);
  return { tone, gain };
}

/** Plays a roll from a frame on; tells the frame it is at, and when it is over. */
export class Player {
  constructor() {
    this.playing = false;
    this.turn = 0;
  }

  async play(roll, { tempo, from = 0, onframe, onend }) {
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
    const notes = roll.notes().filter((note) => note.end > from).sort((a, b) => a.start - b.start);
    const top = new Map();
    for (const note of notes) top.set(note.start, Math.max(top.get(note.start) ?? 0, note.key));
    const length = roll.frames.length;
    let next = 0;
    this.playing = true;
    this.voices = [];
    const look = () => {
      const time = now();
      while (next < notes.length && start + notes[next].start * frame < time + AHEAD) {
        const note = notes[next++];
        const at = Math.max(start + note.start * frame, time);
        const loud = note.key === top.get(note.start) ? 1 : 0.72;
        if (!silent) this.voices.push(strike(audio, note.key + roll.low, at, (note.end - Math.max(note.start, from)) * frame, loud));
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
    for (const { tone, gain } of this.voices || []) {
      const time = shared.context.currentTime;
      gain.gain.cancelScheduledValues(time);
      gain.gain.setTargetAtTime(0.0001, time, 0.03);
      try { tone.stop(time + 0.2); } catch { /* it had ended by itself */ }
    }
    this.voices = [];
  }
}
