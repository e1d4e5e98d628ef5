"""One run of trackio's in a process of its own, told by lines of JSON on its input: settings first, then points.

trackio takes its folder and its account from the environment once, when it is imported, ends a run as soon as another
begins, and prints: none of that should happen to a process that trains. This one imports nothing of ours, and ends with
its input, so that a training that is killed still leaves every point it told.
"""

from __future__ import annotations

import json
import sys


def main() -> None:
    """Write what the lines say, until there are no more."""
    import trackio

    opening = json.loads(sys.stdin.readline())
    # Nothing of the machine besides: what it is busy with belongs to whoever owns it.
    run = trackio.init(**opening, resume="allow", embed=False, auto_log_cpu=False, auto_log_gpu=False)
    for line in sys.stdin:
        point = json.loads(line)
        run.log(point["values"], step=point["step"])
    run.finish()


if __name__ == "__main__":
    main()
