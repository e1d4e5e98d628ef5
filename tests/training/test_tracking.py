"""Trackers mirror a run's metrics, go on with it, and never disturb it."""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import logging
import os
import sqlite3
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import get_args

import pytest

from deeprnn.commands.arguments import arguments
from deeprnn.commands.resume import Resume
from deeprnn.commands.train import Train
from deeprnn.errors import UserError
from deeprnn.runs.folder import load_run
from deeprnn.training import session, tracking
from deeprnn.training.recipe import override
from tests.torture import disk
from tests.training.toys import music, recipe


def run(folder, names, epochs=2, **changes):
    """Train, watched by trackers."""
    opened = []

    def watch(trainer, place):
        opened.append(tracking.Tracking(names, trainer, place))
        return opened

    settings = override(recipe(**changes), {"stop.epochs": epochs})
    session.run_recipe(settings, folder, data=music(), watch=watch)
    for watcher in opened:
        watcher.__exit__()
    return load_run(folder) if "seeds" not in changes else None


class Memory:
    """A tracker that keeps what it is told, by the tracked run's id."""

    told: dict[str, list[int]]

    def __init__(self, tracked):
        self.id = tracked.id
        self.told.setdefault(self.id, [])

    def log(self, values, step):
        assert {"train", "valid", "epoch"} <= values.keys()
        self.told[self.id].append(step)

    def close(self):
        pass


@pytest.fixture
def memory(monkeypatch):
    kept = type("Kept", (Memory,), {"told": {}})
    monkeypatch.setitem(tracking.TRACKERS, "memory", kept)
    return kept


def test_a_resumed_run_goes_on_in_the_same_tracked_run(memory, tmp_path):
    run(tmp_path, ["memory"])
    trained = run(tmp_path, ["memory"], epochs=4)
    assert list(memory.told.values()) == [[row["step"] for row in trained.metrics()]]


def test_a_tracker_that_comes_later_is_told_of_earlier_epochs(memory, tmp_path):
    run(tmp_path, [])
    trained = run(tmp_path, ["memory"], epochs=4)
    assert list(memory.told.values()) == [[row["step"] for row in trained.metrics()]]


def test_members_are_tracked_apart(memory, tmp_path):
    run(tmp_path, ["memory"], seeds=[1, 2])
    assert {name.partition("-")[2]: len(steps) for name, steps in memory.told.items()} == {
        "seed-1": 2,
        "seed-2": 2,
    }


@pytest.mark.parametrize("method", ["__init__", "log", "close"])
def test_a_broken_tracker_is_warned_of_once_and_changes_nothing(
    memory, tmp_path, caplog, monkeypatch, method
):
    def fail(*_):
        raise RuntimeError("no such host")

    monkeypatch.setattr(memory, method, fail)
    with caplog.at_level(logging.WARNING, "deeprnn"):
        run(tmp_path / "watched", ["memory"])
    assert caplog.text.count("no such host") == 1
    run(tmp_path / "plain", [])
    for name in ("best.safetensors", "last.safetensors"):
        assert (tmp_path / "watched" / name).read_bytes() == (tmp_path / "plain" / name).read_bytes()


def test_a_tracker_that_hangs_does_not_hold_the_run_up(memory, tmp_path, caplog, monkeypatch):
    import threading

    hold = threading.Event()
    monkeypatch.setattr(memory, "log", lambda *_: hold.wait(30))
    monkeypatch.setattr(tracking, "PATIENCE", 0.1)
    with caplog.at_level(logging.WARNING, "deeprnn"):
        trained = run(tmp_path, ["memory"])
    hold.set()
    assert trained.info["status"] == "finished"
    assert "memory is too slow" in caplog.text


@pytest.mark.parametrize(
    "content", ["", "[]", '{"id": 3}', '{"id": "../../x", "sent": [1]}', '{"id": "a", "sent": ["x"]}']
)
def test_a_damaged_note_of_what_was_sent_begins_a_new_tracked_run(memory, tmp_path, content):
    (tmp_path / "tracking-memory.json").write_text(content)
    trained = run(tmp_path, ["memory"])
    (name,) = memory.told
    assert name != "../../x-seed-1"
    assert memory.told[name] == [row["step"] for row in trained.metrics()]


# ---- the real ones


def test_tensorboard_has_every_epoch(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    trained = run(tmp_path, ["tensorboard"])
    events = EventAccumulator(str(tmp_path / "tensorboard" / "seed-1")).Reload()
    assert [(e.step, pytest.approx(e.value)) for e in events.Scalars("valid")] == [
        (row["step"], row["valid"]) for row in trained.metrics()
    ]


def test_tensorboard_has_every_epoch_of_a_resumed_run(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run(tmp_path, ["tensorboard"])
    trained = run(tmp_path, ["tensorboard"], epochs=4)
    events = EventAccumulator(str(tmp_path / "tensorboard" / "seed-1")).Reload()
    assert [e.step for e in events.Scalars("train")] == [row["step"] for row in trained.metrics()]


@pytest.mark.parametrize("number", range(5))
def test_a_full_disk_under_tensorboard_is_one_warning_and_no_traceback(tmp_path, monkeypatch, caplog, number):
    pytest.importorskip("tensorboard")
    steps, raised = itertools.count(), []

    def fail(step):
        if step.kind in disk.GROWS and next(steps) >= number:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), step.path)

    monkeypatch.setattr(threading, "excepthook", raised.append)  # which would print a traceback
    with disk.watched(tmp_path / "tensorboard", fail), caplog.at_level(logging.WARNING, "deeprnn"):
        trained = run(tmp_path, ["tensorboard"])
    assert raised == []
    assert caplog.text.count("tensorboard failed (OSError: ") == 1
    assert trained.info["status"] == "finished"


def test_mlflow_has_every_epoch_of_a_resumed_run(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.delenv("MLFLOW_DISABLE_TELEMETRY", raising=False)
    run(tmp_path, ["mlflow"])
    trained = run(tmp_path, ["mlflow"], epochs=3)
    client = mlflow.MlflowClient(tracking_uri=(tmp_path / "mlflow").as_uri())
    (found,) = client.search_runs([client.get_experiment_by_name("deeprnn").experiment_id])
    history = client.get_metric_history(found.info.run_id, "valid")
    assert [(m.step, m.value) for m in history] == [(row["step"], row["valid"]) for row in trained.metrics()]
    assert found.info.status == "FINISHED"
    assert found.data.params["optimiser.rate"] == "1.0"
    assert os.environ["MLFLOW_DISABLE_TELEMETRY"] == "true"


def test_wandb_writes_offline_and_no_key(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setenv("WANDB_API_KEY", "0123456789abcdef0123456789abcdef01234567")
    run(tmp_path, ["wandb"])
    files = [path for path in (tmp_path / "wandb").rglob("*") if path.is_file()]
    assert list((tmp_path / "wandb").glob("offline-run-*/*.wandb"))
    assert not [path for path in files if b"0123456789abcdef0123456789abcdef" in path.read_bytes()]


STAND_IN = """
import json, os

class Run:
    def __init__(self, options):
        self.told = [options]

    def log(self, metrics, step=None):
        self.told.append([step, metrics["valid"]])

    def finish(self):
        print("* Run finished.")
        with open(os.path.join(os.environ["TRACKIO_DIR"], self.told[0]["name"]), "w") as file:
            json.dump([*self.told, os.environ.get("HF_HUB_OFFLINE")], file)

def init(project, name=None, config=None, resume="never", embed=True, auto_log_gpu=None, auto_log_cpu=None):
    if os.environ.get("TRACKIO_FAILS"):
        raise RuntimeError("no such Space")
    os.makedirs(os.environ["TRACKIO_DIR"], exist_ok=True)
    return Run({"name": name, "resume": resume, "rate": config["optimiser.rate"]})
"""


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    """A package of trackio's name and signatures, whose releases go with other packages than our constraints have."""
    (tmp_path / "packages").mkdir()
    (tmp_path / "packages/trackio.py").write_text(STAND_IN)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "packages"))
    for name in ("TRACKIO_DIR", "TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def test_trackio_is_told_by_its_own_words_in_a_process_of_its_own(stand_in, capfd):
    for name in ("a", "b"):  # two runs of one process, each in its own folder
        trained = run(stand_in / name, ["trackio"])
        (place,) = (stand_in / name / "trackio").iterdir()
        options, *points, offline = json.loads(place.read_text())
        assert options == {"name": place.name, "resume": "allow", "rate": 1.0}
        assert points == [[row["step"], row["valid"]] for row in trained.metrics()]
        assert offline == "1"
    assert "Run finished" not in capfd.readouterr().out


def test_trackio_goes_online_where_the_environment_says_so(stand_in, monkeypatch):
    monkeypatch.setenv("TRACKIO_SPACE_ID", "somebody/something")
    run(stand_in / "a", ["trackio"], seeds=[1, 2])
    told = [json.loads(place.read_text()) for place in (stand_in / "a/trackio").iterdir()]
    assert [line[-1] for line in told] == [None, None]


def test_a_trackio_that_fails_is_warned_of_in_its_own_words(stand_in, monkeypatch, caplog):
    monkeypatch.setenv("TRACKIO_FAILS", "1")
    with caplog.at_level(logging.WARNING, "deeprnn"):
        trained = run(stand_in / "a", ["trackio"])
    assert trained.info["status"] == "finished"
    assert caplog.text.count("trackio failed (ChildProcessError: RuntimeError: no such Space)") == 1


def test_the_real_trackio_has_every_epoch_of_a_resumed_run_and_asks_nobody(tmp_path, monkeypatch, capfd):
    pytest.importorskip("trackio")
    asked = []

    class Hub(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_error(404)

    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as hub:
        threading.Thread(target=hub.serve_forever, daemon=True).start()
        for name in ("TRACKIO_DIR", "TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL", "HF_HUB_OFFLINE"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{hub.server_port}")
        monkeypatch.setenv("HF_TOKEN", "hf_0123456789abcdef")
        run(tmp_path, ["trackio"], seeds=[1, 2])
        run(tmp_path, ["trackio"], seeds=[1, 2], epochs=3)
        hub.shutdown()
    assert asked == []
    assert "rackio" not in capfd.readouterr().out
    with contextlib.closing(sqlite3.connect(tmp_path / "trackio/deeprnn.db")) as store:
        rows = store.execute("SELECT run_name, step, metrics FROM metrics ORDER BY run_name, step").fetchall()
    points = [(name.partition("-")[2], step, json.loads(values)["valid"]) for name, step, values in rows]
    assert points == [
        (name, row["step"], row["valid"])
        for name in ("seed-1", "seed-2")
        for row in load_run(tmp_path / name).metrics()
    ]
    assert not [p for p in tmp_path.rglob("*") if p.is_file() and b"hf_0123456789abcdef" in p.read_bytes()]


def test_every_tracker_can_be_asked_for_on_the_command_line():
    for command in (Train, Resume):
        (option,) = (a for a in arguments(command) if a.field.name == "track")
        assert get_args(option.kind) == tuple(tracking.TRACKERS)


@pytest.mark.parametrize(("name", "remedy"), [("mlflow", r"'deeprnn\[track\]'"), ("wandb", "wandb")])
def test_a_tracker_that_is_not_installed_is_refused_before_anything_begins(monkeypatch, name, remedy):
    monkeypatch.setattr(tracking.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=f"--track {name} needs .*: pip install {remedy}$"):
        tracking.check([name])


def test_the_note_holds_no_settings(memory, tmp_path):
    run(tmp_path, ["memory"])
    assert json.loads((tmp_path / "tracking-memory.json").read_text()).keys() == {"id", "sent"}
