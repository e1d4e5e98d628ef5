"""`deeprnn generate`: let a trained run write music or text."""

from __future__ import annotations

import json
import secrets
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import tyro

from deeprnn.console import console, printable
from deeprnn.errors import UserError

if TYPE_CHECKING:
    from deeprnn.generation.copy_check import Passage
    from deeprnn.generation.musical_statistics import MusicalStatistics
    from deeprnn.generation.outputs import Music, Text
    from deeprnn.runs.folder import Run


@dataclass(frozen=True)
class Generate:
    """Let a trained run write music (MIDI, WAV, picture) or text.

    `deeprnn generate runs/x` needs nothing else: the run knows its data, grid and vocabulary. `deeprnn generate bach`
    needs no training: that run comes with the package.
    """

    run_folder: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(name="run", metavar="RUN")]
    """folder of a run; of a population, its best member writes. bach comes with deeprnn"""
    length: int | None = None
    """frames, characters or words after the primer (sixteen bars; 600 characters; 120 words)"""
    count: int = 1
    """how many samples"""
    seed: int | None = None
    """the same seed gives the same output (a fresh one, which is shown)"""
    temperature: float = 1.0
    """below 1 nearer to what is likeliest, above 1 bolder, 0 always the likeliest; music stays as dense"""
    top_k: int | None = None
    """text: choose among the K likeliest symbols only"""
    top_p: float | None = None
    """text: choose among the likeliest symbols that together have this probability"""
    avoid: Annotated[tuple[str, ...], tyro.conf.arg(metavar="SYMBOL ...")] = ()
    """text: symbols never chosen, as in --avoid '<unk>'"""
    max_notes: int | None = None
    """music: at most this many notes at once (as many as the training data has)"""
    independent: bool = False
    """music: draw every note by a coin of its own, which leaves their number to chance"""
    ending: Literal["cadence", "cut"] | None = None
    """music: on a chord that gives rest, within --length frames (cadence), or after exactly as many (cut)"""
    primer: str | None = None
    """what it begins with: a MIDI or text file, a text, or a piece of the run's data as in test:3"""
    primer_length: int | None = None
    """how much of the primer to use, in frames or characters (a named piece: its first two bars)"""
    keep_primer: bool = True
    """whether the primer stands at the beginning of the output"""
    tempo: float | None = None
    """music: beats a minute (90)"""
    program: int | None = None
    """music: General MIDI program, 0 piano, 19 organ, 48 strings"""
    out: Path | None = None
    """folder for the files (music: out; text: printed only)"""
    formats: tuple[Literal["mid", "wav", "png"], ...] = ("mid", "wav", "png")
    """music: which files to write"""
    copy_check: bool = True
    """look for the longest passage shared with the training data"""
    threads: int = 1
    """CPU threads; one step of a model is too little work to share"""
    json: bool = False
    """print one JSON document to stdout and nothing else there"""

    def run(self) -> int:
        """Sample, write, and say what was written."""
        from deeprnn.commands.training import set_threads
        from deeprnn.runs.folder import load_run

        set_threads(self.threads)
        run = load_run(self.run_folder)
        seed = secrets.randbelow(1 << 31) if self.seed is None else self.seed
        options = self.options(run, seed)
        if run.kind != "music" and self.count == 1 and not self.json:
            work = stream_text(run, options)
        else:
            from deeprnn.generation import generate

            work = generate.from_run(run, **options)
        check_silence(work)
        stem = f"{run.name.replace('/', '-')}-seed{seed}"
        files = self.save(work, stem)
        checks = self.check(run, work)
        if self.json:
            print(json.dumps(document(run, work, seed, files, checks), indent=1))
        else:
            show(run, work, seed, files, checks, streamed=self.count == 1)
        return 0

    def options(self, run: Run, seed: int) -> dict[str, Any]:
        """Arguments of `generate.from_run`; options left out keep its defaults."""
        if run.kind != "music" and self.formats != Generate.formats:
            raise UserError("--formats is for music, and this run is of kind " + repr(run.kind))
        if not self.formats:
            raise UserError("--formats names no format: choose among mid, wav and png")
        optional = {
            "length": self.length, "max_notes": self.max_notes, "ending": self.ending,
            "independent": self.independent or None, "tempo": self.tempo, "program": self.program,
            "top_k": self.top_k, "top_p": self.top_p, "avoid": self.avoid or None,
        }  # fmt: skip
        chosen = {name: value for name, value in optional.items() if value is not None}
        chosen |= {"count": self.count, "temperature": self.temperature, "keep_primer": self.keep_primer}
        if self.primer is not None:
            from deeprnn.generation.primers import read_primer

            chosen["primer"] = read_primer(run, self.primer, self.primer_length)
        elif self.primer_length is not None:
            raise UserError("--primer-length says how much of a primer to use: name one with --primer")
        return {**chosen, "seed": seed}

    def save(self, work: Music | Text, stem: str) -> list[Path]:
        """Write the files: music always, text where a folder is given."""
        from deeprnn.generation.outputs import Music

        if isinstance(work, Music):
            return work.save((self.out or Path("out")) / stem, self.formats)
        return work.save(self.out / stem) if self.out else []

    def check(self, run: Run, work: Music | Text) -> Checks:
        """The sample beside the data that the run learned from, or why not."""
        if not self.copy_check:
            return Checks()
        from deeprnn.data import MusicData
        from deeprnn.generation.copy_check import check
        from deeprnn.generation.musical_statistics import compare_with_data
        from deeprnn.generation.primers import run_data

        try:
            data = run_data(run)
        except UserError as error:
            return Checks(left_out=f"copy check left out, the training data is not here ({error})")
        counted = compare_with_data(work.sampled, data) if isinstance(data, MusicData) else None
        return Checks(*check(work.sampled, data), statistics=counted)


class Checks(NamedTuple):
    """What a sample has in common with the data."""

    passages: list[Passage] = []  # noqa: RUF012 - a default of a tuple, never changed
    unseen: int | None = None
    """what unseen pieces of that length share with the training data"""
    left_out: str = ""
    """why nothing was compared"""
    statistics: tuple[MusicalStatistics, MusicalStatistics] | None = None
    """of the music that was written, and of pieces that the model has not seen"""


def stream_text(run: Run, options: dict[str, Any]) -> Text:
    """Print a text symbol by symbol as it is sampled."""
    from deeprnn.generation import generate

    primer = options.get("primer") or ""
    if primer and options.get("keep_primer", True):
        console().print(primer, style="dim", end="")

    terminal = sys.stdout.isatty()

    def show(piece: str) -> None:
        sys.stdout.write(printable(piece) if terminal else piece)
        sys.stdout.flush()

    work = generate.text_from_run(run, show=show, **options)
    sys.stdout.write("\n")
    return work


def check_silence(work: Music | Text) -> None:
    """Refuse music without a note, so that no empty files are written; warn where some pieces have none."""
    from deeprnn.generation.outputs import Music

    if not isinstance(work, Music) or not work.silent:
        return
    advice = "try another --seed, a --temperature nearer 1, or a --primer"
    if len(work.silent) == len(work):
        raise UserError(f"every frame came out silent, so nothing is written: {advice}")
    numbers = ", ".join(str(index + 1) for index in work.silent)
    console(stderr=True).print(f"warning: no note in {numbers} of {len(work)}: {advice}")


def document(run: Run, work: Music | Text, seed: int, files: list[Path], checks: Checks) -> dict[str, Any]:
    """What `--json` prints."""
    import dataclasses

    from deeprnn.generation.outputs import Text

    steps = sum(len(sample) for sample in work.sampled)
    out: dict[str, Any] = {
        "run": str(run.path),
        "kind": run.kind,
        "model": run.info.get("label"),
        "seed": seed,
        "temperature": work.temperature,
        "count": len(work),
        "length": len(work.sampled[0]),
        "primer": work.primer,
        "seconds": round(work.seconds, 4),
        "steps_per_second": round(steps / max(work.seconds, 1e-9)),
        "files": [str(path) for path in files],
        "copy_check": {
            "passages": [dataclasses.asdict(passage) for passage in checks.passages],
            "unseen": checks.unseen,
            "left_out": checks.left_out or None,
        },
    }
    if checks.statistics is not None:
        names = ("sample", "unseen")
        out["statistics"] = {
            name: dataclasses.asdict(x) for name, x in zip(names, checks.statistics, strict=True)
        }
    if isinstance(work, Text):
        out["texts"] = work.texts
    return out


def show(run: Run, work: Music | Text, seed: int, files: list[Path], checks: Checks, streamed: bool) -> None:
    """Show a sample to a person; text goes to stdout, everything about it to stderr."""
    from deeprnn.generation.copy_check import describe
    from deeprnn.generation.outputs import Music
    from deeprnn.runs.shipped import is_shipped

    notes = console(stderr=True)
    music = isinstance(work, Music)
    if not music and not streamed:
        for number, text in enumerate(work.texts, 1):
            notes.print(f"── {number} of {len(work)}", style="dim")
            print(printable(text) if sys.stdout.isatty() else text)
    unit = "frames" if music else {"char": "characters", "word": "words"}[run.kind]
    steps = sum(len(sample) for sample in work.sampled)
    label = run.info.get("label", "the model")
    if is_shipped(run.path):
        label += f" (the run {run.name!r} that comes with deeprnn)"
    notes.print(
        f"{label} wrote {steps:,} {unit} in {work.seconds:.2f} s ({steps / max(work.seconds, 1e-9):,.0f} a second); "
        f"again with --seed {seed}",
        style="dim",
    )
    for number, (passage, sample) in enumerate(zip(checks.passages, work.sampled, strict=False), 1):
        label = f"{number}: " if len(checks.passages) > 1 else ""
        notes.print(f"{label}{describe(passage, len(sample), unit, checks.unseen)}", style="dim")
    if checks.left_out:
        notes.print(checks.left_out, style="dim")
    if checks.statistics is not None:
        for line in statistics_lines(*checks.statistics):
            notes.print(line, style="dim")
    for path in files:
        console().print(str(path))


def statistics_lines(
    sample: MusicalStatistics, unseen: MusicalStatistics, heading: str = "unseen data"
) -> list[str]:
    """What a musician would count, of a sample and of pieces that the model has not seen, in two columns."""
    from deeprnn.generation.musical_statistics import SHOWN

    longest = max(len(shown.name) for shown in SHOWN.values())
    rows = [("", "written", heading)]
    rows += [(shown.name, sample.text(field), unseen.text(field)) for field, shown in SHOWN.items()]
    return [f"{label:<{longest}}  {written:>7}  {data:>{len(heading)}}" for label, written, data in rows]
