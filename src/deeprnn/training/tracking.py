"""Watching a run with a program made for it: TensorBoard, MLflow, Weights & Biases or trackio, behind one protocol.

A tracker mirrors metrics.jsonl. Each has a thread of its own, so that a slow or broken one neither stops nor changes
the training: it is warned of once and left alone. How far it got lies beside the run (`tracking-NAME.json`), and a
resumed run sends what is missing into the same tracked run. Everything stays on this machine unless the environment
says otherwise, by the variables that these programs have for it; no key is ever written by us.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import logging
import math
import os
import queue
import socket
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

from deeprnn.errors import MissingExtra, need
from deeprnn.files import write_json
from deeprnn.runs.folder import Run
from deeprnn.runs.reading import read_json
from deeprnn.training.recipe.continuing import flat
from deeprnn.training.run_folders import member_folders

if TYPE_CHECKING:
    from deeprnn.training.loop import Trainer

logger = logging.getLogger("deeprnn")

TRACKED = ("train", "valid", "rate", "grad_norm", "clipped", "frames_per_second")
PATIENCE = 20.0
"""seconds that a tracker has for what is left when the run ends"""
PROJECT = "deeprnn"


class Tracker(Protocol):
    """Where the numbers of one model go; any method may fail."""

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Numbers after so many updates."""

    def close(self) -> None:
        """No more will come now; a resumed run opens it again."""


@dataclass(frozen=True)
class Tracked:
    """One model as a tracker is told of it."""

    folder: Path
    """where a tracker keeps its files"""
    name: str
    id: str
    """the same when the run goes on"""
    settings: Mapping[str, Any]


class TensorBoard:
    """Event files in the run folder, a new one each time the run goes on.

    They are written here and not by a `SummaryWriter`: that has a thread of its own, which prints a traceback when the
    disk is full. The sender is a thread already.
    """

    def __init__(self, run: Tracked) -> None:
        events = need("tensorboard.compat.proto.event_pb2", extra="tensorboard")
        records = need("tensorboard.summary.writer.record_writer", extra="tensorboard")
        self.event, self.record_writer = events.Event, records.RecordWriter
        folder = run.folder / run.name
        folder.mkdir(parents=True, exist_ok=True)
        # Read in the order of their names, which must contain "tfevents".
        self.path = folder / f"events.out.tfevents.{time.time_ns()}.{socket.gethostname()}.{os.getpid()}"
        self._append(self.event(wall_time=time.time(), file_version="brain.Event:2"))

    def log(self, values: Mapping[str, float], step: int) -> None:
        """One point in each curve."""
        points = [{"tag": key, "simple_value": value} for key, value in values.items()]
        self._append(self.event(wall_time=time.time(), step=step, summary={"value": points}))

    def close(self) -> None:
        """Nothing: no file is open between two epochs."""

    def _append(self, event: Any) -> None:
        with self.path.open("ab") as file:
            self.record_writer(file).write(event.SerializeToString())


class MLflow:
    """A store of files in the run folder, or the server that MLFLOW_TRACKING_URI names."""

    def __init__(self, run: Tracked) -> None:
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # a store without a database
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # which tells its makers of every run
        uri = os.environ.get("MLFLOW_TRACKING_URI") or run.folder.absolute().as_uri()
        self.client = need("mlflow", extra="track").MlflowClient(tracking_uri=uri)
        experiment = self.client.get_experiment_by_name(PROJECT)
        place = self.client.create_experiment(PROJECT) if experiment is None else experiment.experiment_id
        before = self.client.search_runs([place], f"tags.deeprnn = '{run.id}'")
        if before:
            self.id = before[0].info.run_id
            self.client.update_run(self.id, status="RUNNING")
            return
        self.id = self.client.create_run(place, run_name=run.name, tags={"deeprnn": run.id}).info.run_id
        for key, value in run.settings.items():
            self.client.log_param(self.id, key, str(value)[:250])

    def log(self, values: Mapping[str, float], step: int) -> None:
        """One point in each curve."""
        for key, value in values.items():
            self.client.log_metric(self.id, key, value, step=step)

    def close(self) -> None:
        """Mark the run as ended."""
        self.client.set_terminated(self.id)


class WandB:
    """Files for `wandb sync` in the run folder; WANDB_MODE=online sends them at once."""

    def __init__(self, run: Tracked) -> None:
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # read when it is imported
        wandb = need("wandb")
        run.folder.mkdir(parents=True, exist_ok=True)  # wandb would take a temporary one
        private = {"disable_git": True, "disable_code": True, "x_disable_meta": True, "x_disable_stats": True}
        settings = wandb.Settings(silent=True, console="off", **private)
        self.run = wandb.init(
            project=PROJECT,
            id=run.id,
            name=run.name,
            dir=str(run.folder.parent),  # in which it makes `wandb`
            config=dict(run.settings),
            mode=os.environ.get("WANDB_MODE") or "offline",
            resume="allow",
            reinit="create_new",  # members of a population side by side
            settings=settings,
        )

    def log(self, values: Mapping[str, float], step: int) -> None:
        """One point in each curve."""
        self.run.log(dict(values), step=step)

    def close(self) -> None:
        """Write what is left."""
        self.run.finish()


class Trackio:
    """A database in the run folder, or where TRACKIO_DIR says; written by a process of its own."""

    def __init__(self, run: Tracked) -> None:
        environment = {"TRACKIO_DIR": str(run.folder.absolute()), **os.environ}
        if not any(os.environ.get(name) for name in ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL")):
            environment["HF_HUB_OFFLINE"] = "1"  # trackio would ask who is logged in
        self.said = tempfile.TemporaryFile()  # noqa: SIM115  read when something went wrong
        self.process = subprocess.Popen(
            [sys.executable, "-P", str(Path(__file__).with_name("trackio_process.py"))],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=self.said,
            text=True,
            encoding="utf-8",
            start_new_session=True,  # Ctrl-C is for the training, which then says what is left
        )
        self._tell({"project": PROJECT, "name": run.id, "config": dict(run.settings)})

    def log(self, values: Mapping[str, float], step: int) -> None:
        """One point in each curve."""
        self._tell({"values": values, "step": step})

    def close(self) -> None:
        """Wait until everything is written."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        if self.process.wait():
            self._failed()

    def _tell(self, line: Mapping[str, Any]) -> None:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(line) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            self.process.wait()
            self._failed()

    def _failed(self) -> NoReturn:
        self.said.seek(0)
        lines = self.said.read().decode("utf-8", "replace").strip().splitlines()
        raise ChildProcessError(
            lines[-1] if lines else f"its process ended with status {self.process.returncode}"
        )


TRACKERS: dict[str, Callable[[Tracked], Tracker]] = {
    "tensorboard": TensorBoard,
    "mlflow": MLflow,
    "wandb": WandB,
    "trackio": Trackio,
}


EXTRAS = {"tensorboard": "'deeprnn[tensorboard]'", "mlflow": "'deeprnn[track]'"}
"""what pip installs for a tracker; no extra brings the others"""


def check(names: Sequence[str]) -> None:
    """Refuse a tracker whose package is not installed, before anything is begun."""
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise MissingExtra(
                f"--track {name} needs the package {name!r}: pip install {EXTRAS.get(name, name)}"
            )


class Tracking:
    """Watches a trainer and tells the trackers of these names."""

    def __init__(self, names: Sequence[str], trainer: Trainer, folder: Path) -> None:
        self.senders = [_Sender(name, trainer, folder) for name in dict.fromkeys(names)]

    def updated(self, trainer: Trainer) -> None:
        """Nothing: an epoch is the unit."""

    def epoch_ended(self, trainer: Trainer, rows: Sequence[Mapping[str, Any] | None]) -> None:
        """Every number of the epoch's line."""
        for sender in self.senders:
            for member, row in enumerate(rows):
                if row is not None:
                    sender.waiting.put((member, row))

    def __enter__(self) -> Tracking:
        return self

    def __exit__(self, *_: object) -> None:
        for sender in self.senders:
            sender.waiting.put(None)
        for sender in self.senders:
            sender.join(PATIENCE)
            if sender.is_alive():
                logger.warning("%s is too slow: it has not been told of every epoch", sender.name)


class _Sender(threading.Thread):
    """Tells one tracker, in its own time."""

    def __init__(self, kind: str, trainer: Trainer, folder: Path) -> None:
        super().__init__(name=kind, daemon=True)
        self.state = folder / f"tracking-{kind}.json"
        self.waiting: queue.SimpleQueue[tuple[int, Mapping[str, Any]] | None] = queue.SimpleQueue()
        self.id, self.sent = self._sent(len(trainer.members))
        settings = flat(trainer.recipe.to_dict())
        self.runs = []
        for number, (member, home) in enumerate(
            zip(trainer.members, member_folders(trainer.recipe, folder), strict=True)
        ):
            self.runs.append(Tracked(folder / kind, member.name, f"{self.id}-{member.name}", settings))
            for row in Run(home).metrics():  # what it has not been told of before
                self.waiting.put((number, row))
        self.start()

    def _sent(self, members: int) -> tuple[str, list[int]]:
        """The tracked run's number, and the last step of each member that was sent."""
        fresh = uuid.uuid4().hex[:12], [-1] * members
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # absent, or nothing of ours
            before = read_json(self.state, 2**16)
            sent = [int(step) for step in before["sent"]]
            if len(sent) == members and str(before["id"]).isalnum():
                return str(before["id"]), sent
        return fresh

    def run(self) -> None:
        """Open the tracker and send, until the end or the first failure."""
        try:
            trackers = [TRACKERS[self.name](run) for run in self.runs]
            while (item := self.waiting.get()) is not None:
                self._send(trackers, *item)
            for tracker in trackers:
                tracker.close()
        except Exception as error:  # noqa: BLE001  another program's, of any kind; the training is not its business
            logger.warning(
                "%s failed (%s: %s): training goes on without it", self.name, type(error).__name__, error
            )

    def _send(self, trackers: Sequence[Tracker], member: int, row: Mapping[str, Any]) -> None:
        step = int(row["step"])
        if step <= self.sent[member]:  # an epoch that is trained again after a kill gives the same numbers
            return
        values = {key: float(row[key]) for key in TRACKED if math.isfinite(row.get(key, math.nan))}
        trackers[member].log({**values, "epoch": float(row["epoch"])}, step)
        self.sent[member] = step
        write_json(self.state, {"id": self.id, "sent": self.sent})
