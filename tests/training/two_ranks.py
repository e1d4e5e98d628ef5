"""What each of two processes does for `test_ranks.py`: train every case, and save what it holds at the end."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from deeprnn.training import session
from deeprnn.training.loop import Trainer
from deeprnn.training.ranks import Ranks, joined
from deeprnn.training.saving import Interrupted
from tests.training.test_ranks import CASES, data, layers
from tests.training.toys import DEEP, music, recipe


def train_cases(ranks: Ranks, folder: Path) -> None:
    for name, (settings, kind) in CASES.items():
        trainer = Trainer(settings, data(kind), ranks=ranks)
        trainer.train()
        own = {**trainer.updater.tensors(), "best": trainer.best}
        save_file(own, folder / f"{name}.rank-{ranks.rank}.safetensors")
        whole = {**trainer.updater.whole_tensors(), "best": trainer.best}
        if ranks.lead:
            save_file(whole, folder / f"{name}.safetensors")


def stop_in_mid_run(ranks: Ranks, folder: Path) -> None:
    """One rank receives a signal in epoch 3; both stop there, at the same update."""
    received: list[int] = []

    def watch(trainer: Trainer, _: Path) -> list:
        class Signal:
            def updated(self, trainer: Trainer) -> None:
                if trainer.epoch == 3 and trainer.index == 2:
                    received.append(15)

            def epoch_ended(self, *_: object) -> None:
                """Nothing."""

        return [Signal()]

    try:
        session.run_recipe(
            recipe(data__lanes=4, stop__epochs=4, **DEEP),
            folder / "folder",
            data=music(),
            watch=watch,  # of the lead: rank 1 has to learn of its signal
            received=received,
            ranks=ranks,
        )
    except Interrupted:
        return
    raise AssertionError(f"rank {ranks.rank} was not interrupted")


def shard_layers(ranks: Ranks, folder: Path) -> None:
    """Layers under FSDP2: outputs of this rank's half of the batch, and the summed gradients, made whole again."""
    mesh = init_device_mesh("cpu", (ranks.count,))
    for name, layer, x in layers():
        fully_shard(layer, mesh=mesh)
        y = layer(x[:, 2 * ranks.rank : 2 * ranks.rank + 2])[0]
        y.square().sum().backward()
        gradients = {key: p.grad.full_tensor() for key, p in layer.named_parameters()}
        save_file({"y": y.detach(), **gradients}, folder / f"{name}.fsdp-{ranks.rank}.safetensors")


if __name__ == "__main__":
    torch.set_num_threads(1)
    with joined(torch.device("cpu")) as everyone:
        train_cases(everyone, Path(sys.argv[1]))
        stop_in_mid_run(everyone, Path(sys.argv[1]))
        shard_layers(everyone, Path(sys.argv[1]))
    # A device mesh keeps gloo's threads beyond `destroy_process_group`; ended by the interpreter in any order, they now
    # and then abort it ("terminate called without an active exception").
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
