"""Many clients at once, clients that leave, and a queue that ends."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from deeprnn.web import music
from deeprnn.web.limits import Limits
from tests.web.conftest import Server, serve
from tests.web.test_live import eventually


def run_id(server: Server, name: str) -> str:
    return next(e.id for e in server.page.library.entries() if e.summary["name"] == name)


async def many(server: Server, count: int) -> list[httpx.Response]:
    """A mixture of all that computes, all at once."""
    bach, letters, words = (run_id(server, name) for name in ("bach", "letters/seed-1", "words"))
    wishes: list[tuple[str, dict[str, Any]]] = [
        (f"{bach}/continue", {"frames": [[39]], "length": 64}),
        (f"{letters}/continue", {"text": "the ", "length": 60}),
        (f"{words}/score", {"text": "the cat sat on the mat"}),
        (f"{bach}/predict", {"frames": [[39, 43]] * 50}),
        (f"{bach}/wav", {"frames": [[39, 43]] * 4}),
    ]
    limits = httpx.Limits(max_connections=count)
    async with httpx.AsyncClient(timeout=120, limits=limits) as client:
        return await asyncio.gather(
            *(client.post(f"{server.url}/api/runs/{path}", json={**body, "seed": i})
              for i in range(count) for path, body in [wishes[i % len(wishes)]])
        )  # fmt: skip


def test_fifty_clients_at_once_are_served(server: Server) -> None:
    answers = asyncio.run(many(server, 50))
    assert [answer.status_code for answer in answers] == [200] * 50
    for i, answer in enumerate(answers):
        if i % 5 < 2:
            assert json.loads(answer.text.splitlines()[-1]) == {"done": True}
    assert eventually(lambda: server.page.workshop.seats.in_use == 0)


@pytest.fixture
def slow(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Server, threading.Event]]:
    """A server whose frames come one by one, and wait until they may."""
    go = threading.Event()

    def one_by_one(*_: object) -> Iterator[dict[str, int]]:
        for i in range(10_000):
            go.wait(0.02)
            yield {"i": i}

    monkeypatch.setattr(music, "continuation", one_by_one)
    running = serve(folder, Limits(jobs=3, workers=1))
    yield next(running), go
    next(running, None)


def test_a_full_queue_sends_away_and_recovers(slow: tuple[Server, threading.Event]) -> None:
    server, _ = slow
    url = f"{server.url}/api/runs/{run_id(server, 'bach')}"
    with httpx.Client(timeout=30) as client:
        held = [client.stream("POST", f"{url}/continue", json={}) for _ in range(3)]
        lines = [stream.__enter__().iter_lines() for stream in held]  # a dropped iterator hangs up
        assert [next(line) for line in lines] == ['{"i":0}'] * 3
        refused = client.post(f"{url}/predict", json={})
        assert refused.status_code == 503
        assert int(refused.headers["retry-after"]) > 0
        assert "busy" in refused.json()["error"]
        assert client.get(f"{server.url}/api/runs").status_code == 200  # looking costs no seat
        for stream in held:
            stream.__exit__(None, None, None)
        assert eventually(lambda: server.page.workshop.seats.in_use == 0)
        assert client.post(f"{url}/predict", json={}).status_code == 200


def test_work_ends_when_the_client_leaves(slow: tuple[Server, threading.Event]) -> None:
    server, _ = slow
    workshop = server.page.workshop
    url = f"{server.url}/api/runs/{run_id(server, 'bach')}/continue"
    with httpx.stream("POST", url, json={}, timeout=30) as answer:
        lines = answer.iter_lines()
        for _ in range(3):
            next(lines)
        assert workshop.seats.in_use == 1
    assert eventually(lambda: workshop.seats.in_use == 0)
    made = workshop.chunks
    threading.Event().wait(0.2)
    assert workshop.chunks == made  # of ten thousand
    assert made < 5000


@pytest.fixture
def endless_sounds(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Server, threading.Event, list[int]]]:
    """A server whose sounds are never done before they may be; the list counts their blocks."""
    go, blocks = threading.Event(), []

    def never_done(*_: object) -> Iterator[bytes]:
        while not go.wait(0.02):
            blocks.append(1)
            yield b""
        yield b"RIFF"

    monkeypatch.setattr(music, "wav_file", never_done)
    running = serve(folder, Limits(workers=1, sounds=8))
    yield next(running), go, blocks
    go.set()
    next(running, None)


def test_a_small_request_does_not_wait_behind_sounds(
    endless_sounds: tuple[Server, threading.Event, list[int]],
) -> None:
    server, go, _ = endless_sounds
    url = f"{server.url}/api/runs/{run_id(server, 'bach')}"

    async def ask() -> None:
        async with httpx.AsyncClient(timeout=60) as client:
            wishes = [
                asyncio.create_task(client.post(f"{url}/wav", json={"frames": [[39]]})) for _ in range(8)
            ]
            while server.page.workshop.sounds.in_use < 8:
                await asyncio.sleep(0.01)
            assert (await client.post(f"{url}/predict", json={})).status_code == 200
            refused = await client.post(f"{url}/wav", json={"frames": [[39]]})
            assert refused.status_code == 503
            assert "8 sounds" in refused.json()["error"]
            go.set()
            assert [(await wish).content for wish in wishes] == [b"RIFF"] * 8

    asyncio.run(ask())
    assert eventually(lambda: server.page.workshop.sounds.in_use == 0)


def test_a_sound_is_given_up_when_its_client_leaves(
    endless_sounds: tuple[Server, threading.Event, list[int]],
) -> None:
    server, _, blocks = endless_sounds
    url = f"{server.url}/api/runs/{run_id(server, 'bach')}/wav"

    async def ask_and_leave() -> None:
        async with httpx.AsyncClient(timeout=30) as client:
            wish = asyncio.create_task(client.post(url, json={"frames": [[39]]}))
            while len(blocks) < 2:
                await asyncio.sleep(0.01)
            wish.cancel()

    asyncio.run(ask_and_leave())
    assert eventually(lambda: server.page.workshop.sounds.in_use == 0)
    made = len(blocks)
    threading.Event().wait(0.2)
    assert len(blocks) == made


def test_a_stream_that_takes_too_long_is_ended(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def endless(*_: object) -> Iterator[dict[str, int]]:
        while True:
            threading.Event().wait(0.02)
            yield {}

    monkeypatch.setattr(music, "continuation", endless)
    running = serve(folder, Limits(job_seconds=0.3))
    server = next(running)
    url = f"{server.url}/api/runs/{run_id(server, 'bach')}/continue"
    with pytest.raises(httpx.RemoteProtocolError):  # cut off, and seen to be
        httpx.post(url, json={}, timeout=30)
    assert eventually(lambda: server.page.workshop.seats.in_use == 0)
    next(running, None)


def test_a_sound_that_is_not_done_in_time_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def endless(*_: object) -> Iterator[bytes]:
        while True:
            threading.Event().wait(0.02)
            yield b""

    monkeypatch.setattr(music, "wav_file", endless)
    running = serve(folder, Limits(job_seconds=0.3))
    server = next(running)
    answer = httpx.post(f"{server.url}/api/runs/{run_id(server, 'bach')}/wav", json={}, timeout=30)
    assert answer.status_code == 503
    assert int(answer.headers["retry-after"]) > 0
    assert "busy" in answer.json()["error"]
    assert eventually(lambda: server.page.workshop.sounds.in_use == 0)
    next(running, None)


def test_a_failure_within_a_stream_is_told_in_it(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> Iterator[dict[str, int]]:
        yield {"i": 0}
        raise ValueError("the model's numbers are not finite")

    monkeypatch.setattr(music, "continuation", fails)
    answer = httpx.post(f"{server.url}/api/runs/{run_id(server, 'bach')}/continue", json={}, timeout=30)
    assert [json.loads(line) for line in answer.text.splitlines()] == [
        {"i": 0},
        {"error": "the model's numbers are not finite"},
    ]
    assert eventually(lambda: server.page.workshop.seats.in_use == 0)


def test_a_body_that_never_comes_is_given_up(folder: Path) -> None:
    import socket

    running = serve(folder, Limits(body_seconds=0.3))
    server = next(running)
    path = f"/api/runs/{run_id(server, 'bach')}/predict"
    port = int(server.url.rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
        connection.sendall(
            f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 10\r\n\r\nabc".encode()
        )
        assert b" 408 " in connection.recv(4096).splitlines()[0]
    next(running, None)
