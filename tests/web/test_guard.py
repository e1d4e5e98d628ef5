"""Who is answered, and with which headers."""

from __future__ import annotations

import pytest
from starlette.testclient import TestClient

from deeprnn.web.guard import Guard
from tests.web.conftest import client_of, ids


@pytest.mark.parametrize("path", ["/", "/api/runs", "/static/js/main.js", "/nothing"])
def test_every_answer_carries_the_headers(client: TestClient, path: str) -> None:
    headers = client.get(path).headers
    assert "default-src 'self'" in headers["content-security-policy"]
    assert "frame-ancestors 'none'" in headers["content-security-policy"]
    assert "unsafe" not in headers["content-security-policy"]
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["referrer-policy"] == "no-referrer"


@pytest.mark.parametrize(
    "host",
    ["localhost", "localhost:8000", "LOCALHOST", "127.0.0.1:1", "192.168.1.7:8000", "[::1]:8000", "[::1]"],
)
def test_own_names_and_addresses_are_known(host: str) -> None:
    assert Guard(None).knows(host)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.evil.example"]
)
def test_rebound_names_are_refused(client: TestClient, host: str) -> None:
    answer = client.get("/api/runs", headers={"host": host})
    assert answer.status_code == 421
    assert "runs" not in answer.json()


@pytest.mark.parametrize(
    "host",
    ["", "localhost:evil.example", "localhost:80:evil.example", "localhost:", "[::1]evil.example", "[::1]:x",
     "evil.example@localhost", "localhost/evil.example", "localhost evil.example", "127.0.0.1:8000.evil.example",
     "[localhost]", "localhost:²"],
)  # fmt: skip
def test_what_is_no_host_name_is_refused(host: str) -> None:
    assert not Guard(None).knows(host)  # type: ignore[arg-type]


def test_a_host_that_is_no_name_is_a_bad_request(client: TestClient) -> None:
    answer = client.get("/api/runs", headers={"host": "localhost:evil.example"})
    assert answer.status_code == 400
    assert "Host" in answer.json()["error"]


def test_a_name_can_be_allowed(folder) -> None:
    with client_of(folder, names=("music.lan",)) as client:
        assert client.get("/api/runs", headers={"host": "music.lan:8000"}).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "http://evil.example"},
        {"sec-fetch-site": "cross-site"},
        {"origin": "null"},
        {"sec-fetch-site": "same-site"},
    ],
)
def test_other_sites_may_not_ask_for_work(client: TestClient, headers: dict[str, str]) -> None:
    path = f"/api/runs/{ids(client)['bach']}/predict"
    assert client.post(path, json={}, headers=headers).status_code == 403
    own = {"origin": "http://localhost", "sec-fetch-site": "same-origin"}
    assert client.post(path, json={}, headers=own).status_code == 200
