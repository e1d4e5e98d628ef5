"""Work in a process of its own, bounded in time and memory, with what it printed and how it ended.

A fork of this process has torch loaded already: a command takes milliseconds to start, not seconds. So this
process itself never trains, serves or starts threads.
"""

from __future__ import annotations

import os
import re
import resource
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

SECONDS = 30.0
MEGABYTES = 1024
"""more than this process has when it forks; a command on toy data needs a tenth"""
BUSY = 6
"""how many times longer a child may take than its time, while it gets something done"""
CRASHED = 70
"""exit status of a child whose work raised"""


@dataclass(frozen=True)
class Ended:
    """How a child ended."""

    what: str
    status: int
    """its exit status; minus a signal's number where that killed it"""
    out: str
    err: str
    seconds: float
    megabytes: float
    """the most it held beyond what it began with"""
    hung: bool
    """whether it had to be killed when its time was over"""


def forked(
    work: Callable[[], object],
    *,
    what: str = "",
    seconds: float = SECONDS,
    megabytes: int = MEGABYTES,
    cwd: Path | None = None,
    stdout: str | None = None,
    obey: float | None = None,
) -> Ended:
    """Run `work` in a fork; an int that it returns is the exit status.

    `obey`: work that may rightly take longer is sent SIGTERM when its time is over and has these seconds to end.
    """
    out, err = Pipe(), Pipe()
    began, held = time.monotonic(), resident()
    child = start(work, out.entrance if stdout is None else stdout, err.entrance, megabytes, cwd)
    hung = not ends(child, seconds, out, err)
    if hung and obey is not None:
        signal_group(child, signal.SIGTERM)
        hung = not ends(child, obey, out, err)
    signal_group(child, signal.SIGKILL)  # whatever it left behind, too
    _, status, usage = os.wait4(child, 0)
    taken, peak = time.monotonic() - began, max(0.0, usage.ru_maxrss / 1024 - held)
    return Ended(what, os.waitstatus_to_exitcode(status), out.text(), err.text(), taken, peak, hung)


class Pipe:
    """What a child prints: a pipe and not a file, for which a limit on files would hold as well."""

    MOST = 1_000_000

    def __init__(self) -> None:
        self.exit, self.entrance = os.pipe()
        os.set_blocking(self.exit, False)
        self.content = bytearray()

    def drain(self) -> bool:
        """Read what there is, so that the child need not wait; whether more may come."""
        try:
            part = os.read(self.exit, 1 << 16)
        except BlockingIOError:
            return True
        if len(self.content) < self.MOST:
            self.content += part
        return bool(part)

    def text(self) -> str:
        """All that was printed; the pipe is closed."""
        os.close(self.entrance)
        while self.drain() and _readable(self.exit):
            pass
        os.close(self.exit)
        return self.content.decode("utf-8", "replace")


def _readable(handle: int) -> bool:
    return bool(select.select([handle], [], [], 0)[0])


def start(
    work: Callable[[], object],
    out: int | str,
    err: int,
    megabytes: int = MEGABYTES,
    cwd: Path | None = None,
) -> int:
    """Fork, and return the child's number; its work's exception is a traceback, as of any Python program."""
    sys.stdout.flush()
    sys.stderr.flush()
    child = fork()
    if child:
        return child
    status = CRASHED
    try:
        os.setsid()
        _redirect(out, err)
        limit_memory(megabytes)
        if cwd is not None:
            os.chdir(cwd)
            os.environ["HOME"] = str(cwd)  # ~ is not the attacker's own home
        answer = work()
        status = answer if isinstance(answer, int) else 0
    except SystemExit as leaving:  # what the command line's parser does
        status = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    except BaseException:  # noqa: BLE001 - the parent reads of it
        traceback.print_exc()
    finally:
        try:
            sys.stdout.flush()
        except OSError as error:  # as the interpreter does on its way out
            status = 120
            print(f"exception ignored at exit: {error}", file=sys.stderr)
        sys.stderr.flush()
        os._exit(status)


def fork() -> int:
    """A fork; where the machine has no room for a process at the moment, a little later."""
    for _ in range(60):
        try:
            return os.fork()
        except BlockingIOError:
            time.sleep(0.5)
    return os.fork()


def wait(child: int, seconds: float, *pipes: Pipe, once: bool = False) -> bool:
    """Whether a child ends in time, while its pipes are read; it still has to be reaped.

    `once`: come back as soon as there was something to read.
    """
    handle, until = os.pidfd_open(child), time.monotonic() + seconds
    sources = {pipe.exit: pipe for pipe in pipes}
    try:
        while True:
            ready = select.select([handle, *sources], [], [], max(0.0, until - time.monotonic()))[0]
            for source in ready:
                if source != handle:
                    sources[source].drain()
            if handle in ready or not ready or once:
                return handle in ready
    finally:
        os.close(handle)


def ends(child: int, seconds: float, *pipes: Pipe) -> bool:
    """Whether a child ends within so many seconds, of the processor's time where others keep it busy."""
    ended, used = wait(child, seconds, *pipes), 0.0
    until = time.monotonic() + BUSY * seconds
    while not ended and used < (now := processor_seconds(child)) < seconds and time.monotonic() < until:
        used = now
        ended = wait(child, 2.0, *pipes)  # it got something done since the last look: on with it
    return ended


def signal_group(child: int, number: int) -> None:
    """Send a signal to a child and to all that it started."""
    try:
        os.killpg(child, number)
    except ProcessLookupError:
        pass
    except PermissionError:  # it has not become the head of a group yet
        os.kill(child, number)


def reap(child: int, wait: bool = True) -> int | None:
    """A child's exit status, once; None where it still runs or was asked after before."""
    try:
        found, status = os.waitpid(child, 0 if wait else os.WNOHANG)
    except ChildProcessError:
        return None
    return os.waitstatus_to_exitcode(status) if found else None


def stopped_or_ended(child: int, seconds: float) -> bool:
    """Wait until a child has stopped itself or ended; whether it has stopped."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        state = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[0]
        if state in "TZ":
            return state == "T"
        time.sleep(0.002)
    raise AssertionError(f"neither stopped nor ended after {seconds:.0f} s")


def limit_memory(megabytes: int) -> None:
    """Let this process have so much more than it has."""
    now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + megabytes * 2**20, resource.RLIM_INFINITY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def resident(process: int | str = "self") -> float:
    """Megabytes that a process holds now."""
    return _status(process)["VmRSS"]


def peak(process: int | str = "self") -> float:
    """Megabytes that a process held at most since it began, or since `forget_peak`."""
    return _status(process)["VmHWM"]


def processor_seconds(process: int) -> float:
    """What a process has used of the processor so far."""
    words = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


def forget_peak() -> None:
    """Count this process's peak from now on."""
    Path("/proc/self/clear_refs").write_text("5")


def _status(process: int | str) -> Mapping[str, float]:
    lines = (line.split() for line in Path(f"/proc/{process}/status").read_text().splitlines())
    return {words[0].rstrip(":"): int(words[1]) / 1024 for words in lines if words[0].startswith("Vm")}


def _redirect(out: int | str, err: int) -> None:
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(os.open(out, os.O_WRONLY) if isinstance(out, str) else out, 1)
    os.dup2(err, 2)
    # Fresh objects: what somebody put in the place of sys.stdout has no file behind it.
    sys.stdout = os.fdopen(1, "w", encoding="utf-8", closefd=False)
    sys.stderr = os.fdopen(2, "w", encoding="utf-8", errors="backslashreplace", closefd=False)


# ---- commands


def deeprnn(*arguments: str, cwd: Path | None = None, **bounds: object) -> Ended:
    """A command line of ours in a bounded process."""

    def work() -> int:
        from deeprnn.cli import main

        return main(arguments)

    return forked(work, cwd=cwd, **bounds)  # type: ignore[arg-type]


def shown(arguments: tuple[str, ...], most: int = 160) -> str:
    """A command line for a person, whatever bytes it has."""
    import shlex

    text = ascii(shlex.join(("deeprnn", *arguments)))[1:-1]
    return text if len(text) <= most else f"{text[: most - 3]}..."


class Rude(AssertionError):
    """A command did not end as it should."""

    def __init__(self, text: str, kind: str) -> None:
        super().__init__(text)
        self.kind = kind
        """what makes it the same fault as another"""


def check_polite(ended: Ended, allowed: tuple[int, ...] = (0, 1, 2)) -> None:
    """What every command owes a person: an end, in time, without a traceback, and a reason where it fails."""
    words = (ended.err.strip() or ended.out.strip())[-400:]
    if ended.hung:
        fault = f"still going after {ended.seconds:.0f} s"
    elif "Traceback (most" in ended.err + ended.out:
        fault, words = f"a traceback: {last_call(ended.err + ended.out)}", ""
    elif ended.status < 0 and ended.status not in allowed:
        fault = f"died of {signal.Signals(-ended.status).name}"
    elif ended.status not in allowed:
        fault = f"exit status {ended.status}"
    elif ended.status and not words:
        fault = f"exit status {ended.status} without a word"
    else:
        return
    about = f"{ended.what}: " if ended.what else ""
    raise Rude(f"{about}{fault}: {words}".rstrip(": "), fault)


def last_call(text: str) -> str:
    """Of a traceback, the error and the last place of ours."""
    frames = re.findall(r'File "([^"]*)", line (\d+)', text)
    ours = [frame for frame in frames if "/deeprnn/" in frame[0]] or frames or [("?", "?")]
    error = [
        line for line in text.splitlines() if re.match(r"[\w.]+(Error|Exception|Interrupt|Warning)?\b", line)
    ]
    return f"{(error or [''])[-1][:200]} ({ours[-1][0].rpartition('/')[2]}:{ours[-1][1]})"
