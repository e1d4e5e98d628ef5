"""Fifty clients for a minute."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

from tests.torture.attack import Arena, attack
from tests.torture.page import Page, served
from tests.torture.requests import LOOKS, MUSIC, TEXT

CLIENTS = 50
Ask = tuple[str, str, dict[str, Any] | None]
"""a name, a path, and what is posted there"""


@attack("fifty clients", share=1.2, most=75, alone=True)
def fifty_clients(arena: Arena) -> None:
    """Fifty clients at once, a mixture of everything: every answer is right or says to come back later."""
    with served(arena.scene.runs) as page:
        asks = _asks(page)
        seconds = min(60.0, max(2.0, 0.8 * arena.seconds_left))
        answers = asyncio.run(_crowd(page, asks, seconds, arena.seed))
        with arena.case("the server after all that"):
            page.check_well(page.get("/api/runs"))
        arena.figures["seconds"] = round(seconds, 1)
        arena.figures["requests a second"] = round(len(answers) / seconds, 1)
        arena.figures["sent away with 503"] = sum(status == 503 for _, status, _ in answers)
        arena.figures["megabytes"] = round(page.grown())
    for name, status, _ in answers:
        with arena.case(name):
            assert status in (200, 503), f"status {status}"
    for name in ("look", "predict", "score", "continue", "midi", "wav"):
        times = sorted(taken for asked, status, taken in answers if asked == name and status == 200)
        arena.figures[f"{name}, milliseconds"] = _percentiles(times)


def _percentiles(times: list[float]) -> str:
    if not times:
        return "none"
    at = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "most": 1.0}
    told = [
        f"{name} {1000 * times[min(len(times) - 1, int(len(times) * share))]:.0f}"
        for name, share in at.items()
    ]
    return f"{', '.join(told)} of {len(times):,}"


def _asks(page: Page) -> list[Ask]:
    runs = {run["name"]: run["id"] for run in json.loads(page.get("/api/runs").body)["runs"]}
    music, text = f"/api/runs/{runs['music']}", f"/api/runs/{runs['text']}"
    looks: list[Ask] = [("look", "/api/runs", None), ("look", "/", None)]
    looks += [("look", music + path, None) for path in LOOKS[:3]]
    works: list[Ask] = [(work, f"{music}/{work}", MUSIC) for work in ("predict", "midi", "wav")]
    works += [("continue", f"{music}/continue", {**MUSIC, "length": 64}), ("score", f"{text}/score", TEXT)]
    return [*looks, *works, ("continue", f"{text}/continue", {**TEXT, "length": 60})]


async def _crowd(page: Page, asks: list[Ask], seconds: float, seed: int) -> list[tuple[str, int, float]]:
    import random

    import httpx

    answers: list[tuple[str, int, float]] = []
    until = time.monotonic() + seconds

    async def client(number: int) -> None:
        chance = random.Random(f"{seed} {number}")
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{page.port}", timeout=120) as wire:
            while time.monotonic() < until:
                name, path, body = chance.choice(asks)
                began = time.monotonic()
                try:
                    answer = await (wire.get(path) if body is None else wire.post(path, json=body))
                    status = answer.status_code
                except httpx.HTTPError:
                    status = 0
                answers.append((name, status, time.monotonic() - began))

    await asyncio.gather(*(client(number) for number in range(CLIENTS)))
    return answers
