"""The command `deeprnn`: finds the subcommand, parses its settings with tyro, runs it."""

from __future__ import annotations

import errno
import io
import logging
import os
import sys
import time
from collections.abc import Sequence
from importlib import import_module

from deeprnn import __version__, launcher
from deeprnn.console import PrintableFormatter, printable, two_columns
from deeprnn.errors import UserError, did_you_mean
from deeprnn.files import NO_ROOM

# name -> (module:class, one line); the module is imported only when its command runs.
COMMANDS: dict[str, tuple[str, str]] = {
    "demo": ("demo:Demo", "train two models on Bach chorales and hear the result, in a few minutes"),
    "train": ("train:Train", "train a model on a benchmark set, a MIDI folder, a text file or by a recipe"),
    "sweep": ("sweep:Sweep", "search over recipe fields, on this machine or a cluster"),
    "resume": ("resume:Resume", "go on with an interrupted run, exactly where it stopped"),
    "evaluate": ("evaluate:Evaluate", "score a trained run on a split, in every convention"),
    "runs": ("runs:Runs", "list runs with their results"),
    "generate": ("generate:Generate", "let a trained run write music or text"),
    "report": ("report:Report", "tables, figures and one HTML page from runs or from the ledger"),
    "reproduce": ("reproduce:Reproduce", "run the paper's experiments again"),
    "serve": ("serve:Serve", "open the web page: hear, see and play with trained runs"),
    "data check": ("data:DataCheck", "which data sets are found, their counts and checksums"),
    "data get": ("data:DataGet", "download a benchmark set, verified"),
    "data show": ("data:DataShow", "look at a data set: a piano roll or a text sample"),
    "data import": ("data:DataImport", "read your own MIDI, text or array files, with a report per file"),
    "data audit": ("data_audit:DataAudit", "what stands in two splits: duplicates, transposed or edited"),
    "describe": ("describe:Describe", "any model: equations, shapes, counts, and its picture"),
    "export": ("export:Export", "a trained run as ONNX, whole-sequence or one-step"),
    "bench": ("bench:Bench", "measure the backends beside their peers"),
    "doctor": ("doctor:Doctor", "versions, devices, backends and where data is looked for"),
}

SEVERAL = ("train", "resume")
"""commands that several processes run together"""
GRACE = 3.0
"""seconds in which torchrun ends the other processes after one that failed"""

EXAMPLES = (
    ("deeprnn demo", "the first thing to try"),
    ("deeprnn describe dots --hidden 400 --png out/dots.png", "see a deep model"),
    ("deeprnn train my_midi_folder/", "your own music"),
    ("deeprnn train book.txt --level char", "your own text"),
    ("deeprnn train jsb --model dots", "a cell of the paper's Table 2"),
    ("deeprnn generate runs/NAME", "hear what it learned"),
)


def overview() -> str:
    """What `deeprnn --help` prints."""
    lines = [
        f"deeprnn {__version__}: deep recurrent neural networks",
        "",
        "usage: deeprnn COMMAND [options]",
        "",
        two_columns([(name, text) for name, (_, text) in COMMANDS.items()]),
        "",
        "`deeprnn help COMMAND` explains a command and its options.",
        "`--import my_cells.py` lets any command know your own cells.",
        "",
        "For example:",
        two_columns([(command, f"# {text}") for command, text in EXAMPLES]),
    ]
    return "\n".join(lines)


def members(family: str) -> str:
    """The commands that begin with one word."""
    rows = [(f"deeprnn {n}", line) for n, (_, line) in COMMANDS.items() if n.startswith(f"{family} ")]
    return f"'deeprnn {family}' has these commands:\n{two_columns(rows)}"


def find(argv: Sequence[str]) -> tuple[str, list[str]]:
    """Split the arguments into the command's name (one word or two) and the rest."""
    for words in (2, 1):
        name = " ".join(argv[:words])
        if len(argv) >= words and name in COMMANDS:
            return name, list(argv[words:])
    family = [n for n in COMMANDS if n.startswith(f"{argv[0]} ")]
    if family:
        if len(argv) == 1:
            raise UserError(members(argv[0]))
        raise UserError(f"unknown command 'deeprnn {argv[0]} {argv[1]}': known are {', '.join(family)}")
    hint = did_you_mean(argv[0], [n.split()[0] for n in COMMANDS])
    raise UserError(f"unknown command {argv[0]!r}{hint}: 'deeprnn --help' lists them")


def take_imports(argv: Sequence[str]) -> list[str]:
    """The arguments without `--import FILE`, which every command takes: files that hold cells of your own."""
    rest, words = [], iter(argv)
    for word in words:
        if word != "--import" and not word.startswith("--import="):
            rest.append(word)
            continue
        files = word.partition("=")[2] or next(words, "")
        if not files:
            raise UserError("--import needs a Python file or a module that holds your cells")
        before = os.environ.get("DEEPRNN_IMPORT")
        os.environ["DEEPRNN_IMPORT"] = files if not before else f"{before}{os.pathsep}{files}"
    return rest


def run(argv: Sequence[str]) -> int:
    """Run one command line; errors a person can mend are raised as UserError."""
    from deeprnn.errors import need

    argv = list(argv)
    if argv[:1] == ["help"] and len(argv) > 1:  # help train, help data get
        argv = [*argv[1:], "--help"]
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(overview())
        return 0
    if argv[0] in ("--version", "-V"):
        print(f"deeprnn {__version__}")
        return 0
    if argv[0] == "data" and argv[1:2] in (["-h"], ["--help"]):
        print(members("data"))
        return 0
    name, rest = find(take_imports(argv))
    if launcher.count() > 1 and name not in SEVERAL:
        raise UserError(f"'deeprnn {name}' runs in one process: start it without torchrun")
    need("tyro", extra="cli")
    module, _, cls = COMMANDS[name][0].partition(":")
    command = getattr(import_module(f"deeprnn.commands.{module}"), cls)
    if hasattr(command, "from_argv"):
        return command.from_argv(rest, prog=f"deeprnn {name}").run()
    return import_module("deeprnn.commands.arguments").parse(command, rest, f"deeprnn {name}").run()


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point: exit status 0, 2 for an error of use, 130 when interrupted."""
    # Before numpy is loaded: its threads spin between the small products of sampling, on cores that others need.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    for stream in (sys.stdout, sys.stderr):  # a file's name may hold what the terminal's encoding has not
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    if logging.lastResort is not None:  # what shows warnings where nobody set up a log
        logging.lastResort.setFormatter(PrintableFormatter())
    try:
        try:
            return run(sys.argv[1:] if argv is None else argv)
        finally:
            sys.stdout.flush()  # here, where an error can still be told in a sentence
    except UserError as error:
        _report(error)
        return 2
    except BrokenPipeError:  # the reader of a pipe (head, less) went away: nothing to report
        _drop_output()
        return 0
    except OSError as error:  # a folder that cannot be written, a file that cannot be read, a full disk
        if error.filename is None and error.errno not in (
            *NO_ROOM,
            errno.EIO,
        ):  # a fault of ours: let it be seen
            raise
        if error.filename is None:
            _drop_output()
        message = f"error: {error.filename or 'cannot write the output'}: {error.strerror}"
        print(printable(message), file=sys.stderr)
        return 2
    except MemoryError as error:
        print(
            f"error: out of memory ({error or 'no more is to be had'}): ask for less at once", file=sys.stderr
        )
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def _report(error: UserError) -> None:
    """Print what went wrong: of several processes that meet the same error the first alone does."""
    if not (rank := launcher.rank()):
        print(printable(f"error: {error}"), file=sys.stderr)
        return
    time.sleep(GRACE)  # where the first has failed as well, its message is out and this process ends here
    print(printable(f"error (rank {rank}): {error}"), file=sys.stderr)


def _drop_output() -> None:
    """Let what is still buffered for stdout go nowhere: Python would try to write it again at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())
