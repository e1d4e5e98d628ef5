"""Launches recorded once for tensors of given shapes, and replayed with other addresses.

What the host does for a call (plans looked up, parameter blocks filled in, memory taken piece by piece) takes longer
than a small layer's loop on the card, and depends on shapes alone. So the functions that launch kernels are called once
with stand-ins: objects with a tensor's shape whose address says which of the tensors they stand for. Every parameter
block that reaches the driver then says by itself which of its words are addresses, of what, and how far into it. A
later call fills in those words and replays all launches in a row.

Stand-ins know views, `new_empty`, `new_zeros` and `clone`, which become memory, fills and copies of the recording.
Anything else would be an operation of torch, of which no record is made: `NotRecordable`.
"""

from __future__ import annotations

import ctypes
import math
from array import array
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from deeprnn.backends.cuda.driver import Kernel, PreparedCall, prepare_copy, prepare_fill, replay

TAG = 56  # bits below a stand-in's number: no count, stride or address in use is as large
MOST = (1 << 63 - TAG) - 1  # stand-ins, as parameter words are signed
ALIGNMENT = 512  # bytes, as torch's own allocations


class NotRecordable(Exception):
    """An operation of torch lies between the launches."""


class Launch(NamedTuple):
    """A recorded launch; `words` are its parameters, of which the last `plain_words` are no addresses."""

    kernel: Kernel
    grid: int
    rows: int
    threads: int
    words: tuple[int, ...]
    plain_words: int = 0


class Copy(NamedTuple):
    """Bytes from one stand-in's address to another's; `words`: to, from."""

    words: tuple[int, int]
    size: int


class Fill(NamedTuple):
    """Zeros; `words`: where."""

    words: tuple[int]
    size: int


class StandIn:
    """In the place of a contiguous tensor."""

    def __init__(self, recorder: Recorder, address: int, shape: Sequence[int], item: int = 4) -> None:
        self.recorder, self.address, self.shape, self.item = recorder, address, torch.Size(shape), item
        self.device = recorder.device

    def __getattr__(self, name: str) -> Any:
        raise NotRecordable(name)

    @classmethod
    def __torch_function__(cls, function: Any, *given: Any) -> Any:
        raise NotRecordable(str(function))

    def __len__(self) -> int:
        return self.shape[0]

    def data_ptr(self) -> int:
        """Which stand-in, and how many bytes into it."""
        return self.address

    def dim(self) -> int:
        return len(self.shape)

    def numel(self) -> int:
        return math.prod(self.shape)

    def stride(self, dim: int | None = None) -> Any:
        strides = tuple(math.prod(self.shape[i + 1 :]) for i in range(len(self.shape)))
        return strides if dim is None else strides[dim]

    def is_contiguous(self) -> bool:
        return True

    def contiguous(self) -> StandIn:
        return self

    def view(self, *shape: int) -> StandIn:
        if -1 in shape:
            rest = self.numel() // -math.prod(shape)
            shape = tuple(rest if n == -1 else n for n in shape)
        assert math.prod(shape) == self.numel()
        return StandIn(self.recorder, self.address, shape, self.item)

    def flatten(self, first: int, last: int) -> StandIn:
        joined = math.prod(self.shape[first : last + 1])
        return self.view(*self.shape[:first], joined, *self.shape[last + 1 :])

    def narrow(self, dim: int, start: int, length: int) -> StandIn:
        if dim != 0:
            raise NotRecordable("narrow")
        offset = start * math.prod(self.shape[1:]) * self.item
        return StandIn(self.recorder, self.address + offset, (length, *self.shape[1:]), self.item)

    def squeeze(self, dim: int) -> StandIn:
        shape = list(self.shape)
        assert shape.pop(dim) == 1
        return self.view(*shape)

    def new_empty(self, *sizes: Any, dtype: torch.dtype = torch.float32) -> StandIn:
        shape = sizes[0] if sizes and not isinstance(sizes[0], int) else sizes
        return self.recorder.take(shape, dtype.itemsize)

    def new_zeros(self, *sizes: Any, dtype: torch.dtype = torch.float32) -> StandIn:
        memory = self.new_empty(*sizes, dtype=dtype)
        self.recorder.steps.append(Fill((memory.address,), memory.numel() * memory.item))
        return memory

    def clone(self) -> StandIn:
        memory = self.new_empty(self.shape)
        self.recorder.copy(memory, self)
        return memory


class Recorder:
    """Collects launches while stand-ins are in the tensors' places."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.sizes: list[int] = []  # bytes of each stand-in
        self.inputs = 0
        self.steps: list[Launch | Copy | Fill] = []

    def stand_in(self, shape: Sequence[int]) -> StandIn:
        """For a tensor that a call will be given; all of these come first, in the order of `Recording.replay`."""
        assert self.inputs == len(self.sizes)
        self.inputs += 1
        return self.take(shape, 4)

    def take(self, shape: Sequence[int], item: int) -> StandIn:
        """Memory of the call's own."""
        if len(self.sizes) >= MOST:
            raise NotRecordable("too many tensors")
        self.sizes.append(math.prod(shape) * item)
        return StandIn(self, len(self.sizes) << TAG, shape, item)

    def launched(self, kernel: Kernel, grid: int, rows: int, threads: int, arguments: Sequence[Any]) -> None:
        """In the place of a launch; a kernel takes one structure of words."""
        (block,) = arguments
        count, rest = divmod(ctypes.sizeof(block), 8)
        assert not rest
        words = tuple((ctypes.c_int64 * count).from_buffer_copy(block))
        # A table of small numbers, several a word, would read as addresses: a structure that ends with one says so.
        plain_words = getattr(block, "plain_words", 0)
        self.steps.append(Launch(kernel, grid, rows, threads, words, plain_words))

    def copy(self, to: StandIn, source: StandIn) -> None:
        """A copy on the card."""
        self.steps.append(Copy((to.address, source.address), to.numel() * to.item))

    def finish(self, results: Sequence[StandIn], workspace: Sequence[StandIn] = ()) -> LaunchRecording:
        """`results` are tensors of their own, given after the others; `workspace` share one, given last."""
        return LaunchRecording(self, [self.number(x) for x in results], [self.number(x) for x in workspace])

    @staticmethod
    def number(x: StandIn) -> int:
        """Which stand-in it is."""
        return (x.address >> TAG) - 1


class _Bound(NamedTuple):
    """All parameters in one block of memory, and the driver's calls that read them there."""

    words: memoryview
    calls: list[PreparedCall]
    block: ctypes.Array


class LaunchRecording:
    """A row of launches that lacks addresses."""

    def __init__(self, recorder: Recorder, results: Sequence[int], workspace: Sequence[int]) -> None:
        places: dict[int, tuple[int, int]] = {i: (i, 0) for i in range(recorder.inputs)}
        for i in results:
            places[i] = len(places), 0
        self.workspace_bytes = self._joined(places, workspace, recorder.sizes, len(places))
        rest = [i for i in range(len(recorder.sizes)) if i not in places]
        self.scratch_bytes = self._joined(places, rest, recorder.sizes, recorder.inputs + len(results) + 1)
        self.workspace_offsets = [places[i][1] for i in workspace]
        self.device = recorder.device
        self.steps: list[tuple[Launch | Copy | Fill, int, int]] = []  # with its words' place, and how many
        self.addresses: list[tuple[int, int, int]] = []  # word, which address, bytes to add
        template: list[int] = []
        known: dict[tuple[int, ...], int] = {}  # kernels may share parameters
        for step in recorder.steps:
            if step.words not in known:
                known[step.words] = len(template)
                start, plain = len(template), getattr(step, "plain_words", 0)
                end = len(step.words) - plain
                template += [self._plain(word, start + i, places) for i, word in enumerate(step.words[:end])]
                template += step.words[end:]
            self.steps.append((step._replace(words=()), known[step.words], len(step.words)))  # type: ignore[arg-type]
        self.template = array("q", template)
        # A launch copies its parameters, so that a block is free again when the launches return.
        self._idle: list[_Bound] = []

    def _plain(self, word: int, at: int, places: dict[int, tuple[int, int]]) -> int:
        """A word that is no address; one that is becomes zero and is noted."""
        if word >> TAG <= 0:
            return word
        base, offset = places[(word >> TAG) - 1]
        self.addresses.append((at, base, offset + (word & (1 << TAG) - 1)))
        return 0

    @staticmethod
    def _joined(
        places: dict[int, tuple[int, int]], which: Sequence[int], sizes: Sequence[int], base: int
    ) -> int:
        end = 0
        for i in which:
            places[i] = base, end
            end += -(-sizes[i] // ALIGNMENT) * ALIGNMENT
        return end

    def replay(self, addresses: list[int], stream: int | None) -> None:
        """Launch all of it. `addresses`: of what was given, the results, and the workspace (or 0)."""
        scratch = None
        if self.scratch_bytes:
            scratch = torch.empty(self.scratch_bytes, dtype=torch.uint8, device=self.device)
            addresses.append(scratch.data_ptr())
        try:
            bound = self._idle.pop()
        except IndexError:  # the first call, or every block is in use by another thread
            bound = self._bind()
        words = bound.words
        for place, base, offset in self.addresses:
            words[place] = addresses[base] + offset
        replay(bound.calls, stream)
        self._idle.append(bound)

    def _bind(self) -> _Bound:
        block = (ctypes.c_int64 * len(self.template))(*self.template)
        calls = []
        for step, start, count in self.steps:
            arguments = (ctypes.c_int64 * count).from_buffer(block, 8 * start)
            if isinstance(step, Launch):
                calls.append(step.kernel.prepare_call(step.grid, step.rows, step.threads, arguments))
            elif isinstance(step, Copy):
                calls.append(prepare_copy(arguments, step.size))
            else:
                calls.append(prepare_fill(arguments, step.size))
        return _Bound(memoryview(block).cast("B").cast("q"), calls, block)
