"""How long the first call of a process takes: with an empty cache of kernels, and with kernels on disk.

Each measurement is a process of its own (`python -m deeprnn.bench.first_call ...`). It starts the clock when
torch, the GPU and the tensors are ready, and stops it when the first forward and backward are done. A third
process looks at the parts of a call that finds its kernels on disk.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

from deeprnn.bench.peers import Bench, Work, backward

LIMIT = 120.0
"""seconds for one of the fresh processes"""


def first_calls(work: Work) -> dict[str, Any]:
    """Seconds of the first call, cold and cached, and where the cached one spends them."""
    measured: dict[str, Any] = {"hidden": work.hidden, "batch": work.batch, "device": work.device}
    with tempfile.TemporaryDirectory() as folder:
        for name in ("cold", "cached", "parts"):
            shape = [work.steps, work.batch, work.hidden, work.depth]
            command = [sys.executable, "-m", "deeprnn.bench.first_call", work.device, *map(str, shape), name]
            environment = {**os.environ, "DEEPRNN_CACHE": folder}
            try:
                done = subprocess.run(
                    command, env=environment, capture_output=True, text=True, timeout=LIMIT, check=True
                )
            except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
                measured["failed"] = f"{name}: {str(error.stderr or error)[-300:]}"
                return measured
            measured |= json.loads(done.stdout.splitlines()[-1])
    return measured


def measure_here(work: Work, name: str) -> dict[str, Any]:
    """In a fresh process: one of the measurements."""
    import torch

    def done() -> None:
        if work.device == "cuda":
            torch.cuda.synchronize()

    def timed(call: Callable[[], Any]) -> float:
        start = time.perf_counter()
        call()
        done()
        return round(time.perf_counter() - start, 4)

    bench = Bench(work)
    peer = bench.peer("ours, called")
    done()

    def train() -> Any:
        return backward(peer.run(), peer.parameters, bench.g)

    if name != "parts":
        return {f"{name}_s": timed(train), f"{name}_again_s": timed(train)}
    leaf = torch.ones(2, 2, device=work.device, requires_grad=True)
    parts = {  # what torch itself loads at its first product and its first backward, whoever asks
        "torch's first product": timed(lambda: leaf @ leaf),
        "torch's first backward": timed(lambda: torch.autograd.grad(leaf @ leaf, leaf, leaf.detach())),
    }
    before = set(sys.modules)
    outputs: list[Any] = []
    parts["forward"] = timed(lambda: outputs.append(peer.run()))
    parts["backward"] = timed(lambda: backward(outputs[0], peer.parameters, bench.g))
    parts["again"] = timed(train)
    imported = len(set(sys.modules) - before)
    if work.device == "cuda":
        from deeprnn.backends.cuda import nvrtc

        parts["the compiler's library, not needed"] = timed(nvrtc.version)
    return {"parts_s": parts, "modules_imported": imported}


def main() -> None:
    """`DEVICE STEPS BATCH HIDDEN DEPTH NAME`; prints one line of JSON."""
    device, steps, batch, hidden, depth, name = sys.argv[1:]
    work = Work(int(steps), int(batch), int(hidden), int(depth), device=device)
    print(json.dumps(measure_here(work, name)))


if __name__ == "__main__":
    main()
