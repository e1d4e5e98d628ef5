"""Arguments: every option of every command with values that nobody should give it."""

from __future__ import annotations

import random
import signal
from pathlib import Path

from deeprnn.cells import lookup
from deeprnn.cells.library import LIBRARY
from tests.torture import child, disk
from tests.torture.attack import Arena, attack
from tests.torture.nasty import NUMBERS, TEXTS

SECONDS, OBEY = 10.0, 20.0
"""for a command to end; for one that trains on to stop when it is asked to"""
SMALL = (
    "--model.hidden",
    "6",
    "--stop.epochs",
    "1",
    "--quiet",
    "--device",
    "cpu",
    "--out",
    "made",
)
QUICK = ("--model", "rnn", *SMALL)

# No device: an option that names an output would be taken at its word. And what is not UTF-8, as the system gives it.
WORDS = (*(text for text in TEXTS if not text.startswith("/dev") and text != "\ud800"), "\udcff")

# A command with the options that may follow it. RUN, BOOK, SONGS and RECIPE are replaced by what the scene has.
COMMANDS: dict[tuple[str, ...], tuple[str, ...]] = {
    ("train", "BOOK", *QUICK): (
        "--seeds",
        "--rates",
        "--threads",
        "--name",
        "--level",
        "--device",
        "--out",
        "FIELD",
    ),
    ("train", "SONGS", *QUICK): ("--seeds", "--threads", "--transpositions", "FIELD"),
    ("train", "BOOK", *SMALL): ("CELL",),
    ("train",): ("WHAT",),
    ("resume", "RUN", "--quiet", "--device", "cpu"): ("--threads", "--device", "--ledger"),
    ("evaluate", "RUN", "--device", "cpu"): ("--split", "--dynamic", "--decay", "--chunk", "--threads"),
    ("generate", "RUN", "--length", "4", "--out", "made"): (
        *(
            "--length",
            "--count",
            "--seed",
            "--temperature",
            "--top-k",
            "--top-p",
            "--avoid",
            "--max-notes",
            "--primer",
        ),
        *("--primer-length", "--tempo", "--program", "--out", "--formats"),
    ),
    ("describe", "dots"): (
        *(
            "--input",
            "--output",
            "--hidden",
            "--levels",
            "--intermediate",
            "--output-hidden",
            "--unit",
            "--shortcut",
        ),
        *("--png", "--svg"),
    ),
    ("describe",): ("WHAT",),
    ("data", "show", "SONGS"): ("--split", "--index", "--steps", "--png"),
    ("data", "import", "SONGS"): ("--kind", "--steps-per-beat", "--low", "--high", "--minimum", "--out"),
    ("data", "check"): ("WHAT",),
    ("data", "import"): ("WHAT",),
    ("report",): ("--ledger", "--readme", "--html", "WHAT"),
    ("reproduce", "--plan"): ("--only", "--seeds", "--budget", "--jobs", "--override", "--device"),
    ("runs",): ("WHAT",),
    ("export",): ("WHAT",),
    ("serve", "--port", "1"): ("--host", "--port", "--workers", "--threads", "--queue", "--names", "WHAT"),
    (): ("WHAT",),
}
KNOWN: tuple[tuple[str, ...], ...] = (
    ("train", "BOOK", *QUICK, "--seeds", "²..³"),
    ("train", "BOOK", *QUICK, "--seeds", "1..99999999999"),
    ("train", "BOOK", *QUICK, "--init.bias", "1e308"),
    ("train", "BOOK", *QUICK, "--threads", "100000"),
    ("train", "BOOK", *QUICK, "--data.lanes", "100000000"),
    ("train", "BOOK", *QUICK, "--data.chunk", "100000000"),
    ("train", "BOOK", *QUICK, "--optimiser.rate", "1e30", "--save.updates", "1"),
    ("train", "BOOK", *QUICK, "--seeds", "[" * 3000),
    ("train", "BOOK", *QUICK, "--name", "../../escaped"),
    ("train", "BOOK", *QUICK, "--sweep", "optimiser.rate=0.1,0.2", "--name", "../../escaped"),
    ("train", "BOOK", *SMALL, "--model", "rhn", "--model.cell-options", "depth=1000000"),
    ("train", "BOOK", *SMALL, "--model", "gru", "--model.cell-options", "intermediate_sizes=99999999999"),
    ("serve", "--port", "1", "--threads", "100000"),
    ("train", "[/red]"),
    ("generate", "RUN", "--length", "0"),
    ("evaluate", "[/red]"),
)


@attack("arguments", share=2.5)
def arguments(arena: Arena) -> None:
    """Options with absurd values: done, or refused in one sentence, without a crash, a hang or gigabytes."""
    for words in arena.each(KNOWN):
        _try(arena, words)
    while arena.seconds_left > 0:
        _try(arena, invented(arena.chance))


def invented(chance: random.Random) -> tuple[str, ...]:
    """A command line with one or two strange values in it."""
    command = chance.choice(list(COMMANDS))
    words = list(command)
    for _ in range(chance.choice((1, 1, 2))):
        option = chance.choice(COMMANDS[command])
        value = strange_value(chance)
        if option == "FIELD":
            option = f"--{chance.choice(_fields())}"
        if option == "CELL":
            cell = chance.choice(list(LIBRARY))
            known = chance.choice(lookup.arguments(LIBRARY[cell]))
            words += ["--model", cell, "--model.cell-options", f"{known}={value}"]
            continue
        words += [value] if option == "WHAT" else [option, value]
    return tuple(words)


def strange_value(chance: random.Random) -> str:
    """A word that can be given on a command line, whatever it means."""
    value = str(chance.choice((*NUMBERS, *WORDS)))
    if chance.random() < 0.15:
        value = f"{value},{chance.choice(NUMBERS)}"
    return value.replace("\0", "")  # the system passes none on


def _fields() -> list[str]:
    from deeprnn.training.recipe import field_names

    return field_names()


def _try(arena: Arena, words: tuple[str, ...]) -> None:
    arena.add("command lines")
    with arena.case(child.shown(words)):
        place = arena.folder / "place"
        disk.remove(place)
        place.mkdir()
        _beside(arena.folder)  # an earlier --out may have named a folder out there
        made = arena.scene
        run = made.copy(arena.chance.choice(["music", "text"]), place / "run")
        names = {"RUN": str(run), "BOOK": str(made.book), "SONGS": str(made.songs)}
        command = [names.get(word, word) for word in words]
        served = words[:1] == ("serve",)  # nothing ends that but a signal
        ended = child.deeprnn(
            *command, cwd=place, seconds=3 if served else SECONDS, obey=OBEY, megabytes=3000
        )
        child.check_polite(ended, allowed=(0, 1, 2, 130, 143, *((-signal.SIGTERM,) if served else ())))
        assert ended.megabytes < 1000, f"took {ended.megabytes:,.0f} MB"
        assert not list(place.rglob("canary")), "a value was run as a command"
        if "--name" in words and words.count("--out") == 1:
            _check_inside(arena.folder)


def _check_inside(folder: Path) -> None:
    """A run's name is a name, and does not lead out of the folder that runs are kept in."""
    others = _beside(folder)
    assert not others, f"{others[0].name} was written outside of the runs' folder"


def _beside(folder: Path) -> list[Path]:
    """What lay beside the place that commands work in, which is removed."""
    others = [path for path in folder.iterdir() if path.name != "place"]
    for path in others:
        disk.remove(path)
    return others
