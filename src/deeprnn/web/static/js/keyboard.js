// A MIDI keyboard through the browser: what is played sounds, and comes as chords with the time they were held.

import { press } from "../parts/synth.js";

const TOGETHER = 0.06;  // seconds within which keys count as struck, or let go, at once

export const canListen = () => typeof navigator.requestMIDIAccess === "function";

export class Keyboard {
  constructor(onchord) {
    this.onchord = onchord;
    this.held = new Map();  // pitch to what lets it go
    this.since = 0;
    this.told = true;  // whether what sounds now has been told already
  }

  /** Listen to every input there is and comes; how many there are. */
  async listen(onchange = () => {}) {
    this.access = await navigator.requestMIDIAccess();
    const attach = () => {
      for (const input of this.access.inputs.values()) input.onmidimessage = (event) => this.hear(event.data);
      onchange(this.access.inputs.size);
    };
    this.access.onstatechange = attach;
    attach();
  }

  close() {
    if (this.access) {
      this.access.onstatechange = null;
      for (const input of this.access.inputs.values()) input.onmidimessage = null;
    }
    for (const release of this.held.values()) release();
    this.held.clear();
    this.access = null;
  }

  hear([status, pitch, velocity]) {
    const kind = status & 0xf0;
    if (kind === 0x90 && velocity > 0) this.down(pitch, velocity);
    else if (kind === 0x80 || kind === 0x90) this.up(pitch);
  }

  down(pitch, velocity) {
    const now = performance.now() / 1000;
    if (this.held.size && now - this.since > TOGETHER) this.tell(now);
    if (!this.held.size || now - this.since > TOGETHER) this.since = now;
    this.held.get(pitch)?.();
    this.held.set(pitch, press(pitch, velocity));
    this.told = false;
  }

  up(pitch) {
    if (!this.held.has(pitch)) return;
    const now = performance.now() / 1000;
    // Fingers leave a chord one after another: what is left of it for a moment is no chord of its own.
    if (now - this.since > TOGETHER || (!this.told && this.held.size === 1)) this.tell(now);
    this.held.get(pitch)();
    this.held.delete(pitch);
  }

  tell(now) {
    this.onchord([...this.held.keys()], now - this.since);
    this.since = now;
    this.told = true;
  }
}
