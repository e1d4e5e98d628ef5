"""The HTTP server under the page: uvicorn, hanging up on clients that keep it waiting."""

from __future__ import annotations

import asyncio

import uvicorn
from starlette.applications import Starlette
from uvicorn.protocols.http.h11_impl import H11Protocol

from deeprnn.web.limits import Limits


class ImpatientProtocol(H11Protocol):
    """uvicorn's HTTP with two deadlines.

    uvicorn counts every connection towards its limit, but waits for ever for the rest of a request's head, and
    for a client to take what was sent: some hundred half-open connections would keep everybody else out.
    """

    _head_deadline: asyncio.TimerHandle | None = None  # by then a whole request's head has to be here
    _read_deadline: asyncio.TimerHandle | None = (
        None  # by then the client has to have taken what waits for it
    )

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """The clock starts with the connection."""
        super().connection_made(transport)
        self._wait_for_request()

    def data_received(self, data: bytes) -> None:
        """A few bytes do not stop the clock, a whole head does."""
        super().data_received(data)
        self._wait_for_request()

    def on_response_complete(self) -> None:
        """The next request has the same time again."""
        self._head_deadline = _cancelled(self._head_deadline)
        super().on_response_complete()
        self._wait_for_request()

    def pause_writing(self) -> None:
        """The client takes nothing, for now."""
        super().pause_writing()
        self._read_deadline = self._read_deadline or self.loop.call_later(
            3 * self.timeout_keep_alive, self.transport.abort
        )

    def resume_writing(self) -> None:
        """The client reads again."""
        super().resume_writing()
        self._read_deadline = _cancelled(self._read_deadline)

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is closed: cancel both deadlines."""
        self._head_deadline, self._read_deadline = (
            _cancelled(self._head_deadline),
            _cancelled(self._read_deadline),
        )
        super().connection_lost(exc)

    def _wait_for_request(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            self._head_deadline = _cancelled(self._head_deadline)
        elif self._head_deadline is None:
            self._head_deadline = self.loop.call_later(self.timeout_keep_alive, self.transport.close)


def _cancelled(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()


def make_server(app: Starlette, limits: Limits) -> uvicorn.Server:
    """A server for the page, to be run with a socket that listens."""
    config = uvicorn.Config(
        app,
        http=ImpatientProtocol,
        ws="none",
        log_level="warning",
        server_header=False,
        limit_concurrency=limits.connections,
        timeout_keep_alive=limits.request_seconds,  # type: ignore[arg-type]
        timeout_graceful_shutdown=2,
    )
    return uvicorn.Server(config)
