"""Ranks on GPUs, started by torchrun: sums by NCCL inside captured updates, DDP and FSDP2 around our layers.

One GPU is enough for most of it: a rank of one does all that several do, its sums pass through NCCL. NCCL gives no two
ranks the same GPU, so two ranks need two. The same of one rank on the CPU, by gloo, shows that the test is one.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from deeprnn.runs.folder import load_run
from deeprnn.training.loop import Trainer
from tests.small_runs import text_file
from tests.training.one_gpu_each import TRAINED
from tests.training.test_ranks import CASES, data, end, launch, layers

gpu = pytest.mark.gpu
PLACES = [("cpu", 1), pytest.param(("cuda", 1), marks=gpu), pytest.param(("cuda", 2), marks=gpu)]


def need_gpus(count: int) -> None:
    if torch.cuda.device_count() < count:
        pytest.skip(
            f"NCCL gives every rank a GPU of its own: {count} are needed, {torch.cuda.device_count()} here"
        )


@pytest.fixture(scope="module", params=PLACES, ids=lambda place: f"{place[1]} on {place[0]}")
def trained(request, tmp_path_factory) -> tuple[str, int, Path]:
    """The device, the ranks, and what `one_gpu_each.py` wrote."""
    device, count = request.param
    if device == "cuda":
        need_gpus(count)
    folder = tmp_path_factory.mktemp("nccl")
    status, out, err = end(launch("tests.training.one_gpu_each", str(folder), device, count=count))
    assert status == 0, out + err
    return device, count, folder


def test_sums_went_through_the_backend_of_the_device(trained):
    device, _, folder = trained
    told = json.loads((folder / "told.json").read_text())
    assert "nccl" in told["backends"] or device == "cpu"
    assert told["calls"][device] >= len(TRAINED), "at least one sum a case, captured with its update"


@pytest.mark.parametrize("name", TRAINED)
def test_ranks_make_the_updates_of_one_process(trained, name):
    device, _, folder = trained
    settings, kind = CASES[name]
    alone = Trainer(settings, data(kind), device=device)
    alone.train()
    together = load_file(folder / f"{name}.safetensors")
    for key, tensor in {**alone.updater.tensors(), "best": alone.best}.items():
        torch.testing.assert_close(
            together[key], tensor.cpu(), rtol=1e-3, atol=2e-5, msg=lambda m, k=key: f"{k}: {m}"
        )


@pytest.mark.parametrize("wrap", ["ddp", "fsdp"])
@pytest.mark.parametrize("number", range(len(layers())), ids=[name for name, _, _ in layers()])
def test_wrapped_layers_have_the_outputs_and_gradients_of_the_layer(trained, wrap, number):
    device, count, folder = trained
    name, layer, x = layers()[number]
    layer, x = layer.to(device), x.to(device)
    y = layer(x)[0]
    y.square().sum().backward()
    parts = [load_file(folder / f"{name}.{wrap}-{rank}.safetensors") for rank in range(count)]
    torch.testing.assert_close(
        torch.cat([part["y"] for part in parts], 1), y.detach().cpu(), rtol=1e-4, atol=1e-5
    )
    for key, p in layer.named_parameters():
        for part in parts:
            torch.testing.assert_close(count * part[key], p.grad.cpu(), rtol=1e-4, atol=1e-5)


# ---- by the command


def train(out: Path, name: str) -> tuple[str, ...]:
    small = ("--model", "rnn", "--hidden", "8", "--data.chunk", "20", "--batch-size", "4", "--epochs", "2")
    return ("deeprnn", "train", str(text_file()), "--level", "char", *small, "--out", str(out), "--name", name,
            "--device", "cuda")  # fmt: skip


@gpu
@pytest.mark.parametrize("count", [1, 2])
def test_torchrun_trains_on_gpus(tmp_path, count):
    need_gpus(count)
    status, _, err = end(launch(*train(tmp_path, "ranks"), count=count))
    assert status == 0, err
    from deeprnn.cli import main

    assert main([*train(tmp_path, "alone")[1:], "--quiet"]) == 0
    ranks, alone = (load_run(tmp_path / name) for name in ("ranks", "alone"))
    assert [row["valid"] for row in ranks.metrics()] == pytest.approx(
        [row["valid"] for row in alone.metrics()], rel=1e-3
    )
    assert ranks.info["environment"].get("processes", 1) == count


@gpu
def test_more_processes_than_gpus_are_refused_in_one_sentence(tmp_path):
    more = torch.cuda.device_count() + 1
    status, _, err = end(launch(*train(tmp_path, "many"), count=more))
    assert status != 0
    assert err.count(f"{more} processes on this machine need {more} GPUs") == 1
    assert not list(tmp_path.rglob("recipe.toml"))
