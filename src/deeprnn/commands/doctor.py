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
    "notebooks": ("nbformat", "nbclient", "ipykernel"),
}


@dataclass(frozen=True)
class Doctor:
    """Print versions, devices, chosen backends and where data would be looked for."""

    json: bool = False
    """one JSON document instead of text"""

    def run(self) -> int:
        """Look around and print."""
        found = examine()
        if self.json:
            print(json.dumps(found, indent=2))
        else:
            show(found)
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

    from deeprnn.backends import PREFERENCE, TransitionSpec, choose, load, why_not

    cases = {
        "RNN 400": TransitionSpec((400,), ("sigmoid",), (False,)),
        "DT(S)-RNN 400,400": TransitionSpec((400, 400), ("sigmoid", "sigmoid"), (False, True)),
    }
    devices = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    out = []
    for device in devices:
        for label, spec in cases.items():
            refused = {}
            for name in PREFERENCE[device]:
                if (reason := why_not(name, spec, device, torch.float32)) is not None:
                    refused[name] = reason
            row: dict[str, Any] = {"device": device, "case": label, "not": refused}
            row["backend"] = choose(spec, device, torch.float32)
            if row["backend"] == "cuda":
                row["kernels"] = kernels(spec)
            elif row["backend"] == "cpu":
                row["kernels"] = {"as": load("cpu").describe_choice()}
            out.append(row)
    return out


def kernels(spec: Any) -> dict[str, str]:
    """The kernel that serves one row, and a batch."""
    import torch

    from deeprnn.backends.cuda import plan

    device = torch.device("cuda")
    return {f"B={b}": plan(spec, b, device=device)["forward"]["text"] for b in (1, 64)}


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


def show(found: dict[str, Any]) -> None:
    """The same for people."""
    from deeprnn.console import console

    out = console()
    out.print(f"[bold]deeprnn[/bold] {found['deeprnn']}   python {found['python']}   {found['platform']}")
    out.print("  ".join(f"{p} {v}" for p, v in found["packages"].items()))
    out.print("\n[bold]Extras[/bold]")
    for extra, packages in found["extras"].items():
        missing = [p for p, v in packages.items() if v is None]
        state = (
            f"[yellow]missing {', '.join(missing)}[/yellow]: pip install 'deeprnn\\[{extra}]'"
            if missing
            else "ready"
        )
        out.print(f"  {extra:<12} {state}")
    cpu = found["cpu"]
    out.print("\n[bold]Devices[/bold]")
    out.print(f"  CPU: {cpu['cores']} cores, torch uses {cpu['torch_threads']} threads, {cpu['capability']}")
    for gpu in found["gpus"]:
        out.print(f"  GPU: {gpu['name']}, sm {gpu['capability']}, {gpu['memory_gb']} GB")
    if not found["gpus"]:
        out.print("  GPU: none that torch can use")
    out.print("\n[bold]Backends[/bold] (what backend='auto' takes, fp32)")
    for row in found["backends"]:
        out.print(f"  {row['device']:<5} {row['case']:<18} -> [bold]{row['backend']}[/bold]")
        for batch, text in row.get("kernels", {}).items():
            out.print(f"        {batch}: {text}")
        for name, reason in row["not"].items():
            out.print(f"        not {name}: {reason}")
    out.print("\n[bold]Data[/bold]")
    for place in found["data"]["folders"]:
        out.print(f"  {place['path']}: {place['state']}")
    for name, path in found["data"]["sets"].items():
        out.print(f"  {name:<12} {path or 'not found: deeprnn data get ' + name}")
    sys.stdout.flush()
