"""Generation: a model run on its own output, one step at a time, many samples at once.

    run = deeprnn.load_run("runs/x")
    music = run.generate(seed=1)
    music.save("out/chorale")           # chorale.mid, chorale.wav, chorale.png

The same seed gives the same output, and a sample is the same alone or among many.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from deeprnn.errors import UserError
from deeprnn.generation.ending import end_at_cadence
from deeprnn.generation.frames import FrameOptions, frame_sampler
from deeprnn.generation.outputs import Music, Text, spell
from deeprnn.generation.sampling import check, stream, symbol_picker

if TYPE_CHECKING:
    from deeprnn.data.music import Grid
    from deeprnn.model.sequence_model import SequenceModel
    from deeprnn.runs.folder import Run

MUSIC_OPTIONS = ("max_notes", "independent", "ending", "tempo", "program")
ENDINGS = ("cadence", "cut")
TEXT_OPTIONS = ("top_k", "top_p", "avoid")


def from_run(run: Run, *, primer: np.ndarray | str | None = None, **options: Any) -> Music | Text:
    """Music or text from a trained run; every option has a default that the run's data suggests.

    For all runs: length, count, seed, temperature, primer, keep_primer. For music: max_notes, independent,
    ending, tempo, program. For text: top_k, top_p, avoid.

    `primer` is a text; for music a piano roll (T, K), a MIDI file or a piece of the run's data, as in "test:3".
    `ending` is "cadence": a piece of four bars or more ends on a chord that gives rest, within its last
    quarter; or "cut": it is exactly `length` frames long.
    """
    check_options(run, options)
    if run.kind != "music":
        if not (primer is None or isinstance(primer, str)):
            raise UserError(f"a {run.kind} run is primed with a text, not with {type(primer).__name__}")
        return text_from_run(run, primer, **options)
    if isinstance(primer, str):
        from deeprnn.generation.primers import read_primer

        primer = read_primer(run, primer)
    return _music_from_run(run, primer, **options)


def check_options(run: Run, options: dict[str, Any]) -> None:
    """Refuse options that are of the other kind, or of none."""
    known = MUSIC_OPTIONS if run.kind == "music" else TEXT_OPTIONS
    common = ("length", "count", "seed", "temperature", "keep_primer")
    for name in options:
        if name not in (*known, *common):
            other = "text" if name in TEXT_OPTIONS else "music" if name in MUSIC_OPTIONS else ""
            reason = f"is for {other}, and this run is of kind {run.kind!r}" if other else "is unknown"
            raise UserError(f"{name}={options[name]!r} {reason}: options are {', '.join((*common, *known))}")


def _music_from_run(
    run: Run,
    primer: Any,
    *,
    length: int | None = None,
    max_notes: int | None = None,
    ending: str = "cadence",
    tempo: float = 90.0,
    program: int = 0,
    **options: Any,
) -> Music:
    from deeprnn.data.music import Grid
    from deeprnn.render.midi import check_playing

    check_playing(tempo, program)
    if ending not in ENDINGS:
        raise UserError(f"ending={ending!r} is unknown: use {' or '.join(ENDINGS)}")
    grid = run.grid or Grid(low=21, high=20 + run.spec.output_size)
    steps = grid.steps_per_beat
    frames = 64 * steps if length is None else length
    primed = 0 if primer is None else len(primer)
    model = run.model()
    begin = perf_counter()
    most = run.info.get("data", {}).get("most_notes") if max_notes is None else max_notes
    pieces, probabilities = sample_rolls(model, frames, primer=primer, max_notes=most, **options)
    seconds = perf_counter() - begin
    primer_frames = primed if options.get("keep_primer", True) else 0
    if ending == "cadence":
        pieces, probabilities = _ended(pieces, probabilities, grid, primer_frames)
    title = f"{run.info.get('label', 'model')} on {run.info.get('data', {}).get('name', 'data')}"
    return Music(
        pieces=pieces,
        probabilities=probabilities,
        primer=primer_frames,
        steps_per_beat=steps,
        low=grid.low,
        tempo=tempo,
        program=program,
        title=title,
        seed=options.get("seed", 0),
        temperature=options.get("temperature", 1.0),
        seconds=seconds,
    )


def _ended(
    pieces: list[np.ndarray], probabilities: list[np.ndarray], grid: Grid, primer: int
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Pieces and probabilities up to each one's cadence; a held chord was not drawn and stands at 0 or 1."""
    ends = [end_at_cadence(piece, grid, primer) for piece in pieces]
    chances = []
    for (piece, place), p in zip(ends, probabilities, strict=True):
        held_chord = piece[place + 1 :].astype(np.float32)
        chances.append(np.concatenate([p[: len(piece) - len(held_chord)], held_chord]))
    return [piece for piece, _ in ends], chances


def text_from_run(
    run: Run,
    primer: str | None = None,
    *,
    length: int | None = None,
    count: int = 1,
    keep_primer: bool = True,
    avoid: Iterable[str] = (),
    show: Callable[[str], object] | None = None,
    **options: Any,
) -> Text:
    """Text from a trained run; `show` is called with each piece of the first sample as soon as it is there."""
    check_options(run, options)
    vocabulary = list(run.vocabulary or ())
    symbols = (600 if run.kind == "char" else 120) if length is None else length
    primer_ids = encode_primer(primer or "", vocabulary, run.kind)
    model = run.model()
    begin = perf_counter()
    steps = stream_symbols(
        model,
        length=symbols,
        count=count,
        primer=primer_ids,
        start=start_symbol(vocabulary),
        avoid=symbol_ids({*avoid, *never(vocabulary, run.kind)}, vocabulary),
        **options,
    )
    ids = np.zeros((count, symbols), np.int64)

    def first() -> Iterator[int]:
        for t, row in enumerate(steps):
            ids[:, t] = row
            yield int(row[0])

    for piece in spell(first(), vocabulary, run.kind, after=primer_ids):
        if show is not None:
            show(piece)
    seconds = perf_counter() - begin
    head = (primer or "") if keep_primer else ""
    return Text(
        texts=[head + "".join(spell(row, vocabulary, run.kind, after=primer_ids)) for row in ids],
        ids=list(ids),
        primer=len(head),
        kind=run.kind,
        seed=options.get("seed", 0),
        temperature=options.get("temperature", 1.0),
        seconds=seconds,
    )


# Music


def sample_rolls(
    model: SequenceModel,
    length: int,
    count: int = 1,
    primer: np.ndarray | None = None,
    keep_primer: bool = True,
    **options: Any,
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Piano rolls (T, K) uint8, `length` frames each after the primer, and the probabilities of their notes.

    Each frame was drawn from its own; the primer's stand at 0 or 1. Options are those of `stream_music`.
    """
    steps = stream_music(model, length=length, count=count, primer=primer, **options)
    size = model.spec.output_size
    rolls = np.zeros((count, length, size), np.uint8)
    chances = np.zeros((count, length, size), np.float32)
    for t, (frames, p) in enumerate(steps):
        rolls[:, t], chances[:, t] = frames, p
    if primer is None or not keep_primer:
        return list(rolls), list(chances)
    head = (np.asarray(primer) > 0).astype(np.uint8)
    return (
        [np.concatenate([head, roll]) for roll in rolls],
        [np.concatenate([head.astype(np.float32), p]) for p in chances],
    )


def stream_music(
    model: SequenceModel,
    *,
    length: int,
    count: int = 1,
    seed: int = 0,
    temperature: float = 1.0,
    primer: np.ndarray | None = None,
    max_notes: int | None = None,
    independent: bool = False,
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Frames (count, K) uint8 as they are sampled, each with its probabilities (count, K)."""
    keys = model.spec.output_size
    options = FrameOptions(temperature, max_notes, independent)
    sampler = frame_sampler(model.spec.output, keys, options, model.predict)
    if model.spec.input_size != model.spec.output_size:
        raise UserError("this model's input and output differ in size: it cannot run on its own output")
    check(length, count, seed, temperature)
    beginning = np.zeros((0, keys), np.uint8) if primer is None else np.asarray(primer)
    if beginning.ndim != 2 or beginning.shape[1] != keys:
        raise UserError(f"the primer has the shape {beginning.shape}, the model plays frames of {keys} notes")
    beginning = (beginning > 0).astype(np.float32)
    # A frame is predicted from the one before it, the first from silence.
    frames = torch.from_numpy(np.concatenate([np.zeros((1, keys), np.float32), beginning]))
    steps = stream(model, frames, length, count, seed, sampler.draws, sampler.pick)
    return ((f.astype(np.uint8), p) for f, p in steps if p is not None)


# Text


def stream_symbols(
    model: SequenceModel,
    *,
    length: int,
    count: int = 1,
    seed: int = 0,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    primer: Sequence[int] | np.ndarray = (),
    start: int = 0,
    avoid: Sequence[int] = (),
) -> Iterator[np.ndarray]:
    """Symbol ids (count,) as they are sampled; without a primer the model first hears `start`."""
    if model.spec.output != "categorical" or not model.spec.symbols:
        raise UserError("this model predicts frames of notes, not symbols: sample music from it")
    check(length, count, seed, temperature)
    if top_k is not None and top_k < 1:
        raise UserError(f"top_k={top_k} leaves nothing to choose from: choose at least 1")
    if top_p is not None and not 0 < top_p <= 1:
        raise UserError(f"top_p={top_p} must be above 0 and at most 1")
    size = model.spec.output_size
    first = np.asarray(primer if len(primer) else [start], np.int64)
    if first.min() < 0 or first.max() >= size:
        raise UserError(f"the primer holds symbol {int(first.max())}, the model knows 0 to {size - 1}")
    if len(set(avoid)) >= size:
        raise UserError("every symbol is to be avoided: nothing is left to sample")
    pick = symbol_picker(temperature, top_k, top_p, list(avoid))
    return (ids for ids, _ in stream(model, torch.from_numpy(first), length, count, seed, 1, pick))


def encode_primer(text: str, vocabulary: Sequence[str], kind: str) -> np.ndarray:
    """Ids of a primer; symbols the model never saw become <unk>, or an error where there is none."""
    from deeprnn.data.text import encode, word_symbols

    symbols = list(text) if kind == "char" else word_symbols(text)
    if not symbols:
        return np.zeros(0, np.int64)
    return encode(symbols, {symbol: i for i, symbol in enumerate(vocabulary)}).astype(np.int64)


def start_symbol(vocabulary: Sequence[str]) -> int:
    """The symbol that a text without a primer follows: the end of a sentence."""
    for symbol in ("<eos>", "\n", " "):
        if symbol in vocabulary:
            return list(vocabulary).index(symbol)
    return 0


def never(vocabulary: Sequence[str], kind: str) -> tuple[str, ...]:
    """Symbols no text contains: among characters <unk> only stands for what was not seen."""
    return ("<unk>",) if kind == "char" and "<unk>" in vocabulary else ()


def symbol_ids(symbols: Iterable[str], vocabulary: Sequence[str]) -> list[int]:
    """Ids of single symbols, each of which must be known."""
    known = list(vocabulary)
    for symbol in symbols:
        if symbol not in known:
            raise UserError(f"{symbol!r} is not in the model's vocabulary of {len(known)} symbols")
    return [known.index(symbol) for symbol in symbols]
