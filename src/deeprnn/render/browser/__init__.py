"""Chart, piano roll and synthesiser for browsers: one set of JavaScript modules for the page and the HTML report.

`parts/` holds the modules and their style. The page serves them as files; a report holds them as one script.
"""

from __future__ import annotations

import base64
import dataclasses
import json
import re
from pathlib import Path

import numpy as np

from deeprnn.render.synth import TIMBRES

PARTS = Path(__file__).parent / "parts"
STYLES = ("colours.css", "parts.css")

_IMPORT = re.compile(r'^import (\{[^}]*\}) from "[./a-z]*?(\w+)\.js";\n', re.MULTILINE)
_EXPORT = re.compile(r"^export ((?:async )?(?:function\*?|class|const|let) (\w+))", re.MULTILINE)


def timbres_module() -> str:
    """The synthesiser's timbres as a module, from the table that makes WAV files."""
    table = {name: dataclasses.asdict(timbre) for name, timbre in TIMBRES.items()}
    return f"export const TIMBRES = {json.dumps(table)};\n"


def bundle(main: str) -> str:
    """A script that is whole: the module `main`, given as text, after all parts that it imports.

    Each module becomes a function that returns what it exports, so that their names stay apart. This knows
    the forms of import and export that our modules use, and no others.
    """
    texts: dict[str, str] = {}

    def gather(text: str) -> None:
        for _, name in _IMPORT.findall(text):
            if name not in texts:
                part = timbres_module() if name == "timbres" else (PARTS / f"{name}.js").read_text("utf-8")
                gather(part)
                texts[name] = part

    gather(main)
    return "".join([*(_module(name, text) for name, text in texts.items()), _linked(main)])


def _module(name: str, text: str) -> str:
    exported = [match[1] for match in _EXPORT.findall(text)]
    body = _EXPORT.sub(r"\1", _linked(text))
    return f"const ${name} = (() => {{\n{body}return {{ {', '.join(exported)} }};\n}})();\n"


def _linked(text: str) -> str:
    return _IMPORT.sub(r"const \1 = $\2;\n", text)


def encode_probabilities(probabilities: np.ndarray) -> str:
    """Probabilities as base64 bytes of their roots, one a key: small ones keep a digit, the page stays short."""
    return base64.b64encode(np.rint(np.sqrt(probabilities) * 255).astype(np.uint8).tobytes()).decode()


def to_lists(roll: np.ndarray) -> list[list[int]]:
    """A piano roll (T, K) as lists of sounding keys, as the page has it."""
    return [np.flatnonzero(frame).tolist() for frame in roll]
