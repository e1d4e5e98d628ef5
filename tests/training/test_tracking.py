"""Trackers mirror a run's metrics, go on with it, and never disturb it."""

from __future__ import annotations

import json
import logging
import sys
from types import ModuleType

import pytest

from deeprnn.errors import UserError
from deeprnn.runs.folder import load_run
from deeprnn.training import session, tracking
from deeprnn.training.recipe import override
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


def test_mlflow_has_every_epoch_of_a_resumed_run(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    run(tmp_path, ["mlflow"])
    trained = run(tmp_path, ["mlflow"], epochs=3)
    client = mlflow.MlflowClient(tracking_uri=(tmp_path / "mlflow").as_uri())
    (found,) = client.search_runs([client.get_experiment_by_name("deeprnn").experiment_id])
    history = client.get_metric_history(found.info.run_id, "valid")
    assert [(m.step, m.value) for m in history] == [(row["step"], row["valid"]) for row in trained.metrics()]
    assert found.info.status == "FINISHED"
    assert found.data.params["optimiser.rate"] == "1.0"


def test_wandb_writes_offline_and_no_key(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setenv("WANDB_API_KEY", "0123456789abcdef0123456789abcdef01234567")
    run(tmp_path, ["wandb"])
    files = [path for path in (tmp_path / "wandb").rglob("*") if path.is_file()]
    assert [path for path in files if path.suffix == ".wandb" and "offline-run" in str(path)]
    assert not [path for path in files if b"0123456789abcdef0123456789abcdef" in path.read_bytes()]


def test_trackio_is_told_by_its_own_words(tmp_path, monkeypatch):
    """A stand-in with trackio's signatures: the package needs others than those of this project's constraints."""
    told = []

    class Stand:
        def log(self, metrics: dict, step: int | None = None):
            told.append((step, metrics["valid"]))

        def finish(self):
            told.append("finished")

    module = ModuleType("trackio")
    module.init = lambda project, name=None, config=None, resume="never": Stand()  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "trackio", module)
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "elsewhere"))
    trained = run(tmp_path / "r", ["trackio"])
    assert told == [*((row["step"], row["valid"]) for row in trained.metrics()), "finished"]


def test_a_tracker_that_is_not_installed_is_refused_before_anything_begins(monkeypatch):
    monkeypatch.setattr(tracking.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"--track wandb needs .* pip install 'deeprnn\[track\]'"):
        tracking.check(["wandb"])


def test_the_note_holds_no_settings(memory, tmp_path):
    run(tmp_path, ["memory"])
    assert json.loads((tmp_path / "tracking-memory.json").read_text()).keys() == {"id", "sent"}
