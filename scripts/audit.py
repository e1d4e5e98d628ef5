"""Look every pinned release up in the public database of vulnerabilities: make audit.

Exit status 0: none is known. 1: some are, and are listed. 3: the database could not be asked.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
# The index's build of torch has the CPU's releases and NVIDIA's libraries besides.
LOCKS = (ROOT / "requirements.lock", ROOT / "requirements-cuda.lock")
UNREACHABLE = "nothing was audited: the database of vulnerabilities cannot be reached from this machine"


def ask(locks: Sequence[Path] = LOCKS, seconds: float = 300) -> Sequence[Mapping[str, Any]]:
    """What pip-audit says of each release; nothing where it cannot ask."""
    command = [sys.executable, "-m", "pip_audit", "--disable-pip", "--require-hashes"]
    command += [word for lock in locks for word in ("--requirement", str(lock))]
    try:
        done = subprocess.run([*command, "--format", "json", "--progress-spinner", "off"], capture_output=True,
                              text=True, timeout=seconds)  # fmt: skip
        return json.loads(done.stdout)["dependencies"]
    except (subprocess.TimeoutExpired, ValueError, KeyError):
        return ()


def tell(found: Sequence[Mapping[str, Any]]) -> int:
    """The verdict for a person; the exit status."""
    asked = [one for one in found if "skip_reason" not in one]
    if not asked:
        print(UNREACHABLE)
        return 3
    bad = [one for one in asked if one["vulns"]]
    for one in bad:
        for fault in one["vulns"]:
            mended = ", ".join(fault.get("fix_versions") or ["no version yet"])
            print(f"{one['name']} {one['version']}: {fault['id']}, mended in {mended}")
    unknown = [one["name"] for one in found if "skip_reason" in one]
    if unknown:
        print(f"not in the database: {', '.join(unknown)}")
    print(f"{len(asked)} releases audited, {len(bad)} with known vulnerabilities")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(tell(ask()))
