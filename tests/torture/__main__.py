"""python -m tests.torture: see the package's own words."""

from __future__ import annotations

import argparse
import os
import secrets
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: this process forks, and must have no threads


def main() -> int:
    """Attack; 1 where something was found."""
    from tests.torture import driver

    parser = argparse.ArgumentParser(prog="python -m tests.torture")
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument(
        "--seed", type=int, help="gives the same cases in the same order (a fresh one, which is shown)"
    )
    parser.add_argument("--only", nargs="*", default=[], help="words of attacks' names")
    parser.add_argument(
        "--jobs", type=int, default=os.cpu_count() or 1, help="attacks at once (as many as cores)"
    )
    parser.add_argument("--list", action="store_true", help="name the attacks")
    parser.add_argument("--json", type=Path, default=Path("out/torture.json"), help="where the summary goes")
    options = parser.parse_args()
    chosen = driver.attacks(options.only)
    if options.list:
        for attack in chosen:
            print(f"{attack.name:<28} {(attack.run.__doc__ or '').splitlines()[0]}")
        return 0
    seed = secrets.randbelow(1_000_000) if options.seed is None else options.seed
    print(f"{len(chosen)} attacks, {options.minutes:g} minutes, --seed {seed}", flush=True)
    found = driver.run(chosen, options.minutes, seed, max(1, options.jobs), options.json.parent / "torture")
    driver.tell(found)
    driver.write(found, options.json)
    return 1 if found["findings"] else 0


if __name__ == "__main__":
    sys.exit(main())
