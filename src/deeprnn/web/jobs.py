"""Work in a few threads, with a bounded queue: 503 instead of collapse, and no work for clients that left."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import aclosing
from typing import Any, TypeVar

import anyio
import anyio.to_thread
from starlette.responses import StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from deeprnn.web.limits import Limits
from deeprnn.web.refusals import Refusal

T = TypeVar("T")
_END = object()
PART = 1 << 18  # bytes handed over at once: the next ones wait until the client has taken these
SOUNDS_HELD = 4  # sound files in memory, being made or sent: each may have 100 MB


class Seats:
    """A counted number of places; the next asker is sent away."""

    def __init__(self, most: int, what: str) -> None:
        self.most, self.what, self.in_use = most, what, 0

    def take(self) -> Seat:
        """A place, to be given back; refuses when all are taken."""
        if self.in_use >= self.most:
            raise Refusal(503, f"the server is busy with {self.in_use} {self.what}: try again in a moment",
                          retry_after="2")  # fmt: skip
        self.in_use += 1
        return Seat(self)


class Seat:
    """One place, given back once."""

    def __init__(self, seats: Seats) -> None:
        self._seats: Seats | None = seats

    def leave(self) -> None:
        """Give it back."""
        if self._seats is not None:
            self._seats.in_use -= 1
            self._seats = None

    def __enter__(self) -> Seat:
        return self

    def __exit__(self, *_: object) -> None:
        self.leave()


class Workshop:
    """The threads that compute, and the queues before them.

    A long answer is made in chunks and waits in line anew for each, so that many clients advance together.
    Sounds take seconds and much memory: they have a thread and a queue of their own, one after another.
    """

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.seats = Seats(limits.jobs, "requests")
        self.sounds = Seats(limits.sounds, "sounds")
        self._threads = anyio.CapacityLimiter(limits.workers)
        self._files = anyio.CapacityLimiter(4)
        self._sound_thread = anyio.CapacityLimiter(1)
        self._sounds_held = anyio.Semaphore(SOUNDS_HELD)
        self._sound_turn = anyio.Lock()
        self.chunks = 0
        """made so far"""

    async def run(self, work: Callable[..., T], *args: Any) -> T:
        """One piece of work in a thread."""
        with self.seats.take():
            # The thread is waited for even when the client left: its work is short and its place stays counted.
            return await anyio.to_thread.run_sync(work, *args, limiter=self._threads)

    async def quick(self, work: Callable[..., T], *args: Any) -> T:
        """A look at a few files: off the loop, but not in the queue of those who compute."""
        return await anyio.to_thread.run_sync(work, *args, limiter=self._files)

    def stream(self, chunks: Iterator[Any]) -> JobResponse:
        """A streamed answer: one JSON document a line, made in a thread between the lines."""
        seat = self.seats.take()
        return JobResponse(self._lines(chunks), seat, self.limits.job_seconds, "application/x-ndjson")

    def sound(self, chunks: Iterator[bytes]) -> JobResponse:
        """A sound file, made and then sent; the iterator's last item is the file."""
        seat = self.sounds.take()
        return JobResponse(self._parts(chunks), seat, self.limits.job_seconds, "audio/wav")

    async def _lines(self, chunks: Iterator[Any]) -> AsyncIterator[bytes]:
        try:
            async with aclosing(self._made(chunks, self._threads)) as made:
                async for chunk in made:
                    yield line(chunk)
        except (Refusal, ValueError) as error:  # too late for a status: say it in the stream
            yield line({"error": str(error)})

    async def _parts(self, chunks: Iterator[bytes]) -> AsyncIterator[bytes]:
        async with self._sounds_held:
            content = b""
            async with self._sound_turn, aclosing(self._made(chunks, self._sound_thread)) as made:
                async for chunk in made:
                    content = chunk  # the last one is the file
            for first in range(0, len(content), PART):
                yield content[first : first + PART]

    async def _made(self, chunks: Iterator[T], threads: anyio.CapacityLimiter) -> AsyncGenerator[T, None]:
        """What an iterator gives, each item made in a thread; closed when the client leaves."""
        try:
            while (chunk := await anyio.to_thread.run_sync(next, chunks, _END, limiter=threads)) is not _END:
                self.chunks += 1
                yield chunk  # type: ignore[misc]
        finally:
            close = getattr(chunks, "close", None)
            if close is not None:
                close()


class JobResponse(StreamingResponse):
    """A stream that holds a seat until it ends, the client leaves or its time is over."""

    def __init__(self, content: AsyncIterator[bytes], seat: Seat, seconds: float, media_type: str) -> None:
        super().__init__(content, media_type=media_type, headers={"cache-control": "no-store"})
        self._seat, self._seconds, self._content = seat, seconds, content

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the stream; its head goes out with the first bytes, so that one without any can still be refused."""
        head: list[Message] = []

        async def send_late(message: Message) -> None:
            if message["type"] == "http.response.start":
                head.append(message)
                return
            while head:
                await send(head.pop())
            await send(message)

        try:
            with anyio.move_on_after(self._seconds) as time:
                await super().__call__(scope, receive, send_late)
            if time.cancelled_caught and head:
                raise Refusal(503, f"the server is busy, and this was not begun or done in {self._seconds:g} seconds: "
                                   "try again in a moment", retry_after="10")  # fmt: skip
        finally:
            with anyio.CancelScope(shield=True):
                await self._content.aclose()  # type: ignore[attr-defined]
            self._seat.leave()


def line(value: Any) -> bytes:
    """One JSON document on a line of its own."""
    return json.dumps(value, separators=(",", ":")).encode() + b"\n"
