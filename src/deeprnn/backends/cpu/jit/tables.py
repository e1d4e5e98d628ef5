"""The tables that Python fills and machine code reads: arrays of 64-bit words, and what each word means.

Addresses, byte counts and strides are in bytes. A *view* says where a step's rows of a tensor lie; a *stage* is the
tiles of one stage of the cell; a *sum* is what a tile of matrix products adds up, one *term* for each matrix.
"""

from __future__ import annotations

from enum import IntEnum, auto
from functools import cache

TALLEST = 8
"""rows of a tile at most"""


class Word(IntEnum):
    """Words are numbered from 0; `size()` is how many there are."""

    @staticmethod
    def _generate_next_value_(name: str, start: int, count: int, last_values: list[int]) -> int:
        return count

    @classmethod
    @cache
    def size(cls) -> int:
        """Words of one entry."""
        return len(cls)


class Call(Word):
    """What changes from call to call; the tensors' addresses follow, then the distances between members."""

    PLAN = auto()  # address of the plan
    WORKER = auto()  # address of the function that runs the share of one thread
    PARTS = auto()  # threads
    STEPS = auto()
    MEMBERS = auto()
    THREADS_MISSING = auto()  # set where OpenMP gave fewer threads than asked for, and nothing was run
    THREAD_COUNT = auto()  # address of omp_get_num_threads
    THREAD_NUMBER = auto()  # address of omp_get_thread_num


class Plan(Word):
    """What is decided by shapes: the first entry of the plan; offsets are in words from its beginning."""

    TENSORS = auto()  # how many
    COUNTER = auto()  # word of the call in which threads count their arrivals at barriers
    VIEWS = auto()  # offset
    VIEW_COUNT = auto()
    STAGES = auto()  # offset
    STAGE_COUNT = auto()
    FINAL_COUNT = auto()  # stages that run once more after the last step, behind the others
    PACKINGS = auto()  # offset
    PACKING_COUNT = auto()
    REVERSE = auto()  # 1: from the last step to the first
    PARTS = auto()  # threads
    BY_COLUMNS = auto()  # 1: threads share each stage's panels; 0: they share members and rows
    BATCH = auto()
    ROW_PARTS = auto()  # of the batch
    BLOCKS = auto()  # of rows, in each share
    LANES = auto()  # numbers in a vector
    HEIGHT = auto()  # rows of a block, unless it is one of those that are one row taller
    TILE_BYTES = auto()  # scratch memory of one sum
    SCRATCH_BYTES = auto()
    MOST_TERMS = auto()  # of one sum
    UNPACKED = auto()  # 1: tiles read the matrices as they are
    WEIGHTS = auto()  # tensor that holds packed weights
    ZEROS = auto()  # tensor of zeros: a row of it stands for a state that was reset


class View(Word):
    """A tensor's row b at step t begins at base + offset + (t + shift) · time stride + b · row stride."""

    TENSOR = auto()
    OFFSET = auto()
    TIME = auto()
    ROW = auto()
    SHIFT = auto()
    DOUBLE_BUFFERED = auto()  # 1: only two steps are kept, the even and the odd one
    BOUNDARY = (
        auto()
    )  # tensor that stands for steps before the first and after the last, -1: there is nothing


class BoundView(Word):
    """A view with the addresses of one member's tensors."""

    BASE = auto()
    TIME = auto()
    SHIFT = auto()
    STEP_MASK = auto()  # bits of a step's number that count: all, or in a ring the last
    STEPS = auto()  # that there are
    BOUNDARY = auto()  # address for other steps, 0: there is nothing


class Stage(Word):
    """Panels of units, and what is done for each."""

    SIZE = auto()  # units
    VIEWS = auto()  # number of its first view
    PANELS = auto()  # of each thread that shares columns
    WIDTH = auto()  # vectors of a panel
    WIDE = auto()  # the first so many panels are one vector wider
    POINTWISE = auto()  # address of the function behind the sums
    BARRIER = auto()  # 1: others wait for what it computes
    SUMS = auto()  # offset
    SUM_COUNT = auto()
    TALL_WIDE = auto()  # addresses of the functions for tiles
    TALL_NARROW = auto()
    SHORT_WIDE = auto()
    SHORT_NARROW = auto()


class Sum(Word):
    """Products added up."""

    WEIGHTS = auto()  # where the first panel's packed weights begin
    DEPTH = auto()  # length of all terms together
    TERMS = auto()  # offset
    TERM_COUNT = auto()


class Term(Word):
    """A matrix times a vector."""

    VIEW = auto()  # of the vector
    MARKS = auto()  # view of the reset marks that turn it to zero, -1: none
    DEPTH = auto()  # length of the vector
    MATRIX = auto()  # tensor
    OFFSET = auto()
    STRIDE = auto()  # from unit to unit


class Packing(Word):
    """A term's weights copied into panels."""

    FUNCTION = auto()
    MATRIX = auto()  # tensor
    OFFSET = auto()
    STRIDE = auto()
    TARGET = auto()
    SIZE = auto()
    PANELS = auto()
    WIDTH = auto()
    WIDE = auto()
    DEPTH = auto()
    ABOVE = auto()  # depth of the terms before it in the same sum
    SUM_DEPTH = auto()


class OuterSum(Word):
    """A matrix of sums Σ_k left[k, i] · right[k, j]; or, without a right side, a row of sums of left's columns."""

    LEFT = auto()  # address of its first row
    LEFT_ROW = auto()  # bytes from row to row
    ROWS = auto()  # of the result: columns of left
    RIGHT = auto()  # address, 0: there is none
    RIGHT_ROW = auto()
    COLUMNS = auto()  # of the result and of right
    HEAD = auto()  # address of the rows that stand before those of right
    HEAD_ROW = auto()
    HEAD_COUNT = auto()
    MARKS = (
        auto()
    )  # address of a byte for each k: where it is set, right's row counts as zero; 0: there are none
    COUNT = auto()  # of k
    OUT = auto()  # address
    OUT_ROW = auto()
    PANELS = auto()  # of columns
    WIDTH = auto()  # vectors of a panel
    WIDE = auto()  # the first so many panels are one vector wider
    HEIGHT = auto()  # rows of a tile but for the last
    CHUNK = auto()  # tiles below each other to which all blocks are added before the next are begun
    TALL_WIDE = auto()  # addresses of the functions for tiles; "short" are those of the last rows
    TALL_NARROW = auto()
    SHORT_WIDE = auto()
    SHORT_NARROW = auto()


class TileTerm(Word):
    """A term as the function for a tile reads it; the addresses of the vector's rows follow."""

    DEPTH = auto()
    WEIGHTS = auto()
    STRIDE = auto()  # from unit to unit, where weights are not packed
    ROWS = auto()
