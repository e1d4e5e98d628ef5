"""Every address: what it answers, and what it refuses."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from starlette.testclient import TestClient

from deeprnn.generation.generate import sample_rolls
from deeprnn.render import midi_bytes
from deeprnn.render.browser import PARTS
from deeprnn.runs.folder import load_run
from deeprnn.web.app import STATIC
from deeprnn.web.limits import Limits
from tests.web.conftest import client_of, ids
from tests.web.runs import TEXT, write_run

CHORD = [[27, 39, 43, 46]]


def post(client: TestClient, run: str, what: str, body: Any) -> Any:
    return client.post(f"/api/runs/{ids(client)[run]}/{what}", json=body)


def lines(answer: Any) -> list[dict[str, Any]]:
    return [json.loads(line) for line in answer.text.splitlines()]


def roots(text: str) -> np.ndarray:
    return np.frombuffer(base64.b64decode(text), np.uint8) / 255


# Reading


def test_the_page_and_its_files(client: TestClient) -> None:
    page = client.get("/")
    assert page.status_code == 200
    assert "<title>deeprnn</title>" in page.text
    for path in ("js/main.js", "parts/roll.js", "parts/parts.css", "css/base.css", "icon.svg"):
        answer = client.get(f"/static/{path}")
        assert answer.status_code == 200
        assert answer.headers["cache-control"] == "no-cache"
        assert (
            client.get(f"/static/{path}", headers={"if-none-match": answer.headers["etag"]}).status_code
            == 304
        )


def test_the_page_asks_nothing_of_other_sites(client: TestClient) -> None:
    for file in (*STATIC.rglob("*"), *PARTS.iterdir()):
        if file.suffix in (".js", ".css", ".html"):
            content = file.read_text().replace("http://www.w3.org/2000/svg", "")
            assert "http://" not in content, file
            assert "https://" not in content, file
            assert "style=" not in content, f"{file}: the policy forbids inline styles"


def test_runs_are_listed(client: TestClient) -> None:
    runs = {run["name"]: run for run in client.get("/api/runs").json()["runs"]}
    assert set(runs) == {"bach", "bach-deep", "letters/seed-1", "words", "young", "broken"}
    bach = runs["bach"]
    assert (bach["label"], bach["kind"], bach["test"], bach["epochs"]) == ("DT(S)-RNN", "music", 8.31, 30)
    assert len(bach["spark"]) == 30
    assert runs["young"]["test"] is None
    assert not runs["young"]["playable"]
    assert runs["broken"]["status"] == "unreadable"


def test_an_unchanged_list_is_not_sent_again(client: TestClient) -> None:
    first = client.get("/api/runs")
    again = client.get("/api/runs", headers={"if-none-match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")


def test_one_run_in_full(client: TestClient) -> None:
    run = client.get(f"/api/runs/{ids(client)['bach']}").json()
    assert run["equations"][0] == "zₜ = σ(W₁ hₜ₋₁ + U₁ xₜ + b₁)"
    assert run["grid"] == {"steps_per_beat": 1, "low": 21, "high": 108}
    assert run["keys"] == 88
    assert run["data_name"] == "JSB Chorales"
    assert run["result"]["test"] == {"nats_per_frame": 8.31}
    assert "path" not in json.dumps(run)


def test_a_run_tells_its_settings_and_beginnings_of_its_own(client: TestClient) -> None:
    run = client.get(f"/api/runs/{ids(client)['bach']}").json()
    assert run["recipe"] == {"": {"seeds": "[0]"}, "optimiser": {"name": "sgd", "rate": "1.0"}}
    assert run["openings"] == [{"name": "own 1", "frames": [[27, 39], [28, 40], [27, 39]]}]
    words = client.get(f"/api/runs/{ids(client)['words']}").json()
    assert words["openings"] == [{"name": "own 1", "text": "the cat sat"}]


@pytest.mark.parametrize(
    "found", [3, {"a": 1}, [3], [{"frames": [[88]]}], [{"frames": [["x"]]}], [{"frames": [[]] * 401}], [{"text": 3}],
              [{"text": "x" * 401}], [{"text": "\ud800"}], [{}]],
)  # fmt: skip
def test_beginnings_that_are_none_are_left_out(tmp_path: Path, found: Any) -> None:
    run = write_run(tmp_path / "a")
    (run / "openings.json").write_text(json.dumps(found))
    (run / "recipe.toml").write_text("[" * 5000)
    with client_of(tmp_path) as client:
        shown = client.get(f"/api/runs/{ids(client)['a']}").json()
    assert shown["openings"] == []
    assert shown["recipe"] == {}


def test_a_broken_run_says_so(client: TestClient) -> None:
    answer = client.get(f"/api/runs/{ids(client)['broken']}")
    assert answer.status_code == 422
    assert "run.json cannot be read" in answer.json()["error"]


def test_metrics_drawing_and_paper(client: TestClient) -> None:
    id = ids(client)["bach"]
    rows = client.get(f"/api/runs/{id}/metrics").json()["rows"]
    assert [row["epoch"] for row in rows] == list(range(1, 31))
    svg = client.get(f"/api/runs/{id}/drawing.svg")
    assert svg.headers["content-type"] == "image/svg+xml"
    assert svg.text.startswith("<svg")
    paper = client.get("/api/paper").json()
    assert {"data": "jsb", "label": "DT(S)-RNN", "value": 8.278, "metric": "nats/frame", "table": 2} in paper[
        "cells"
    ]


# Music


def test_a_midi_file_becomes_a_primer(client: TestClient) -> None:
    roll = np.zeros((5, 88), np.uint8)
    roll[:2, 39] = roll[2:5, 43] = 1
    content = midi_bytes(roll, steps_per_beat=1)
    answer = client.post(f"/api/runs/{ids(client)['bach']}/primer", content=content)
    assert answer.json() == {"frames": [[39], [39], [43], [43], [43]], "cut": False}


def test_a_midi_file_of_some_megabytes_is_read(client: TestClient) -> None:
    roll = np.zeros((8, 88), np.uint8)
    roll[:, 39] = 1
    content = bytearray(midi_bytes(roll, steps_per_beat=1))
    words = b"\x00\xff\x01" + b"\x81\x80\x00" + b"x" * 16384  # a text of 16 KB before the notes
    start = content.index(b"MTrk")
    track = words * 150 + bytes(content[start + 8 :])
    content = content[:start] + b"MTrk" + len(track).to_bytes(4, "big") + track
    assert len(content) > 2_000_000
    answer = client.post(f"/api/runs/{ids(client)['bach']}/primer", content=bytes(content))
    assert len(answer.json()["frames"]) == 8


def test_a_midi_file_that_is_too_large_is_told_so(client: TestClient) -> None:
    answer = client.post(f"/api/runs/{ids(client)['bach']}/primer", content=b"x" * 8_000_001)
    assert answer.status_code == 413
    assert answer.json()["error"] == "the MIDI file is larger than 8 MB, the most that is taken"


def test_a_long_midi_file_is_cut(folder: Path) -> None:
    roll = np.zeros((40, 88), np.uint8)
    roll[:, 39] = 1
    with client_of(folder, Limits(frames=20)) as client:
        answer = client.post(
            f"/api/runs/{ids(client)['bach']}/primer", content=midi_bytes(roll, steps_per_beat=1)
        )
    assert answer.json()["cut"]
    assert len(answer.json()["frames"]) == 10


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"hello",
        b"MThd\x00\x00\x00\x06\x00\x01\x00\x01\x01\xe0MTrk\xff\xff\xff\xff",
        midi_bytes(np.zeros((4, 88), np.uint8)),
    ],
)
def test_a_bad_midi_file_is_refused(client: TestClient, content: bytes) -> None:
    answer = client.post(f"/api/runs/{ids(client)['bach']}/primer", content=content)
    assert answer.status_code == 422
    assert answer.json()["error"]
    assert client.get("/api/runs").status_code == 200


def test_damaged_midi_never_harms_the_server(client: TestClient) -> None:
    roll = np.zeros((16, 88), np.uint8)
    roll[::2, 30:60:3] = 1
    whole = midi_bytes(roll, steps_per_beat=1)
    random = np.random.default_rng(0)
    id = ids(client)["bach"]
    for _ in range(150):
        damaged = bytearray(whole)
        for place in random.integers(0, len(whole), 6):
            damaged[place] = random.integers(0, 256)
        damaged = damaged[: random.integers(1, len(whole) + 1)]
        assert client.post(f"/api/runs/{id}/primer", content=bytes(damaged)).status_code in (200, 422)


def test_what_the_model_expects(client: TestClient, folder: Path) -> None:
    found = post(client, "bach", "predict", {"frames": CHORD * 3}).json()
    assert len(roots(found["heat"])) == 3 * 88
    assert len(found["nats"]) == 3
    import torch

    x = torch.zeros(4, 1, 88)
    x[1:, 0, CHORD[0]] = 1
    with torch.no_grad():
        p = torch.sigmoid(load_run(folder / "bach").model()(x)[0][-1, 0]).numpy()
    np.testing.assert_allclose(roots(found["next"]) ** 2, p, atol=0.005)
    empty = post(client, "bach", "predict", {}).json()
    assert empty["mean"] is None
    assert len(roots(empty["next"])) == 88


def test_continuing_equals_generating(client: TestClient, folder: Path) -> None:
    body = {"frames": CHORD, "length": 40, "seed": 7, "temperature": 0.9}
    parts = lines(post(client, "bach", "continue", body))
    assert parts[-1] == {"done": True}
    frames = [frame for part in parts[:-1] for frame in part["frames"]]
    assert len(frames) == 40
    primer = np.zeros((1, 88), np.uint8)
    primer[0, CHORD[0]] = 1
    want, _ = sample_rolls(
        load_run(folder / "bach").model(), 40, seed=7, temperature=0.9, primer=primer, keep_primer=False
    )
    assert frames == [np.flatnonzero(frame).tolist() for frame in want[0]]
    assert sum(len(roots(part["heat"])) for part in parts[:-1]) == 40 * 88


def test_other_seed_other_music_and_a_limit_of_notes(client: TestClient) -> None:
    def sampled(**body: Any) -> list[list[int]]:
        return [
            f
            for p in lines(post(client, "bach", "continue", {"length": 30, **body}))[:-1]
            for f in p["frames"]
        ]

    assert sampled(seed=1) == sampled(seed=1)
    assert sampled(seed=1) != sampled(seed=2)
    assert max(map(len, sampled(seed=1, temperature=4.0, max_notes=2))) == 2


def test_no_more_notes_at_once_than_the_run_learnt(tmp_path: Path) -> None:
    """As `deeprnn generate` does, so that one seed is one piece of music here and there."""
    info = write_run(tmp_path / "runs" / "bach") / "run.json"
    told = json.loads(info.read_text())
    told["data"]["most_notes"] = 3
    info.write_text(json.dumps(told))
    client = client_of(tmp_path / "runs")
    parts = lines(post(client, "bach", "continue", {"length": 30, "seed": 1, "temperature": 4.0}))
    frames = [f for part in parts[:-1] for f in part["frames"]]
    assert max(map(len, frames)) == 3
    music = load_run(tmp_path / "runs" / "bach").generate(length=30, seed=1, temperature=4.0, ending="cut")
    assert frames == [np.flatnonzero(frame).tolist() for frame in music.pieces[0]]


def test_downloads(client: TestClient) -> None:
    midi = post(client, "bach", "midi", {"frames": CHORD * 4, "tempo": 120})
    assert midi.headers["content-type"] == "audio/midi"
    assert midi.content[:4] == b"MThd"
    wav = post(client, "bach", "wav", {"frames": CHORD * 4, "tempo": 120})
    assert wav.headers["content-type"] == "audio/wav"
    assert wav.content[:4] == b"RIFF"
    assert len(wav.content) > 44100 * 2 * 2 * 2  # four beats at 120: two seconds, stereo, 16 bits


# Text


def test_surprise_of_a_text(client: TestClient) -> None:
    found = post(client, "letters/seed-1", "score", {"text": TEXT}).json()
    tokens = found["tokens"]
    assert "".join(token["t"] for token in tokens) == TEXT
    assert tokens[0]["bits"] is None
    assert all(token["bits"] > 0 and len(token["alt"]) == 6 for token in tokens[1:])
    mean = sum(token["bits"] for token in tokens[1:]) / (len(tokens) - 1)
    assert found["mean"] == pytest.approx(mean, abs=1e-3)
    assert post(client, "letters/seed-1", "score", {"text": ""}).json() == {
        "tokens": [],
        "mean": None,
        "perplexity": None,
    }


def test_unknown_words_are_marked(client: TestClient) -> None:
    tokens = post(client, "words", "score", {"text": "the zebra sat\non"}).json()["tokens"]
    assert [token["t"] for token in tokens] == ["the", "zebra", "sat", "<eos>", "on"]
    assert [token.get("unknown", False) for token in tokens] == [False, True, False, False, False]


def test_an_unknown_character_is_refused_with_its_name(client: TestClient) -> None:
    answer = post(client, "letters/seed-1", "score", {"text": "naïve"})
    assert answer.status_code == 422
    assert "ï" in answer.json()["error"]


@pytest.mark.parametrize(("run", "text"), [("letters/seed-1", "the "), ("words", "the cat"), ("words", "")])
def test_text_goes_on(client: TestClient, run: str, text: str) -> None:
    body = {"text": text, "length": 30, "seed": 3}
    parts = lines(post(client, run, "continue", body))
    assert len(parts[0]["given"]) == (len(text) if run.startswith("letters") else len(text.split()))
    drawn = [token for part in parts[1:-1] for token in part["tokens"]]
    assert len(drawn) == 30
    assert parts[-1] == {"done": True}
    assert all(token["bits"] >= 0 for token in drawn)
    assert parts == lines(post(client, run, "continue", body))


def test_text_continues_as_generate_does(client: TestClient, folder: Path) -> None:
    run = load_run(folder / "words")
    parts = lines(
        post(
            client,
            "words",
            "continue",
            {"text": "the cat", "length": 25, "seed": 5, "temperature": 1.1, "top_k": 4},
        )
    )
    drawn = [token["t"] for part in parts[1:-1] for token in part["tokens"]]
    want = run.generate(
        primer="the cat", length=25, seed=5, temperature=1.1, top_k=4, keep_primer=False
    ).texts[0]
    assert " ".join(drawn).replace("<eos>", "\n").split() == want.split()


def test_letters_go_on_without_the_sign_for_unknown_ones(tmp_path: Path) -> None:
    run = write_run(tmp_path / "letters", "char")
    vocabulary = json.loads((run / "vocabulary.json").read_text())
    vocabulary[vocabulary.index("e")] = "<unk>"  # as training does with letters of the other splits
    (run / "vocabulary.json").write_text(json.dumps(vocabulary))
    wish = {"text": "", "length": 300, "seed": 1, "temperature": 1.0}
    with client_of(tmp_path) as client:
        parts = lines(post(client, "letters", "continue", wish))
    drawn = [token["t"] for part in parts[1:-1] for token in part["tokens"]]
    assert len(drawn) == 300
    assert "<unk>" not in drawn
    wanted = load_run(run).generate(length=300, seed=1)
    assert "".join(drawn) == wanted[0]


# Refusals


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b'{"length": NaN}', b'"x"', b"\xff\xfe", b"[" * 100_000, b'{"a":' * 50_000]
)
def test_what_is_not_a_json_object_is_refused(client: TestClient, body: bytes) -> None:
    answer = client.post(f"/api/runs/{ids(client)['bach']}/continue", content=body)
    assert answer.status_code == 400
    assert "JSON" in answer.json()["error"]


@pytest.mark.parametrize(
    ("body", "names"),
    [
        ({"frames": 3}, "frames"),
        ({"frames": [[88]]}, "key"),
        ({"frames": [[-1]]}, "key"),
        ({"frames": [["x"]]}, "key"),
        ({"frames": [[True]]}, "key"),
        ({"frames": [[1.5]]}, "key"),
        ({"frames": [[0] * 89]}, "keys"),
        ({"frames": [[]] * 5000}, "5,000 frames"),
        ({"frames": [[]] * 4090, "length": 10}, "exceed"),
        ({"length": 0}, "length"),
        ({"length": 100_000}, "length"),
        ({"length": "many"}, "length"),
        ({"length": True}, "length"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": 1e400}, "JSON"),
        ({"temperature": "hot"}, "temperature"),
        ({"seed": -1}, "seed"),
        ({"seed": 10**30}, "seed"),
        ({"temperature": 10**400}, "temperature"),
        ({"max_notes": 0}, "max_notes"),
    ],
)
def test_unreasonable_wishes_are_refused_by_name(
    client: TestClient, body: dict[str, Any], names: str
) -> None:
    text = json.dumps(body)
    answer = client.post(f"/api/runs/{ids(client)['bach']}/continue", content=text)
    assert answer.status_code in (400, 422)
    assert names in answer.json()["error"]


def test_half_a_character_is_refused(client: TestClient) -> None:
    path = f"/api/runs/{ids(client)['words']}/score"
    answer = client.post(path, content=b'{"text": "the \\ud800 cat"}')
    assert answer.status_code == 422
    assert "surrogate" in answer.json()["error"]


def test_one_strange_run_does_not_spoil_the_list(tmp_path: Path) -> None:
    strange = {"label": "\ud800", "paper": float("nan"), "parameters": 10**400, "seed": {"a": float("inf")},
               "data": {"name": ["x"], "kind": 7}, "result": {"test": 10**400}, "model": {"levels": 3}}  # fmt: skip
    for i, value in enumerate((strange, [], {"data": None, "updated": 5, "model": {"predict": []}})):
        (tmp_path / str(i)).mkdir()
        (tmp_path / str(i) / "run.json").write_text(json.dumps(value))
        (tmp_path / str(i) / "metrics.jsonl").write_text('{"epoch": "x", "valid": 1e999}\n' + "9" * 5000)
    with client_of(tmp_path) as client:
        found = ids(client)
        assert set(found) == {"0", "1", "2"}
        assert client.get(f"/api/runs/{found['0']}").json()["paper"] is None
        for id in found.values():
            for path in ("", "/metrics", "/drawing.svg"):
                assert client.get(f"/api/runs/{id}{path}").status_code in (200, 404, 422)
            assert client.post(f"/api/runs/{id}/predict", json={}).status_code in (409, 422)


def test_too_much_text_is_refused(folder: Path) -> None:
    with client_of(folder, Limits(symbols=10)) as client:
        assert (
            "at most 10"
            in post(client, "letters/seed-1", "score", {"text": "the quick brown"}).json()["error"]
        )
        assert "at most 160" in post(client, "letters/seed-1", "score", {"text": "x" * 161}).json()["error"]
        assert post(client, "letters/seed-1", "score", {"text": "the quick"}).status_code == 200


def test_too_long_a_sound_is_refused(client: TestClient) -> None:
    answer = post(client, "bach", "wav", {"frames": CHORD * 1000, "tempo": 20})
    assert answer.status_code == 422
    assert "3,000 seconds" in answer.json()["error"]
    chords = [list(range(20, 50)), []] * 100  # 600 seconds, 30 notes at a time
    answer = post(client, "bach", "wav", {"frames": chords, "tempo": 20})
    assert answer.status_code == 422
    assert "together last 9,480 seconds" in answer.json()["error"]
    assert post(client, "bach", "midi", {"frames": [[]]}).status_code == 422


def test_large_bodies_are_refused_early(folder: Path) -> None:
    with client_of(folder, Limits(body_bytes=1000, upload_bytes=2000)) as client:
        id = ids(client)["bach"]
        for path, size in (("continue", 1001), ("primer", 2001)):
            answer = client.post(f"/api/runs/{id}/{path}", content=b"x" * size)
            assert answer.status_code == 413

        def pieces() -> Any:  # no content-length: counted as it comes
            yield from (b"x" * 100 for _ in range(1000))

        assert client.post(f"/api/runs/{id}/primer", content=pieces()).status_code == 413


@pytest.mark.parametrize(
    "path",
    [
        "/api/runs/../../etc/passwd",
        "/api/runs/%2e%2e%2f%2e%2e%2fetc%2fpasswd",
        "/api/runs/bach",
        "/static/../app.py",
        "/static/%2e%2e/app.py",
        "/static/..%2fapp.py",
        "/nothing",
        "/api/runs/0123456789abcdef",
        "/static//etc/passwd",
    ],
)
def test_paths_lead_nowhere(client: TestClient, path: str) -> None:
    answer = client.get(path)
    assert answer.status_code == 404
    assert "root:" not in answer.text
    assert "import" not in answer.text


def test_wrong_kind_and_wrong_method(client: TestClient) -> None:
    assert post(client, "words", "predict", {}).status_code == 409
    assert post(client, "bach", "score", {"text": "x"}).status_code == 409
    assert client.get(f"/api/runs/{ids(client)['bach']}/continue").status_code == 405


def test_a_run_without_parameters_says_when(client: TestClient) -> None:
    answer = post(client, "young", "continue", {"length": 4})
    assert answer.status_code == 409
    assert "first epoch" in answer.json()["error"]


def test_damaged_parameters_are_named_without_their_path(tmp_path: Path) -> None:
    run = write_run(tmp_path / "bad")
    whole = (run / "best.safetensors").read_bytes()
    with client_of(tmp_path) as client:
        for content, word in ((b"nonsense", "altered"), (whole[:-1] + b"x", "checksum")):
            (run / "best.safetensors").write_bytes(content)
            answer = post(client, "bad", "predict", {})
            assert answer.status_code == 422
            assert word in answer.json()["error"]
            assert str(tmp_path) not in answer.text
        assert client.get("/api/runs").status_code == 200


def test_few_models_are_kept(folder: Path) -> None:
    with client_of(folder, Limits(models=2)) as client:
        shelf = client.app.state.page.shelf  # type: ignore[attr-defined]
        for name in ("bach", "bach-deep", "bach", "bach-deep"):
            assert post(client, name, "predict", {}).status_code == 200
        assert (shelf.loads, len(shelf)) == (2, 2)
        assert post(client, "words", "score", {"text": "the"}).status_code == 200
        assert (shelf.loads, len(shelf)) == (3, 2)
        assert post(client, "bach", "predict", {}).status_code == 200  # was the oldest, is loaded anew
        assert shelf.loads == 4


def test_a_failure_of_ours_is_told_and_survived(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    from deeprnn.web import details

    def fail(*_: object) -> None:
        raise ZeroDivisionError("secret")

    monkeypatch.setattr(details, "describe", fail)
    answer = client.get(f"/api/runs/{ids(client)['bach']}")
    assert answer.status_code == 500
    assert "secret" not in answer.text
    assert client.get("/api/runs").status_code == 200
