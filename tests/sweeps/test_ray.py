"""A real Ray of two nodes on this machine, one of which is killed in mid-sweep."""

from __future__ import annotations

import subprocess
import sys
import time
from socketserver import BaseRequestHandler, TCPServer
from threading import Thread

import pytest

from deeprnn.errors import UserError
from deeprnn.sweeps.engines import make_engine
from deeprnn.sweeps.spec import load_spec
from tests.sweeps.ray_cluster import Cluster, Killer
from tests.sweeps.toys import Quiet, as_file, spec, sweep

LIMIT = 120
"""seconds for what others need a moment for"""
LONG = {"stop.epochs": 40, "save.seconds": 0.2}


def test_an_address_where_nobody_answers_is_a_sentence_before_ray_begins_to_wait(tmp_path, monkeypatch):
    ray = pytest.importorskip("ray")
    monkeypatch.setattr(ray, "init", lambda **_: pytest.fail("Ray would try for a minute"))
    with pytest.raises(UserError, match="nothing answers"):
        sweep(spec(), tmp_path / "s", engine=make_engine("ray", "cpu", 1, "127.0.0.1:1"))
    with pytest.raises(UserError, match="give host:port"):
        sweep(spec(), tmp_path / "s", engine=make_engine("ray", "cpu", 1, "nonsense"))
    with pytest.raises(UserError, match="for --engine ray"):
        make_engine("local", "cpu", 1, "127.0.0.1:1")


@pytest.mark.parametrize(
    ("greeting", "sentence"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "other than Ray answers there, perhaps its dashboard"),
        (b"", "other than Ray"),
        (bytes((0, 0, 6, 4, 0)), "no Ray cluster answers"),
    ],
)
def test_what_answers_and_is_not_ray_is_a_sentence(tmp_path, monkeypatch, greeting, sentence):
    ray = pytest.importorskip("ray")

    def init(**_):
        raise ConnectionError("as far as Ray's own question")

    class Greeting(BaseRequestHandler):
        def handle(self):
            self.request.recv(100)
            self.request.sendall(greeting)

    monkeypatch.setattr(ray, "init", init)
    with TCPServer(("127.0.0.1", 0), Greeting) as server:
        answering = Thread(target=server.handle_request)
        answering.start()
        with pytest.raises(UserError, match=sentence):
            sweep(
                spec(),
                tmp_path / "s",
                engine=make_engine("ray", "cpu", 1, f"127.0.0.1:{server.server_address[1]}"),
            )
        answering.join()


@pytest.mark.slow
def test_a_cluster_that_dies_ends_the_sweep_with_a_sentence_and_it_goes_on_elsewhere(tmp_path):
    pytest.importorskip("ray")
    which = spec(trials=2, overrides={"stop.epochs": 2000, "save.seconds": 0.2})
    words = ["sweep", str(as_file(which, tmp_path)), "--out", str(tmp_path / "s"), "--engine", "ray"]
    with Cluster(nodes=1) as cluster:
        command = [sys.executable, "-m", "deeprnn", *words, "--device", "cpu", "--address", cluster.address]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        until = time.monotonic() + LIMIT
        while not list(tmp_path.glob("s/packs/*/last.json")):
            assert process.poll() is None, process.communicate()[0]
            assert time.monotonic() < until
            time.sleep(0.1)
        cluster.kill_head()
        out, _ = process.communicate(timeout=LIMIT)
    assert process.returncode == 2, out
    assert "the Ray cluster answers no more" in out
    assert "Traceback" not in out
    view = Quiet()
    view.changed = lambda study, running: received.append(2)  # type: ignore[method-assign]
    received: list[int] = []
    sweep(load_spec(tmp_path / "s"), tmp_path / "s", view=view, received=received)
    assert view.remarks[0] == "going on with 2 begun trials"


@pytest.mark.slow
def test_a_node_that_dies_costs_no_trial(tmp_path):
    pytest.importorskip("ray")
    which = spec(trials=8, overrides=LONG)
    whole = sweep(which, tmp_path / "whole", pack=2)
    with Cluster(nodes=2) as cluster:
        killer = Killer(cluster, tmp_path / "s", kills=1)
        engine = make_engine("ray", "cpu", 2, cluster.address)
        outcome = sweep(which, tmp_path / "s", pack=2, view=killer, engine=engine)
    assert killer.killed == 1
    assert outcome.finished
    assert sorted(t.number for t in killer.trials) == list(range(8)), "each ends once"
    assert [t.state for t in outcome.trials] == ["complete"] * 8
    assert [t.value for t in outcome.trials] == pytest.approx([t.value for t in whole.trials], abs=1e-6)
