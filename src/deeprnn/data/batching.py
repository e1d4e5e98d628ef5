"""Chunks for truncated backpropagation through time, and batches for evaluation.

    plan = music_chunks(songs, chunk=200, seed=0, epoch=3)
    for batch in plan: ...                    # x_t is frame t-1 (zeros first), y_t is frame t
    plan.to("cuda")[7]                        # made on the GPU

The order depends on (seed, epoch) alone and `plan[i]` on nothing but i, so training resumes in mid-epoch.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

import numpy as np
import torch

from deeprnn.data.music import Songs
from deeprnn.data.plan import Batch, EpochPlan

__all__ = [
    "Batch",
    "EpochPlan",
    "chunk_lengths",
    "music_chunks",
    "music_evaluation",
    "order_of",
    "text_chunks",
    "text_evaluation",
]

PARTS = 4
"""A shorter last chunk is padded up to a multiple of chunk / PARTS, so that few lengths exist."""


def order_of(count: int, seed: int, epoch: int) -> np.ndarray:
    """A permutation that depends on (seed, epoch) alone.

    Sorting raw PCG64 output rather than Generator.permutation: numpy promises the former stream for good.
    """
    return np.argsort(np.random.PCG64([seed, epoch]).random_raw(count), kind="stable")


def chunk_lengths(chunk: int) -> tuple[int, ...]:
    """The lengths that chunks of at most `chunk` steps are padded to."""
    if chunk < 1:
        raise ValueError(f"chunk={chunk} must be at least 1")
    return tuple(sorted({-(-chunk * part // PARTS) for part in range(1, PARTS + 1)}))


def music_chunks(
    sequences: Sequence[np.ndarray],
    *,
    chunk: int,
    lanes: int = 1,
    seed: int = 0,
    epoch: int = 0,
    shuffle: bool = True,
    lengths: Sequence[int] | None = None,
) -> EpochPlan:
    """Training chunks of songs in an order drawn from (seed, epoch).

    With one lane (the paper's way) a chunk holds at most `chunk` steps of one song: the state is carried
    within a song, and `reset[0]` is True at each song's first chunk. With more lanes songs lie end to end
    in each lane and `reset` is True wherever one begins.
    Songs go to the lane that is shortest so far; at a lane's end `mask` is False.
    """
    songs = _songs(sequences)
    if lengths is None:
        chunk = _fitting(chunk, songs.frames)
    allowed = _allowed(chunk, lengths)
    order = order_of(len(songs), seed, epoch) if shuffle else np.arange(len(songs))
    order = order[songs.lengths[order] > 0]
    if lanes < 1:
        raise ValueError(f"lanes={lanes} must be at least 1")
    if lanes > 1:
        columns = _lay_lanes(songs, order, lanes)
        pieces = _cut(max(map(len, columns)), chunk, allowed)
        return _plan_of_columns(columns, pieces, songs)
    rows, pieces = [], []
    for song in order:
        target = _rows_of(songs, song)
        pieces_of_song = _cut(len(target), chunk, allowed)
        pieces += pieces_of_song
        rows.append(_padded(target, sum(pieces_of_song)))
    column = np.concatenate(rows) if rows else np.zeros(0, np.int32)
    return _plan_of_columns([column], pieces, songs)


def text_chunks(
    ids: np.ndarray, *, chunk: int, lanes: int = 1, warm_up: int = 0, lengths: Sequence[int] | None = None
) -> EpochPlan:
    """A text as `lanes` parallel streams in chunks: every symbol but the first is a target exactly once.

    The state starts at zero in each lane. `warm_up` lets every lane but the first read that many symbols of
    the lane before it, unscored, so that parallel evaluation comes close to one long stream.
    """
    ids = np.asarray(ids)
    if ids.ndim != 1 or len(ids) < 2:
        raise ValueError(f"a text needs at least two symbols to predict one; it has shape {ids.shape}")
    if lanes < 1 or warm_up < 0:
        raise ValueError(f"lanes={lanes} must be at least 1 and warm_up={warm_up} at least 0")
    warm_up = min(warm_up, len(ids) - 1)
    per_lane = -(-(len(ids) - 1) // lanes)
    if lengths is None:
        chunk = _fitting(chunk, per_lane + warm_up)
    allowed = _allowed(chunk, lengths)
    first = 1 + per_lane * np.arange(lanes)  # the first target of each lane
    total = per_lane + (warm_up if lanes > 1 else 0)
    pieces = _cut(total, chunk, allowed)
    begin = np.maximum(first - (warm_up if lanes > 1 else 0), 1)
    steps = np.arange(sum(pieces))[:, None]
    rows = begin + steps  # (S, lanes)
    mask = (rows >= first) & (rows < np.minimum(first + per_lane, len(ids)))
    reset = np.broadcast_to(steps == 0, rows.shape)
    rows = np.minimum(rows, len(ids) - 1).astype(np.int32)
    return EpochPlan(
        torch.from_numpy(ids.copy()),
        torch.from_numpy(rows),
        torch.from_numpy(mask),
        torch.from_numpy(reset.copy()),
        *_spans(pieces),
    )


def music_evaluation(sequences: Sequence[np.ndarray], *, chunk: int = 200, width: int = 64) -> EpochPlan:
    """Every frame of every song once: `width` songs side by side, padded and masked, state carried.

    Songs of like length share a group; a group's first batch resets all lanes. Lengths beyond one chunk are
    rounded up to whole chunks' parts, so few shapes occur.
    """
    songs = _songs(sequences)
    chunk = _fitting(chunk, int(songs.lengths.max(initial=1)))
    allowed = _allowed(chunk, None)
    order = np.argsort(-songs.lengths, kind="stable")
    order = order[songs.lengths[order] > 0]
    width = max(1, min(width, len(order)))
    blocks, pieces = [], []
    for at in range(0, len(order), width):
        group = [_rows_of(songs, song) for song in order[at : at + width]]
        lengths = _cut(len(group[0]), chunk, allowed)
        group += [np.zeros(0, np.int32)] * (width - len(group))
        blocks.append(np.stack([_padded(rows, sum(lengths)) for rows in group], 1))
        pieces += lengths
    columns = list(np.concatenate(blocks).T) if blocks else [np.zeros(0, np.int32)]
    return _plan_of_columns(columns, pieces, songs)


def text_evaluation(ids: np.ndarray, *, chunk: int = 200, streams: int = 1, warm_up: int = 0) -> EpochPlan:
    """Every symbol but the first once, the state carried over the whole split: exact with one stream."""
    return text_chunks(ids, chunk=chunk, lanes=streams, warm_up=warm_up)


def _songs(sequences: Sequence[np.ndarray]) -> Songs:
    if isinstance(sequences, Songs):
        return sequences
    pitches = sequences[0].shape[1] if len(sequences) else 88
    return Songs.pack(sequences, pitches)


def _fitting(chunk: int, longest: int) -> int:
    """`chunk`, cut to where its first quarter holds the longest sequence: all beyond would be padding."""
    return min(chunk, PARTS * max(1, longest))


def _allowed(chunk: int, lengths: Sequence[int] | None) -> Sequence[int]:
    if isinstance(lengths, range) and lengths.step == 1:
        allowed = lengths  # as it is: written out, the lengths up to a large chunk would fill the memory
    else:
        allowed = tuple(sorted({*lengths})) if lengths else chunk_lengths(chunk)
    if not allowed or allowed[-1] != chunk or allowed[0] < 1:
        raise ValueError(f"lengths={allowed} must be positive and end with chunk={chunk}")
    return allowed


def _cut(total: int, chunk: int, allowed: Sequence[int]) -> list[int]:
    """Lengths of the batches that cover `total` steps: whole chunks, then the smallest that fits the rest."""
    whole, rest = divmod(total, chunk)
    return [chunk] * whole + ([allowed[bisect_left(allowed, rest)]] if rest else [])


def _rows_of(songs: Songs, song: int) -> np.ndarray:
    start = 1 + int(songs.starts[song])  # row 0 is silence
    return np.arange(start, start + int(songs.lengths[song]), dtype=np.int32)


def _padded(rows: np.ndarray, length: int) -> np.ndarray:
    return np.pad(rows, (0, length - len(rows)))


def _lay_lanes(songs: Songs, order: np.ndarray, lanes: int) -> list[np.ndarray]:
    filled = np.zeros(lanes, np.int64)
    columns: list[list[np.ndarray]] = [[np.zeros(0, np.int32)] for _ in range(lanes)]
    for song in order:
        lane = int(filled.argmin())
        columns[lane].append(_rows_of(songs, song))
        filled[lane] += songs.lengths[song]
    return [np.concatenate(column) for column in columns]


def _plan_of_columns(columns: list[np.ndarray], pieces: list[int], songs: Songs) -> EpochPlan:
    total = sum(pieces)
    rows = np.stack([_padded(column, total) for column in columns], 1)  # (S, B)
    is_first = np.zeros(songs.frames + 1, bool)
    is_first[1 + songs.starts[songs.lengths > 0]] = True
    table = np.concatenate([np.zeros((1, songs.packed.shape[1]), np.uint8), songs.packed])
    return EpochPlan(
        torch.from_numpy(table),
        torch.from_numpy(rows),
        torch.from_numpy(rows > 0),
        torch.from_numpy(is_first[rows]),
        *_spans(pieces),
        pitches=songs.pitches,
    )


def _spans(pieces: list[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    ends = np.cumsum(pieces) if pieces else np.zeros(0, np.int64)
    return tuple(int(e - n) for e, n in zip(ends, pieces, strict=True)), tuple(pieces)
