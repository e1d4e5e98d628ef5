"""From piano rolls to things one can hear and see: MIDI, WAV, pictures."""

from __future__ import annotations

from deeprnn.render.midi import midi_bytes
from deeprnn.render.notes import Note, held_notes
from deeprnn.render.synth import synthesise, wav_bytes

__all__ = ["Note", "held_notes", "midi_bytes", "synthesise", "wav_bytes"]
