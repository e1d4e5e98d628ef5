"""The page, served by a process of its own, and a client that may send anything."""

from __future__ import annotations

import os
import re
import select
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from tests.torture import child

START = 30.0
ANSWER, LINGER = 30.0, 10.0
"""seconds for an answer, on a machine that is busy; and for its end"""


class Answer(NamedTuple):
    """What came back; status 0 where the server hung up without a word."""

    status: int
    head: str
    body: bytes
    worked: float
    """seconds of the processor that the server spent meanwhile"""


@dataclass
class Page:
    """A server that was started here."""

    process: int
    port: int
    said: child.Pipe
    at_rest: float
    """megabytes before the first request"""

    def send(self, request: bytes, patience: float = ANSWER) -> Answer:
        """Bytes to the server, and what it says to them; after so long without a word the client says it is done."""
        began, worked = time.monotonic(), child.processor_seconds(self.process)
        with socket.create_connection(("127.0.0.1", self.port), timeout=ANSWER) as wire:
            try:
                wire.sendall(request)
                if not select.select([wire], [], [], patience)[0]:
                    wire.shutdown(socket.SHUT_WR)
            except (BrokenPipeError, ConnectionResetError):  # it had heard enough
                pass
            content = _received(wire, began + patience + LINGER)
        head, _, body = content.partition(b"\r\n\r\n")
        status = re.match(rb"HTTP/1\.[01] (\d{3})", head)
        found = int(status[1]) if status else 0
        return Answer(found, head.decode("latin-1"), body, child.processor_seconds(self.process) - worked)

    def get(self, path: str) -> Answer:
        """An ordinary request."""
        return self.send(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())

    def post(self, path: str, body: bytes) -> Answer:
        """An ordinary request with a body."""
        return self.send(post(path, body))

    def grown(self) -> float:
        """Megabytes that the server held at most beyond what it began with."""
        return child.peak(self.process) - self.at_rest

    def check_well(self, answer: Answer) -> None:
        """The server lives, has not failed, and told nobody how it is built."""
        self.said.drain()
        log = self.said.content.decode("utf-8", "replace")
        assert not child.wait(self.process, 0), f"the server died: {log[-300:]}"
        assert "Traceback (most" not in log, f"a traceback in the server's log: {child.last_call(log)}"
        assert answer.status < 500 or answer.status == 503, f"status {answer.status}: {answer.body[:200]!r}"
        assert b"Traceback (most" not in answer.body, "a traceback was sent to the client"


def post(path: str, body: bytes, length: int | None = None) -> bytes:
    """A request with a body, which may claim another length."""
    head = (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Type: application/json\r\n"
    )
    claimed = len(body) if length is None else length
    return f"{head}Content-Length: {claimed}\r\n\r\n".encode("utf-8", "replace") + body


def _received(wire: socket.socket, until: float) -> bytes:
    parts = []
    while True:
        wire.settimeout(max(0.01, until - time.monotonic()))
        try:
            part = wire.recv(1 << 16)
        except TimeoutError:
            raise AssertionError("no end of the answer in time") from None
        except ConnectionResetError:
            part = b""
        if not part:
            return b"".join(parts)
        parts.append(part)


@contextmanager
def served(folder: Path, megabytes: int = 4096) -> Iterator[Page]:
    """`deeprnn serve` over some runs, until the end of the block."""
    said = child.Pipe()

    def work() -> int:
        from deeprnn.cli import main

        os.environ["PYTHONUNBUFFERED"] = "1"
        return main(["serve", str(folder), "--port", "0"])

    process = child.start(work, said.entrance, said.entrance, megabytes)
    try:
        yield Page(process, _port(process, said), said, child.resident(process))
    finally:
        child.signal_group(process, signal.SIGKILL)
        child.reap(process)
        said.text()


def _port(process: int, said: child.Pipe) -> int:
    """The port that the server says it listens on, once it answers there."""
    until = time.monotonic() + START
    while time.monotonic() < until and not child.wait(process, 0):
        select.select([said.exit], [], [], 0.1)
        said.drain()
        told = re.search(rb"http://127\.0\.0\.1:(\d+)/", said.content)
        if told:
            return int(told[1])
    raise AssertionError(f"the server did not start: {said.content.decode('utf-8', 'replace')[-300:]}")
