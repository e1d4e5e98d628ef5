"""Write the locks: constraints.txt with the sha256 of every file that may be installed.

    python scripts/lock.py            # make lock: requirements.lock; requirements-cpu.lock where pip finds that build
    python scripts/lock.py --cuda     # also requirements-cuda.lock: torch as the index has it, and NVIDIA's libraries

pip is asked what the project needs and what its index holds, wherever pip is configured to look. All files of a
release are listed, for every platform and Python. torch has locks of its own: pip would take the index's build
wherever both are allowed, and on Linux that needs gigabytes of libraries which the CPU's does not.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import unquote, urlparse

from packaging.utils import (
    InvalidSdistFilename,
    InvalidWheelFilename,
    canonicalize_name,
    parse_sdist_filename,
    parse_wheel_filename,
)
from packaging.version import Version

ROOT = Path(__file__).parent.parent
CONSTRAINTS = ROOT / "constraints.txt"
HEAD = "# Made by `make lock` from constraints.txt: do not edit. Installed by `make install-locked`.\n"
BUILD = re.compile(r"(torch|triton|nvidia-.*|cuda-.*)$")
"""what differs between the builds of torch"""


def pins(path: Path = CONSTRAINTS) -> dict[str, str]:
    """Versions by canonical name."""
    lines = [line.split("#")[0].strip() for line in path.read_text().splitlines()]
    found = (line.rstrip(" \\").partition("==") for line in lines if "==" in line)
    return {canonicalize_name(name): version.split()[0] for name, _, version in found}


def pip(*arguments: str, env: Mapping[str, str] | None = None) -> str:
    """What pip says, its errors told in full."""
    done = subprocess.run([sys.executable, "-m", "pip", *arguments], capture_output=True, text=True, env=env)
    if done.returncode:
        sys.exit(f"pip {' '.join(arguments)} failed:\n{done.stderr[-2000:]}")
    return done.stdout + done.stderr


def resolved(requirements: Sequence[str], env: Mapping[str, str] | None = None) -> dict[str, str]:
    """Everything that pip would install into an environment that holds pip itself, by name."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        options = (
            "--dry-run",
            "--ignore-installed",
            "--quiet",
            "--report",
            str(report),
            "-c",
            str(CONSTRAINTS),
        )
        pip("install", *options, *requirements, env=env)
        wanted = json.loads(report.read_text())["install"]
    found = {canonicalize_name(one["metadata"]["name"]): one["metadata"]["version"] for one in wanted}
    return {name: version for name, version in found.items() if name not in ("deeprnn", "pip")}


def hashes(name: str, version: str) -> list[str]:
    """The sha256 of all files of a release that pip finds, compatible with this machine or not."""
    found = set()
    for link in re.findall(r"(?:https?|file)://[^\s,]+", pip("index", "versions", "--pre", name, "-vv")):
        address = urlparse(link)
        if _version_of(unquote(address.path.rpartition("/")[2])) != (name, version):
            continue
        if address.fragment.startswith("sha256="):
            found.add(address.fragment.removeprefix("sha256="))
        elif address.scheme == "file":
            found.add(hashlib.sha256(Path(unquote(address.path)).read_bytes()).hexdigest())
    if not found:
        sys.exit(f"pip finds no file of {name} {version}: is it still in the index?")
    return sorted(found)


def _version_of(file: str) -> tuple[str, str] | None:
    try:
        name, version = (
            parse_wheel_filename(file)[:2] if file.endswith(".whl") else parse_sdist_filename(file)
        )
    except (InvalidWheelFilename, InvalidSdistFilename):
        return None
    return name, str(version)


def write(path: Path, wanted: Mapping[str, str]) -> None:
    """The lock of some releases."""
    with ThreadPoolExecutor(8) as pool:
        found = dict(zip(wanted, pool.map(hashes, wanted, wanted.values()), strict=True))
    lines = [HEAD]
    for name in sorted(wanted):
        # torch asks for these on Linux only, and there are none for other systems.
        where = " ; sys_platform == 'linux'" if BUILD.match(name) and name != "torch" else ""
        lines += [
            f"{name}=={wanted[name]}{where} \\\n",
            " \\\n".join(f"    --hash=sha256:{h}" for h in found[name]),
            "\n",
        ]
    path.write_text("".join(lines))
    print(f"{path.name}: {len(wanted)} releases, {sum(map(len, found.values()))} files")


def main() -> None:
    """Resolve, compare with the constraints, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--cuda", action="store_true", help="also requirements-cuda.lock (downloads gigabytes)"
    )
    options = parser.parse_args()
    known = pins()
    wanted = resolved([f"{ROOT}[all,dev]"])
    common = {name: version for name, version in wanted.items() if not BUILD.match(name)}
    missing = [f"{name}=={version}" for name, version in common.items() if known.get(name) != version]
    if missing:
        sys.exit(f"constraints.txt does not pin {', '.join(sorted(missing))}: add the lines and try again")
    write(ROOT / "requirements.lock", common)
    if Version(wanted["torch"]).local == "cpu":
        write(ROOT / "requirements-cpu.lock", {"torch": wanted["torch"]})
    if options.cuda:
        index_alone = {name: value for name, value in os.environ.items() if name != "PIP_FIND_LINKS"}
        whole = resolved([f"torch=={known['torch']}"], {**index_alone, "PIP_CONFIG_FILE": os.devnull})
        write(ROOT / "requirements-cuda.lock", {name: whole[name] for name in whole if BUILD.match(name)})


if __name__ == "__main__":
    main()
