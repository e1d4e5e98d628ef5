"""Text as streams of characters or words, in the smallest integers that hold the vocabulary.

A text is counted and encoded block by block: a Python object for each of its words, or four bytes for each
of its characters, are there for one block only.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from deeprnn.data.limits import check_memory
from deeprnn.errors import UserError

UNKNOWN, END = "<unk>", "<eos>"
BLOCK = 1 << 18
"""Characters of a block."""

_TYPE_BYTES = 300  # what a distinct word takes: itself, its count and its place in the vocabulary
_WHITE_SPACE = re.compile(r"\s")


@dataclass
class TextData:
    """Symbol ids by split, and the vocabulary that the training part defined."""

    name: str
    kind: str  # "char" or "word"
    splits: dict[str, np.ndarray]
    vocabulary: list[str]
    unknown: dict[str, int] = field(default_factory=dict)  # symbols read as <unk>, by split
    remarks: list[str] = field(default_factory=list)  # what to know before training on it

    def __post_init__(self) -> None:
        self._index = {symbol: i for i, symbol in enumerate(self.vocabulary)}

    @property
    def sizes(self) -> dict[str, int]:
        """Symbols of each split."""
        return {split: len(ids) for split, ids in self.splits.items()}

    @property
    def size(self) -> int:
        """Number of symbols: the model's input and output size."""
        return len(self.vocabulary)

    def encode(self, text: str) -> np.ndarray:
        """Ids of a text; a symbol outside the vocabulary becomes `<unk>`, or an error where there is none."""
        return np.concatenate([encode(block, self._index) for block in symbol_blocks(text, self.kind)])

    def decode(self, ids: Iterable[int]) -> str:
        """The text of some ids: `<eos>` is a line's end."""
        symbols = [self.vocabulary[int(i)] for i in ids]
        if self.kind == "char":
            return "".join(symbols)
        lines = " ".join(symbols).split(END)
        return "\n".join(line.strip() for line in lines)


def smallest_integer(count: int) -> np.dtype:
    """The smallest integer type that numpy and torch both index with, for ids below `count`."""
    for dtype in (np.uint8, np.int16, np.int32):
        if count - 1 <= np.iinfo(dtype).max:
            return np.dtype(dtype)
    raise UserError(f"a vocabulary of {count:,} symbols is too large")


def treebank_characters(text: str, counting: str = "authors") -> str:
    """The Treebank text as the character stream that is scored.

    "authors" strips each line's leading space and keeps the space before the newline (446,184 symbols in
    the test part); "stripped" takes that one away too (442,423). The newline ends a sentence.
    """
    if counting not in ("authors", "stripped"):
        raise UserError(f"counting={counting!r} is unknown: use 'authors' or 'stripped'")
    lines = text.splitlines()
    if counting == "stripped":
        return "".join(line.strip(" ") + "\n" for line in lines)
    return "".join(line.removeprefix(" ") + "\n" for line in lines)


def word_symbols(text: str) -> list[str]:
    """Words split at white space, with `<eos>` for each line's end."""
    symbols: list[str] = []
    lines = text.split("\n")
    for line in lines[:-1]:
        symbols += line.split()
        symbols.append(END)
    return symbols + lines[-1].split()


def symbol_blocks(text: str, kind: str) -> Iterator[str | list[str]]:
    """The symbols of a text in blocks, one at least: characters as strings, words as lists."""
    at = 0
    while at == 0 or at < len(text):
        stop = at + BLOCK
        if kind == "word":  # no word is torn apart
            space = _WHITE_SPACE.search(text, stop)
            stop = space.end() if space else len(text)
        block = text[at:stop]
        yield block if kind == "char" else word_symbols(block)
        at = max(stop, 1)


def build_vocabulary(
    symbols: Iterable[str] | Counter[str], *, minimum: int = 1, unknown: bool = True
) -> list[str]:
    """Symbols seen at least `minimum` times, most frequent first, ties in order of code points.

    `<unk>` is added where `unknown` asks for it and the text does not already spell it.
    """
    counts = symbols if isinstance(symbols, Counter) else Counter(symbols)
    vocabulary = sorted(symbol for symbol, count in counts.items() if count >= minimum)
    vocabulary.sort(key=counts.__getitem__, reverse=True)  # stable: ties stay in order
    if unknown and UNKNOWN not in vocabulary:
        vocabulary.append(UNKNOWN)
    return vocabulary


def encode(symbols: str | Sequence[str], index: Mapping[str, int]) -> np.ndarray:
    """Ids in the smallest integer type; unknown symbols take `<unk>`'s. A string is a stream of characters."""
    unknown = index.get(UNKNOWN, -1)
    if isinstance(symbols, str):  # one table look-up over code points
        numbers = {ord(symbol): number for symbol, number in index.items() if len(symbol) == 1}
        table = np.full(max(numbers, default=0) + 2, unknown, np.int32)
        table[list(numbers)] = list(numbers.values())
        ids = table[np.minimum(code_points(symbols), len(table) - 1)]  # the last place is no symbol's
    else:
        ids = np.fromiter((index.get(s, unknown) for s in symbols), np.int32, len(symbols))
    if len(ids) and ids.min() < 0:
        missing = sorted({str(symbols[int(i)]) for i in np.flatnonzero(ids < 0)[:1000]})[:5]
        raise UserError(f"symbols {missing} are not in the vocabulary, which has no {UNKNOWN}")
    return ids.astype(smallest_integer(len(index)))


def code_points(text: str) -> np.ndarray:
    """The characters of a text as numbers: (N,) uint32."""
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), "<u4")


def text_data(
    name: str,
    kind: str,
    parts: Mapping[str, str],
    *,
    minimum: int = 1,
    unknown: bool = True,
) -> TextData:
    """Streams of characters or words; the vocabulary comes from the training part alone."""
    if kind not in ("char", "word"):
        raise UserError(f"kind={kind!r} is unknown: text is read as 'char' or 'word'")
    if not (counts := _counts(parts.get("train", ""), kind, name)):
        raise UserError(
            f"{name}: the training part is empty, so there is no vocabulary: add files, or name them by split"
        )
    data = TextData(name, kind, {}, build_vocabulary(counts, minimum=minimum, unknown=unknown))
    del counts
    for part, text in parts.items():
        data.splits[part] = data.encode(text)
        data.unknown[part] = _missing(data, part, text)
    return data


def _counts(text: str, kind: str, name: str) -> Counter[str]:
    """How often each symbol occurs."""
    if kind == "word":
        words: Counter[str] = Counter()
        for block in symbol_blocks(text, kind):
            words.update(block)
            check_memory(_TYPE_BYTES * len(words), len(text), f"{name}, with {len(words):,} different words,")
        return words
    characters: Counter[str] = Counter()
    for block in symbol_blocks(text, kind):
        codes, counts = np.unique(code_points(str(block)), return_counts=True)
        characters.update(dict(zip(map(chr, codes), counts.tolist(), strict=True)))
    return characters


def _missing(data: TextData, part: str, text: str) -> int:
    """How many symbols were read as `<unk>` that do not spell it themselves."""
    if UNKNOWN not in data.vocabulary:
        return 0
    read = int((data.splits[part] == data.vocabulary.index(UNKNOWN)).sum())
    if data.kind == "char":
        return read
    return read - sum(block.count(UNKNOWN) for block in symbol_blocks(text, "word"))
