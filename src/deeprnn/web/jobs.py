"""Work in a few threads, with a bounded queue: 503 instead of collapse, and no work for clients that left."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, TypeVar

import anyio
import anyio.to_thread
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from deeprnn.web.limits import Limits
from deeprnn.web.refusals import Refusal

T = TypeVar("T")
_END = object()


class Seats:
    """A counted number of places; the next asker is sent away."""

    def __init__(self, most: int, what: str) -> None:
        self.most, self.what, self.taken = most, what, 0

    def take(self) -> Seat:
        """A place, to be given back; refuses when all are taken."""
        if self.taken >= self.most:
            raise Refusal(503, f"the server is busy with {self.taken} {self.what}: try again in a moment",
                          retry_after="2")  # fmt: skip
        self.taken += 1
        return Seat(self)


class Seat:
    """One place, given back once."""

    def __init__(self, seats: Seats) -> None:
        self._seats: Seats | None = seats

    def leave(self) -> None:
        """Give it back."""
        if self._seats is not None:
            self._seats.taken -= 1
            self._seats = None

    def __enter__(self) -> Seat:
        return self

    def __exit__(self, *_: object) -> None:
        self.leave()


class Workshop:
    """The threads that compute, and the queue before them.

    A long answer is made in chunks and waits in line anew for each, so that many clients advance together.
    """

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.seats = Seats(limits.jobs, "requests")
        self._threads = anyio.CapacityLimiter(limits.workers)
        self._files = anyio.CapacityLimiter(4)
        self.chunks = 0
        """made so far"""

    async def run(self, work: Callable[..., T], *args: Any) -> T:
        """One piece of work in a thread."""
        with self.seats.take():
            return await self._in_thread(work, *args)

    async def quick(self, work: Callable[..., T], *args: Any) -> T:
        """A look at a few files: off the loop, but not in the queue of those who compute."""
        return await anyio.to_thread.run_sync(work, *args, limiter=self._files)

    def stream(self, chunks: Callable[[], Iterator[Any]]) -> JobResponse:
        """A streamed answer: one JSON document a line, made in a thread between the lines."""
        seat = self.seats.take()
        return JobResponse(self._lines(chunks), seat, self.limits.job_seconds)

    async def _in_thread(self, work: Callable[..., T], *args: Any) -> T:
        # The thread is waited for even when the client left: its chunk is short and its place stays counted.
        return await anyio.to_thread.run_sync(work, *args, limiter=self._threads)

    async def _lines(self, chunks: Callable[[], Iterator[Any]]) -> AsyncIterator[bytes]:
        made = chunks()
        try:
            while True:
                try:
                    chunk = await self._in_thread(next, made, _END)
                except (Refusal, ValueError) as error:  # too late for a status: say it in the stream
                    yield line({"error": str(error)})
                    return
                if chunk is _END:
                    return
                self.chunks += 1
                yield line(chunk)
        finally:
            close = getattr(made, "close", None)
            if close is not None:
                close()


class JobResponse(StreamingResponse):
    """A stream that holds a seat until it ends, the client leaves or its time is over."""

    def __init__(self, content: AsyncIterator[bytes], seat: Seat, seconds: float) -> None:
        super().__init__(content, media_type="application/x-ndjson", headers={"cache-control": "no-store"})
        self._seat, self._seconds, self._content = seat, seconds, content

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the stream."""
        try:
            with anyio.move_on_after(self._seconds):
                await super().__call__(scope, receive, send)
        finally:
            with anyio.CancelScope(shield=True):
                await self._content.aclose()  # type: ignore[attr-defined]
            self._seat.leave()


def line(value: Any) -> bytes:
    """One JSON document on a line of its own."""
    return json.dumps(value, separators=(",", ":")).encode() + b"\n"
