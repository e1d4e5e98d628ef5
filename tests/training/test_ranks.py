"""Several processes train one model: the same updates as one with all lanes. Real processes, over loopback."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import deeprnn
from deeprnn.errors import UserError
from deeprnn.runs.folder import load_run
from deeprnn.training import session
from deeprnn.training.loop import Trainer
from deeprnn.training.ranks import Ranks
from tests.small_runs import text_file
from tests.training.toys import DEEP, music, recipe, text

LIMIT = 120
"""seconds after which a launch is ended"""
CASES = {
    "noise": (recipe(data__lanes=4, **DEEP), "music"),
    "uneven": (recipe(data__lanes=5, optimiser__clip=0.05), "music"),
    "dropout": (
        recipe(data__lanes=3, regulariser__dropout_output=0.4, regulariser__dropout_state=0.3),
        "text",
    ),
    "per sequence": (
        recipe(data__lanes=3, regulariser__dropout_output=0.4, regulariser__dropout_per_sequence=True),
        "text",
    ),
    "cell": (recipe(data__lanes=2, model__cell="gru"), "text"),
    "members": (recipe(data__lanes=4, seeds=[1, 2], optimiser__name="adam", optimiser__rate=0.01), "music"),
    "dropped": (
        recipe(
            data__lanes=3, model__embedding=4, regulariser__dropconnect=0.3, regulariser__dropout_symbols=0.3
        ),
        "text",
    ),
    "average": (recipe(data__lanes=4, optimiser__average="ema"), "music"),
}


class Paced(deeprnn.Cell):
    """A cell of a user's own."""

    def __init__(self, input_size: int, hidden_size: int) -> None:
        super().__init__()
        self.U, self.W = nn.Linear(input_size, hidden_size), nn.Linear(hidden_size, hidden_size, bias=False)
        self.pace = nn.Parameter(torch.zeros(hidden_size))

    def step(self, x, h):
        return torch.lerp(h, torch.tanh(self.U(x) + self.W(h)), self.pace.sigmoid())


def layers() -> list[tuple[str, nn.Module, torch.Tensor]]:
    """Layers with a batch of four sequences each."""
    torch.manual_seed(0)
    made = [
        ("DeepRNN", deeprnn.DeepRNN(5, 6, intermediate_sizes=7)),
        ("GRU", deeprnn.GRU(5, 6, num_layers=2)),
        ("Recurrent", deeprnn.Recurrent(Paced(5, 6))),
    ]
    return [(name, layer, torch.randn(9, 4, 5)) for name, layer in made]


def data(kind: str):
    return music() if kind == "music" else text()


def environment() -> dict[str, str]:
    src = str(Path(session.__file__).parents[2])
    paths = os.pathsep.join([src, str(Path(__file__).parents[2])])
    return {
        **os.environ,
        "PYTHONPATH": paths,
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "PYTHONFAULTHANDLER": "1",
    }


def launch(*words: str, count: int = 2, torchrun: tuple[str, ...] = ()) -> subprocess.Popen[str]:
    """Start a command in several processes of this machine."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    start = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(count)]
    start += ["--master-addr", "127.0.0.1", "--master-port", str(port), *torchrun]
    return subprocess.Popen(
        [*start, "-m", *words], env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def end(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    """Wait for a launch, for a while: exit status and what it printed."""
    try:
        out, err = process.communicate(timeout=LIMIT)
    except subprocess.TimeoutExpired:
        process.terminate()  # torchrun ends its workers
        out, err = process.communicate(timeout=60)
        raise AssertionError(f"no end within {LIMIT} s: {out}\n{err}") from None
    return process.returncode, out, err


# ---- by the library


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """Every case trained by two ranks: `tests/training/two_ranks.py` writes what came of them."""
    folder = tmp_path_factory.mktemp("ranks")
    status, out, err = end(launch("tests.training.two_ranks", str(folder)))
    assert status == 0, out + err
    return folder


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_make_the_updates_of_one_process(trained, name):
    settings, kind = CASES[name]
    alone = Trainer(settings, data(kind))
    alone.train()
    together = load_file(trained / f"{name}.safetensors")
    for key, tensor in {**alone.updater.tensors(), "best": alone.best}.items():
        torch.testing.assert_close(
            together[key], tensor, rtol=1e-3, atol=2e-5, msg=lambda m, k=key: f"{k}: {m}"
        )


@pytest.mark.parametrize("name", CASES)
def test_all_ranks_hold_the_same_bits(trained, name):
    first, second = (load_file(trained / f"{name}.rank-{rank}.safetensors") for rank in (0, 1))
    assert first.keys() == second.keys()
    for key in first:
        if not key.startswith("state."):  # of its own lanes
            assert torch.equal(first[key], second[key]), key


def test_two_ranks_begin_and_one_process_goes_on(trained, tmp_path):
    """A folder that two ranks left in mid-run, taken up by one process, ends where an undisturbed run does."""
    settings = recipe(data__lanes=4, stop__epochs=4, **DEEP)
    session.run_recipe(settings, tmp_path / "whole", data=music())
    session.run_recipe(session.recipe_of(trained / "folder"), trained / "folder", data=music())
    for name in ("best.safetensors", "last.safetensors"):
        a, b = load_file(tmp_path / "whole" / name), load_file(trained / "folder" / name)
        for key, tensor in a.items():
            torch.testing.assert_close(b[key], tensor, rtol=1e-3, atol=2e-5)
    assert [row["epoch"] for row in load_run(trained / "folder").metrics()] == [1, 2, 3, 4]


@pytest.mark.parametrize(("name", "layer", "x"), layers())
def test_fsdp2_shards_our_layers_without_surprises(trained, name, layer, x):
    """`fully_shard` over two ranks: outputs and every gradient of the layer that is whole."""
    y = layer(x)[0]
    y.square().sum().backward()
    halves = [load_file(trained / f"{name}.fsdp-{rank}.safetensors") for rank in (0, 1)]
    torch.testing.assert_close(torch.cat([half["y"] for half in halves], 1), y)
    for key, p in layer.named_parameters():
        for half in halves:  # FSDP takes the mean over ranks
            torch.testing.assert_close(2 * half[key], p.grad, rtol=1e-4, atol=1e-5)


# ---- shares, without processes


@pytest.mark.parametrize(("lanes", "count"), [(4, 2), (5, 2), (7, 3), (1, 2), (3, 3)])
def test_every_lane_belongs_to_one_rank(lanes, count):
    shares = [range(lanes)[Ranks(rank, count).share(lanes)] for rank in range(count)]
    assert [lane for share in shares for lane in share] == list(range(lanes))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_fewer_lanes_than_processes_are_refused():
    with pytest.raises(UserError, match=r"data.lanes=1 cannot be split over 2 .* --batch-size 2"):
        Ranks(0, 2).check_lanes(1)


# ---- by the command


def train(out: Path, *words: str) -> tuple[str, ...]:
    small = ("--model", "rnn", "--hidden", "8", "--data.chunk", "20", "--device", "cpu", "--level", "char")
    return ("deeprnn", "train", str(text_file()), *small, "--out", str(out), *words)


def test_a_refused_command_prints_one_message(tmp_path):
    """On rank 0, though every rank meets the error; the run folder is not begun."""
    status, _, err = end(launch(*train(tmp_path, "--batch-size", "1", "--epochs", "1")))
    assert status != 0
    assert err.count("data.lanes=1 cannot be split over 2 processes") == 1
    assert not list(tmp_path.rglob("recipe.toml"))


@pytest.mark.slow
def test_a_killed_worker_starts_again_from_the_last_checkpoint(tmp_path):
    words = train(tmp_path, "--batch-size", "4", "--epochs", "12", "--stop.patience", "0", "--name", "killed")
    process = launch(*words, torchrun=("--max-restarts", "2", "--monitor-interval", "0.2"))
    folder, until = tmp_path / "killed", time.monotonic() + LIMIT
    while not (folder / "last.json").exists():
        assert process.poll() is None, end(process)
        assert time.monotonic() < until
        time.sleep(0.05)
    os.kill(worker_of(process.pid, rank=1), signal.SIGKILL)
    status, out, err = end(process)
    assert status == 0, err
    assert out.count("going on at epoch") == 1
    run = load_run(folder)
    assert [row["epoch"] for row in run.metrics()] == list(range(1, 13))
    status, _, err = end(launch(*words[:-1], "undisturbed"))
    assert status == 0, err
    a, b = (load_file(tmp_path / n / "last.safetensors") for n in ("killed", "undisturbed"))
    assert all(torch.equal(a[key], b[key]) for key in b)


def worker_of(parent: int, rank: int) -> int:
    """The process that torchrun started as that rank."""
    for place in Path("/proc").glob("[0-9]*"):
        try:
            fields = (place / "stat").read_text().rpartition(")")[2].split()
            environ = (place / "environ").read_bytes().split(b"\0")
        except OSError:  # it has ended, or is somebody else's
            continue
        if int(fields[1]) == parent and f"RANK={rank}".encode() in environ:
            return int(place.name)
    raise AssertionError(f"torchrun has no worker of rank {rank}")
