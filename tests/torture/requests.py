"""Requests: mutated, absurd, enormous, slow."""

from __future__ import annotations

import itertools
import json
import random
import socket
import time
from typing import Any

from tests.torture import seeds
from tests.torture.attack import Arena, attack
from tests.torture.nasty import TEXTS, as_json, mutated, mutated_tree
from tests.torture.page import ANSWER, Page, post, served

SLOWEST = 10.0
"""seconds of the processor that one request may take"""
MEGABYTES = 512
"""that the server may grow by, whatever is asked of it"""
HALF_OPEN = 520

MUSIC: dict[str, Any] = {
    "frames": [[39, 43], [], [40]],
    "length": 4,
    "seed": 1,
    "temperature": 1.0,
    "tempo": 100,
}
TEXT: dict[str, Any] = {"text": "the word ", "length": 4, "seed": 1, "temperature": 0.8, "top_k": 3}
WORK = ("predict", "score", "continue", "midi", "wav", "primer")
LOOKS = ("", "/metrics", "/drawing.svg", "/events")
HARMFUL: dict[str, tuple[str, bytes]] = {
    "a WAV of thirty voices": ("wav", json.dumps({"frames": [list(range(30))] * 200, "tempo": 20}).encode()),
    "a WAV of ten minutes": ("wav", json.dumps({"frames": [[3]] * 4000, "tempo": 100}).encode()),
    "a roll of everything": ("predict", json.dumps({"frames": [list(range(88))] * 4096}).encode()),
    "a very long continuation": ("continue", json.dumps({"length": 1024}).encode()),
    "nested": ("predict", b"[" * 400_000),
    "a number of many digits": ("predict", b'{"seed": ' + b"9" * 400_000 + b"}"),
    "many keys": ("predict", json.dumps({str(i): i for i in range(30_000)}).encode()),
    "half a character": ("score", rb'{"text": "\ud800"}'),
    "a MIDI file of notes that never end": ("primer", seeds.midi()[0] * 5000),
}


@attack("requests", share=2)
def requests(arena: Arena) -> None:
    """Mutated and absurd requests: an answer below 500, in bounded time and memory, and nothing runs."""
    harmful = [(name, run) for name in HARMFUL for run in ("music", "text")]
    arena.chance.shuffle(harmful)
    for _ in arena.while_time(itertools.count()):
        with served(arena.scene.runs) as page:
            runs = {run["name"]: run["id"] for run in json.loads(page.get("/api/runs").body)["runs"]}
            while _try(arena, page, runs, harmful) and arena.seconds_left > 0:
                pass  # a server that was harmed is replaced
    arena.finished = not harmful


def _try(arena: Arena, page: Page, runs: dict[str, str], harmful: list[tuple[str, str]]) -> bool:
    """A known harmful request, or else an invented one; whether nothing was wrong with the answer."""
    before = arena.failed
    arena.add("requests")
    if harmful:
        name, run = harmful.pop()
        path, body = HARMFUL[name]
        request, patience = post(f"/api/runs/{runs[run]}/{path}", body), ANSWER
    else:
        request, patience = invented(arena.chance, list(runs.values())), 0.25
        name = f"{request[:120]!r}"
    with arena.case(name):
        answer = page.send(request, patience)
        page.check_well(answer)
        assert answer.worked < SLOWEST, f"took {answer.worked:.0f} s of the processor"
        assert page.grown() < MEGABYTES, f"the server has grown by {page.grown():,.0f} MB"
        assert not any(run.exists() for run in (arena.scene.runs / "canary", arena.folder / "canary")), (
            "code ran"
        )
        kind = answer.head.lower().partition("content-type:")[2].splitlines()[:1]
        assert b"<script>alert" not in answer.body or "html" not in str(kind), (
            "a script was sent back as HTML"
        )
    if arena.failed > before:
        arena.keep(f"request-{arena.cases}", request)
    return arena.failed == before


def invented(chance: random.Random, runs: list[str]) -> bytes:
    """A request with something wrong with it."""
    run = chance.choice([*runs, *runs, chance.choice(TEXTS).replace("\ud800", "x")])
    if chance.random() < 0.3:
        path = chance.choice(
            ["/", "/api/runs", "/api/paper", "/static/../../etc/passwd", "/%2e%2e/%2e%2e/etc/passwd"]
        )
        path = chance.choice([path, f"/api/runs/{run}{chance.choice(LOOKS[:3])}"])
        request = f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode(
            "utf-8", "replace"
        )
        return mutated(request, chance) if chance.random() < 0.7 else request
    work = chance.choice(WORK)
    body = mutated(chance.choice(seeds.midi()), chance) if work == "primer" else _body(chance)
    length = chance.choice([len(body)] * 9 + [0, 10**9])
    request = post(f"/api/runs/{run}/{work}", body, length)
    return mutated(request, chance) if chance.random() < 0.2 else request


def _body(chance: random.Random) -> bytes:
    content = as_json(mutated_tree(chance.choice([MUSIC, TEXT]), chance))
    return mutated(content, chance) if chance.random() < 0.3 else content


@attack("half-open connections", share=0.5, most=45)
def half_open(arena: Arena) -> None:
    """Hundreds of clients that never finish their request do not keep others out for long."""
    with served(arena.scene.runs) as page, arena.case(f"{HALF_OPEN} half-open connections"):
        wires = [socket.create_connection(("127.0.0.1", page.port), timeout=5) for _ in range(HALF_OPEN)]
        try:
            for wire in wires:
                wire.sendall(b"GET / HTTP/1.1\r\nHost: local")
            began, answer = time.monotonic(), page.get("/api/runs")
            while answer.status != 200 and time.monotonic() - began < 30:
                time.sleep(0.5)
                answer = page.get("/api/runs")
            arena.figures["seconds until the page answers again"] = round(time.monotonic() - began, 1)
            assert answer.status == 200, f"still status {answer.status} after 30 s"
            page.check_well(answer)
        finally:
            for wire in wires:
                wire.close()
