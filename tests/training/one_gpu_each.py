"""What each process does for `test_nccl.py`: train, and wrap layers, connected as ranks on GPUs are."""

from __future__ import annotations

import collections
import gc
import json
import os
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from deeprnn import launcher
from deeprnn.training.loop import Trainer
from deeprnn.training.ranks import Ranks, connect, disconnect
from tests.training.test_ranks import CASES, data, layers

TRAINED = ("noise", "members", "dropout", "average")


class OfOne(Ranks):
    """One rank that does all that several do: each sum goes through the backend, of one."""

    alone = False  # type: ignore[assignment]


def train_cases(ranks: Ranks, device: torch.device, folder: Path) -> None:
    for name in TRAINED:
        settings, kind = CASES[name]
        trainer = Trainer(settings, data(kind), ranks=ranks, device=device)
        trainer.train()
        whole = {**trainer.updater.whole_tensors(), "best": trainer.best}
        if ranks.lead:
            save_file({key: tensor.cpu() for key, tensor in whole.items()}, folder / f"{name}.safetensors")


def wrap_layers(ranks: Ranks, device: torch.device, folder: Path) -> None:
    """Outputs of this rank's share of the batch, and gradients, each the mean over ranks, made whole again."""
    mesh = init_device_mesh(device.type, (ranks.count,))
    place = [device.index] if device.type == "cuda" else None
    wraps = {
        "ddp": lambda layer: DistributedDataParallel(layer, device_ids=place),
        "fsdp": lambda layer: fully_shard(layer, mesh=mesh),
    }
    for kind, wrap in wraps.items():
        for name, layer, x in layers():
            wrapped = wrap(layer.to(device))
            y = wrapped(x[:, ranks.share(x.shape[1])].to(device))[0]
            y.square().sum().backward()
            gradients = {
                key: (p.grad.full_tensor() if kind == "fsdp" else p.grad).cpu()
                for key, p in layer.named_parameters()
            }
            save_file(
                {"y": y.detach().cpu(), **gradients}, folder / f"{name}.{kind}-{ranks.rank}.safetensors"
            )


def main(folder: Path, kind: str) -> None:
    torch.set_num_threads(1)
    device = torch.device(kind) if kind == "cpu" else torch.device(kind, launcher.local_rank())
    if device.type == "cuda":
        torch.cuda.set_device(device)
    calls: collections.Counter[str] = collections.Counter()
    real = distributed.all_reduce

    def counted(tensor, *arguments, **options):
        calls[tensor.device.type] += 1
        return real(tensor, *arguments, **options)

    distributed.all_reduce = counted
    rank, count = connect(device)
    everyone = Ranks(rank, count) if count > 1 else OfOne()
    train_cases(everyone, device, folder)
    wrap_layers(everyone, device, folder)
    if everyone.lead:
        told = {"calls": calls, "backends": distributed.get_backend_config()}
        (folder / "told.json").write_text(json.dumps(told))
    disconnect()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
    gc.collect()
    # A device mesh keeps gloo's threads beyond `destroy_process_group` (see `two_ranks.py`).
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
