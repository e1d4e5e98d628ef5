"""Mutated files: songs, texts, recipes and run folders that were changed on the way."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.torture import disk, seeds, specimens
from tests.torture.attack import Arena, attack
from tests.torture.nasty import NUMBERS, TEXTS, VALUES, as_json, mutated, mutated_tree
from tests.torture.workers import INFLATED, Target, attack_with


@attack("mutated data files", share=3)
def data_files(arena: Arena) -> None:
    """MIDI, pickle, mat, npz, JSON and text: data or one sentence, in bounded time and memory, and nothing runs."""
    attack_with(
        arena,
        [
            Target("midi", _bytes_of(seeds.midi), _imported(".mid"), specimens.MIDI),
            Target("pickle", _bytes_of(seeds.pickles), _imported(".pickle"), specimens.PICKLE),
            Target("mat", _bytes_of(seeds.mats), _imported(".mat"), specimens.MAT, INFLATED),
            Target("npz", _bytes_of(seeds.npzs), _imported(".npz"), specimens.NPZ, INFLATED),
            Target("json", _trees_of(seeds.SONGS), _imported(".json"), specimens.JSON),
            Target("text", _bytes_of(seeds.texts), _imported(".txt", "char"), specimens.TEXT),
            Target("words", _bytes_of(seeds.texts), _imported(".txt", "word"), specimens.TEXT),
        ],
    )


@attack("mutated recipes and runs", share=3)
def run_files(arena: Arena) -> None:
    """Recipes, weights and every JSON file of a run folder whose checksums were made to match."""
    music = arena.scene.copy("music", arena.folder / "music")
    text = arena.scene.copy("text", arena.folder / "text")
    info = json.loads((music / "run.json").read_bytes())
    rows = [json.loads(line) for line in (music / "metrics.jsonl").read_bytes().splitlines()]
    weights, recipe = (music / "best.safetensors").read_bytes(), (music / "recipe.toml").read_bytes()
    vocabulary, grid = (json.loads((f).read_bytes()) for f in (text / "vocabulary.json", music / "grid.json"))
    attack_with(
        arena,
        [
            Target("toml", mutated_recipe(recipe), _recipe_read, specimens.TOML),
            Target("safetensors", _bytes_of(lambda: (weights,)), _weights_read(music), specimens.SAFETENSORS),
            Target("run.json", _trees_of(info), _run_read(music, "run.json"), specimens.run_json(info)),
            Target("metrics.jsonl", _lines_of(rows), _run_read(music, "metrics.jsonl"), {}),
            Target("grid.json", _trees_of(grid), _run_read(music, "grid.json"), {}),
            Target("vocabulary.json", _trees_of(vocabulary), _run_read(text, "vocabulary.json"), {}),
        ],
    )


# ---- making


def _bytes_of(originals: Callable[[], Sequence[bytes]]) -> Callable[[random.Random], bytes]:
    return lambda chance: mutated(chance.choice(originals()), chance, originals())


def _trees_of(original: Any) -> Callable[[random.Random], bytes]:
    """Trees that were changed, and now and then the bytes as well."""

    def make(chance: random.Random) -> bytes:
        content = as_json(mutated_tree(original, chance))
        return mutated(content, chance) if chance.random() < 0.3 else content

    return make


def _lines_of(rows: list[Any]) -> Callable[[random.Random], bytes]:
    make = _trees_of(rows)

    def lines(chance: random.Random) -> bytes:
        return make(chance).replace(b"}, {", b"}\n{").strip(b"[]") + b"\n"

    return lines


def mutated_recipe(original: bytes) -> Callable[[random.Random], bytes]:
    """Some lines given other values, and now and then the bytes changed."""

    def make(chance: random.Random) -> bytes:
        lines = original.decode().splitlines()
        for _ in range(chance.randint(1, 3)):
            at = chance.randrange(len(lines))
            name, equals, _ = lines[at].partition("=")
            lines[at] = f"{name}{equals}{_toml_value(chance)}" if equals else f"[{chance.choice(TEXTS)}]"
        content = "\n".join(lines).encode("utf-8", "surrogatepass")
        return mutated(content, chance) if chance.random() < 0.3 else content

    return make


def _toml_value(chance: random.Random) -> str:
    value = chance.choice(VALUES)
    if value in NUMBERS and not isinstance(value, bool):
        return str(value)
    return json.dumps(value, ensure_ascii=False) if chance.random() < 0.9 else str(value)


# ---- reading, in the worker's own folder


def _imported(suffix: str, kind: str = "auto") -> Callable[[bytes], None]:
    def read(content: bytes) -> None:
        from deeprnn.data.importing import Options, import_path

        path = Path(f"input{suffix}")
        path.write_bytes(content)
        import_path(path, Options(kind=kind))

    return read


def _recipe_read(content: bytes) -> None:
    from deeprnn.training.recipe import load_recipe

    Path("recipe.toml").write_bytes(content)
    load_recipe("recipe.toml")


def _weights_read(run: Path) -> Callable[[bytes], None]:
    """As somebody would forge them: with the checksum that the file then has."""

    def read(content: bytes) -> None:
        from deeprnn.runs.folder import load_run

        here = Path("run")
        if not here.exists():
            disk.copy(run, here)
        (here / "best.safetensors").write_bytes(content)
        sidecar = json.loads((here / "best.json").read_bytes())
        sidecar["sha256"] = hashlib.sha256(content).hexdigest()
        (here / "best.json").write_text(json.dumps(sidecar))
        load_run(here).model()

    return read


def _run_read(run: Path, name: str) -> Callable[[bytes], None]:
    """Everything that a command asks of a run before it trains or writes."""

    def read(content: bytes) -> None:
        from deeprnn.runs.folder import list_runs, load_run
        from deeprnn.runs.summary import summary
        from deeprnn.web.library import Library
        from deeprnn.web.limits import Limits

        here = Path("runs/run")
        if not here.exists():
            disk.copy(run, here)
        (here / name).write_bytes(content)
        assert len(Library([here.parent], Limits()).entries()) == 1, "the page does not list it"
        assert len(list_runs(here.parent)) == 1, "it is not listed"
        found = load_run(here)
        summary(found)
        found.model()
        found.generate(length=2, seed=1)

    return read
