"""Learning curves as they grow: a run's metrics and its running epoch followed and sent as server-sent events."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from deeprnn.errors import UserError
from deeprnn.runs.reading import open_regular
from deeprnn.web.jobs import Seat
from deeprnn.web.library import LARGEST_METRICS, Library, ListedRun
from deeprnn.web.summary import parse_rows

PAUSE = 0.5  # seconds between looks
BEAT = 15.0  # seconds of silence after which a comment is sent, so that a dead connection is noticed


class Tail:
    """Whole new lines of a growing file; one that was replaced or cut is read from its start."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: tuple[int, int] | None = None
        self._offset = 0

    def look(self) -> tuple[bool, list[dict[str, Any]]]:
        """(whether the file began anew or went away, new rows)."""
        try:
            with open_regular(self.path) as file:
                status = os.fstat(file.fileno())
                fresh = self._file != (status.st_dev, status.st_ino) or status.st_size < self._offset
                if fresh:
                    self._file, self._offset = (status.st_dev, status.st_ino), 0
                file.seek(self._offset)
                new = file.read(LARGEST_METRICS)
        except (OSError, UserError):  # the run's summary tells the reason
            lost, self._file = self._file is not None, None
            return lost, []
        lines = new[: new.rfind(b"\n") + 1]
        self._offset += len(lines)
        return fresh, parse_rows(lines)


async def follow(library: Library, entry: ListedRun) -> AsyncIterator[bytes]:
    """Events: `rows` and `progress` (begin anew or append), `status` when it changes, `end` when the run is over."""
    epochs, progress = Tail(entry.path / "metrics.jsonl"), Tail(entry.path / "progress.jsonl")
    status, silent = None, 0.0
    while True:
        began, rows = await anyio.to_thread.run_sync(epochs.look)
        if began or rows:
            yield event("rows", {"reset": began, "rows": rows})
        anew, points = await anyio.to_thread.run_sync(progress.look)
        if anew or points:
            yield event("progress", {"reset": anew, "rows": points})
        summary = await anyio.to_thread.run_sync(_summary, library, entry)
        if summary != status:
            status = summary
            yield event("status", summary)
            silent = 0.0
        if not rows and (summary is None or summary["status"] != "running"):
            yield event("end", {"status": summary["status"] if summary else "gone"})
            return
        await anyio.sleep(PAUSE)
        silent += PAUSE
        if silent >= BEAT:
            silent = 0.0
            yield b": still here\n\n"


def _summary(library: Library, entry: ListedRun) -> dict[str, Any] | None:
    return library.again(entry) if entry.path.is_dir() else None


def event(name: str, value: Any) -> bytes:
    """One server-sent event."""
    return f"event: {name}\ndata: {json.dumps(value, separators=(',', ':'))}\n\n".encode()


class LiveResponse(StreamingResponse):
    """An event stream that gives its seat back when the client leaves."""

    def __init__(self, content: AsyncIterator[bytes], seat: Seat) -> None:
        super().__init__(content, media_type="text/event-stream", headers={"cache-control": "no-store"})
        self._seat, self._content = seat, content

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send until the end or the client's."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            with anyio.CancelScope(shield=True):
                await self._content.aclose()  # type: ignore[attr-defined]
            self._seat.leave()
