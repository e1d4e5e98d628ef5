"""How people's own files are read: options that `data import` and `train` share."""

from __future__ import annotations

import json
from dataclasses import dataclass


@dataclass(frozen=True)
class Reading:
    """How your own files are read."""

    steps_per_beat: int | None = None
    """MIDI, bach: grid steps per beat (quarter note); 4 if not given"""
    low: int | None = None
    """MIDI, bach: lowest MIDI number kept; 21 if not given"""
    high: int | None = None
    """MIDI, bach: highest MIDI number kept; 108 if not given"""
    drums: bool = False
    """MIDI: keep drum tracks as pitches instead of dropping them"""
    transpose: bool = False
    """music: move every song to C major or C minor"""
    minimum: int = 1
    """text: least count of a vocabulary entry; rarer ones become <unk>"""

    def overrides(self) -> list[tuple[str, str]]:
        """Those that were given, as a recipe's fields would be: names and values as text."""
        default = Reading()
        changed = {name: value for name, value in vars(self).items() if value != getattr(default, name)}
        return [(f"data.{name}", json.dumps(value)) for name, value in changed.items()]
