"""Run folders, a client without a socket, and a real server on loopback."""

from __future__ import annotations

import socket
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette", reason="the page needs deeprnn[web]")
pytest.importorskip("uvicorn", reason="the page needs deeprnn[web]")

with warnings.catch_warnings():  # newer Starlettes would rather have httpx2; both work
    warnings.simplefilter("ignore")
    from starlette.testclient import TestClient

from deeprnn.web.app import Page, create_app
from deeprnn.web.limits import Limits
from deeprnn.web.server import make_server
from tests.web.runs import write_run


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One run of each kind, a running one, an untrained one and a broken one."""
    root = tmp_path_factory.mktemp("runs")
    write_run(root / "bach")
    write_run(root / "bach-deep", deep=True, seed=1, test=8.1)
    write_run(root / "letters" / "seed-1", "char", test=1.43)
    write_run(root / "words", "word", test=119.0)
    write_run(root / "young", status="running", epochs=2, weights=False)
    (root / "broken").mkdir()
    (root / "broken" / "run.json").write_text('{"name": ')
    return root


@pytest.fixture
def client(folder: Path) -> Iterator[TestClient]:
    with client_of(folder) as client:
        yield client


def client_of(folder: Path, limits: Limits | None = None, **options: Any) -> TestClient:
    """A client of a fresh server over a folder."""
    app = create_app([folder], limits, **options)
    return TestClient(app, base_url="http://localhost", raise_server_exceptions=False)


def ids(client: TestClient) -> dict[str, str]:
    """Run ids by name."""
    return {run["name"]: run["id"] for run in client.get("/api/runs").json()["runs"]}


@dataclass
class Server:
    """A uvicorn of ours, in a thread."""

    url: str
    page: Page
    connections: Callable[[], int]


@pytest.fixture(scope="session")
def server(folder: Path) -> Iterator[Server]:
    with_limits = serve(folder, Limits())
    yield next(with_limits)
    next(with_limits, None)


def serve(folder: Path, limits: Limits) -> Iterator[Server]:
    """Serve on a free port until the generator goes on."""
    app = create_app([folder], limits)
    listener = socket.create_server(("127.0.0.1", 0), backlog=256)
    running = make_server(app, limits)
    thread = threading.Thread(target=running.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    while not running.started and thread.is_alive():
        time.sleep(0.01)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    yield Server(url, app.state.page, lambda: len(running.server_state.connections))
    running.should_exit = True
    thread.join(10)
    listener.close()
