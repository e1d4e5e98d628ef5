"""`deeprnn doctor`: what this installation has and would do."""

from __future__ import annotations

import json
import os
import platform
import sys
from dataclasses import dataclass
from importlib import metadata
from typing import Any

EXTRAS = {
    "cli": ("tyro", "rich", "matplotlib"),
    "midi": ("symusic",),
    "bach": ("music21",),
    "web": ("starlette", "uvicorn", "python-multipart"),
    "export": ("onnx", "onnxscript", "onnxruntime"),
    "fastcpu": ("llvmlite",),
    "tensorboard": ("tensorboard",),
    "track": ("mlflow-skinny",),
    "notebooks": ("nbformat", "nbclient", "ipykernel"),
}


@dataclass(frozen=True)
class Doctor:
    """Print versions, devices, chosen backends and where data would be looked for."""

    json: bool = False
    """one JSON document instead of text"""

    def run(self) -> int:
        """Look around and print."""
        examined = examine()
        if self.json:
            print(json.dumps(examined, indent=2))
        else:
            show(examined)
        return 0


def version(package: str) -> str | None:
    """The installed version, None where the package is absent."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def examine() -> dict[str, Any]:
    """Everything the command prints, as plain data."""
    import torch

    return {
        "deeprnn": version("deeprnn"),
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "packages": {p: version(p) for p in ("torch", "numpy", "safetensors")},
        "extras": {extra: {p: version(p) for p in names} for extra, names in EXTRAS.items()},
        "cpu": {"cores": os.cpu_count(), "torch_threads": torch.get_num_threads(),
                "capability": torch.backends.cpu.get_cpu_capability()},
        "gpus": gpus(),
        "backends": backends(),
        "data": data_places(),
    }  # fmt: skip


def gpus() -> list[dict[str, Any]]:
    """The NVIDIA GPUs that torch sees."""
    import torch

    out = []
    for i in range(torch.cuda.device_count()):
        p = torch.cuda.get_device_properties(i)
        out.append(
            {"name": p.name, "capability": f"{p.major}.{p.minor}", "memory_gb": round(p.total_memory / 1e9)}
        )
    return out


def backends() -> list[dict[str, Any]]:
    """For a plain RNN and a DT(S)-RNN of 400 units: the backend chosen on each device, and why."""
    import torch

    from deeprnn.backends.call import Case
    from deeprnn.backends.choose import describe, fastest_backend, why_not
    from deeprnn.backends.registry import PREFERENCE
    from deeprnn.cells.deep_transition import DeepTransition

    cells = {
        "RNN 400": DeepTransition((400,), ("sigmoid",), (False,)).cell,
        "DT(S)-RNN 400,400": DeepTransition((400, 400), ("sigmoid", "sigmoid"), (False, True)).cell,
    }
    devices = [name for name in PREFERENCE if name != "cuda" or torch.cuda.is_available()]
    out = []
    for device in devices:
        for label, cell in cells.items():
            case = Case(cell, torch.device(device), torch.float32)
            reasons = {name: why_not(name, cell.text, device, case.dtype) for name in PREFERENCE[device]}
            name = fastest_backend(cell.text, device, case.dtype)
            kernels = {f"B={batch}": describe(name, case, batch) for batch in (1, 64)}
            if len(set(kernels.values())) == 1:
                kernels = {"any batch": kernels["B=1"]}
            out.append(
                {
                    "device": device,
                    "case": label,
                    "not": {refused: reason for refused, reason in reasons.items() if reason is not None},
                    "backend": name,
                    "kernels": {batch: text for batch, text in kernels.items() if text},
                }
            )
    return out


def data_places() -> dict[str, Any]:
    """Where benchmark files are looked for, and which are there."""
    from deeprnn.data import sources

    folders = [
        {"path": str(folder), "state": "there" if folder.is_dir() else "not there"}
        for folder in sources.data_folders()
    ]
    sets = {}
    for name, source in sources.SOURCES.items():
        files = [sources.find_file(file) for file in source.files]
        sets[name] = str(files[0]) if files and all(files) else None
    return {"folders": folders, "sets": sets}


def show(examined: dict[str, Any]) -> None:
    """Print what was examined for a person."""
    from deeprnn.console import console, styled

    out = console()
    versions = f" {examined['deeprnn']}   python {examined['python']}   {examined['platform']}"
    out.print(styled(("deeprnn", "bold"), versions))
    out.print("  ".join(f"{p} {v}" for p, v in examined["packages"].items()))
    out.print("\nExtras", style="bold")
    for extra, packages in examined["extras"].items():
        missing = [p for p, v in packages.items() if v is None]
        if missing:
            remedy = f": pip install 'deeprnn[{extra}]'"
            out.print(styled(f"  {extra:<12} ", (f"missing {', '.join(missing)}", "yellow"), remedy))
        else:
            out.print(f"  {extra:<12} ready")
    cpu = examined["cpu"]
    out.print("\nDevices", style="bold")
    out.print(f"  CPU: {cpu['cores']} cores, torch uses {cpu['torch_threads']} threads, {cpu['capability']}")
    for gpu in examined["gpus"]:
        out.print(f"  GPU: {gpu['name']}, sm {gpu['capability']}, {gpu['memory_gb']} GB")
    if not examined["gpus"]:
        out.print("  GPU: none that torch can use")
    out.print(styled(("\nBackends", "bold"), " (what backend='auto' takes, fp32)"))
    for row in examined["backends"]:
        out.print(styled(f"  {row['device']:<5} {row['case']:<18} -> ", (row["backend"], "bold")))
        for batch, text in row["kernels"].items():
            out.print(f"        {batch}: {text}")
        for name, reason in row["not"].items():
            out.print(f"        not {name}: {reason}")
    out.print("\nData", style="bold")
    for place in examined["data"]["folders"]:
        out.print(f"  {place['path']}: {place['state']}")
    for name, path in examined["data"]["sets"].items():
        out.print(f"  {name:<12} {path or 'not found: deeprnn data get ' + name}")
    sys.stdout.flush()
