"""Clients that keep the server waiting are hung up on."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from deeprnn.web.limits import Limits
from deeprnn.web.summary import ROW_KEYS
from tests.web.conftest import Server, serve
from tests.web.runs import write_run
from tests.web.test_live import eventually


@pytest.fixture
def impatient(tmp_path: Path) -> Iterator[Server]:
    write_run(tmp_path / "a")
    running = serve(tmp_path, Limits(request_seconds=0.5, connections=12))
    yield next(running)
    next(running, None)


def dial(server: Server) -> socket.socket:
    return socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2])), timeout=20)


def test_half_open_connections_do_not_keep_others_out(impatient: Server) -> None:
    beginnings = [b"", b"G", b"GET / HTTP/1.1\r\n", b"GET / HTTP/1.1\r\nHost: localhost\r\nX: "] * 4
    with ExitStack() as open_ones:
        for beginning in beginnings:
            open_ones.enter_context(dial(impatient)).sendall(beginning)
        answers = []

        def served() -> bool:
            with httpx.Client() as client:
                answers.append(client.get(f"{impatient.url}/api/runs", timeout=20).status_code)
            return answers[-1] == 200

        assert not served()  # sixteen connections are open, twelve are allowed
        assert eventually(served)
        assert set(answers) == {200, 503}


def test_a_request_byte_by_byte_does_not_stop_the_clock(impatient: Server) -> None:
    with dial(impatient) as connection:
        connection.settimeout(0.05)
        sent = 0
        for byte in b"GET / HTTP/1.1\r\nX: " + b"x" * 400:  # twenty seconds, at this pace
            try:
                connection.sendall(bytes([byte]))
                sent += 1
                if connection.recv(1) == b"":
                    break
            except TimeoutError:
                continue
            except OSError:
                break
        assert sent < 200


def test_a_body_nobody_reads_does_not_keep_the_connection(impatient: Server) -> None:
    with dial(impatient) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000000\r\n\r\n")
        assert b"200 OK" in connection.recv(15)
        connection.sendall(b"x")
        while connection.recv(65536):  # until the server hangs up
            pass


def test_a_client_that_takes_nothing_is_hung_up_on(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a")
    row = dict.fromkeys(ROW_KEYS, 1.2345678901234)
    (run / "metrics.jsonl").write_text((json.dumps(row) + "\n") * 49_000)  # more than sockets hold
    running = serve(tmp_path, Limits(request_seconds=0.2))
    server = next(running)
    id = server.page.library.entries()[0].id
    with dial(server) as connection:
        connection.sendall(f"GET /api/runs/{id}/metrics HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        assert eventually(lambda: server.connections() == 1)
        assert eventually(lambda: server.connections() == 0)
    next(running, None)


def test_a_connection_serves_many_requests(impatient: Server) -> None:
    with httpx.Client(timeout=20) as client:
        for _ in range(3):
            assert client.get(f"{impatient.url}/api/runs").status_code == 200


def test_a_file_that_is_too_large_is_told_so_to_a_client_that_is_still_sending(server: Server) -> None:
    """A connection that is closed while a body arrives is reset, and the client never reads why."""
    size = Limits().upload_bytes + 100_000
    listed = httpx.get(f"{server.url}/api/runs").json()["runs"]
    id = next(run["id"] for run in listed if run["name"] == "bach")
    with dial(server) as connection:
        head = f"POST /api/runs/{id}/primer HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: {size}"
        head += "\r\n\r\n"
        connection.sendall(head.encode() + b"x" * (size // 2))
        time.sleep(0.5)  # a server that hangs up at once has done so now
        connection.sendall(b"x" * (size - size // 2))
        connection.shutdown(socket.SHUT_WR)
        answer = b"".join(iter(lambda: connection.recv(4096), b""))
    assert b" 413 " in answer.splitlines()[0]
    assert b"the MIDI file is larger than 8 MB" in answer
