"""A PostgreSQL server of the tests' own, on loopback, made from the system's binaries."""

from __future__ import annotations

import importlib.util
import os
import shutil
import socket
import subprocess
import tempfile
from pathlib import Path
from urllib.parse import quote

import pytest

from deeprnn.sweeps.trial_storage import DRIVERS

USER, PASSWORD = "sweeper", "a+secret/with:signs@and%"
LIMIT = 60
"""seconds for a command of PostgreSQL's"""


def needed() -> Path:
    """The folder of PostgreSQL's binaries; skips the test where they or a driver for Python are missing."""
    if not any(importlib.util.find_spec(driver) for driver in DRIVERS):
        pytest.skip("no driver for PostgreSQL is installed: pip install 'deeprnn[postgresql]'")
    found = [Path(place).resolve().parent for place in [shutil.which("initdb")] if place]
    found += sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    for folder in found:
        if (folder / "initdb").exists() and (folder / "pg_ctl").exists():
            return folder
    pytest.skip("no PostgreSQL server is installed here: on Debian its package is postgresql")


class Server:
    """Begins at `with`, listens on a port of 127.0.0.1 alone, and leaves nothing."""

    def __init__(self) -> None:
        self.binaries = needed()
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]

    def __enter__(self) -> Server:
        self.folder = Path(tempfile.mkdtemp(prefix="deeprnn-postgresql-"))
        try:
            # PostgreSQL refuses to run as root, and pytest's own folders are closed to others.
            self.owner = "nobody" if os.geteuid() == 0 else None
            (self.folder / "password").write_text(PASSWORD)
            if self.owner is not None:
                shutil.chown(self.folder, self.owner)
                shutil.chown(self.folder / "password", self.owner)
            words = ["-U", USER, "-A", "scram-sha-256", "--pwfile", str(self.folder / "password")]
            self._run(
                "initdb", "-D", str(self.folder / "data"), *words, "-E", "UTF8", "--locale", "C", "--no-sync"
            )
            self.start()
        except BaseException:
            shutil.rmtree(self.folder, ignore_errors=True)
            raise
        return self

    def start(self) -> None:
        """Start it, again after `stop`, and wait until it answers."""
        settings = f"-p {self.port} -c listen_addresses=127.0.0.1 -c unix_socket_directories= -c fsync=off"
        log = str(self.folder / "log")
        self._run("pg_ctl", "-D", str(self.folder / "data"), "-w", "-l", log, "-o", settings, "start")

    def stop(self) -> None:
        """End it at once, as a crash would; what was committed is kept."""
        self._run("pg_ctl", "-D", str(self.folder / "data"), "-m", "immediate", "stop")

    def database(self, name: str) -> str:
        """A new, empty database's URL."""
        words = ["-h", "127.0.0.1", "-p", str(self.port), "-U", USER, name]
        self._run("createdb", *words, PGPASSWORD=PASSWORD)
        return self.url(name)

    def url(self, name: str, password: str = PASSWORD) -> str:
        """A database's URL."""
        return f"postgresql://{USER}:{quote(password, safe='')}@127.0.0.1:{self.port}/{name}"

    def _run(self, program: str, *words: str, **variables: str) -> None:
        done = subprocess.run(
            [str(self.binaries / program), *words],
            user=self.owner,
            cwd=self.folder,
            env={"PATH": os.defpath, "LC_ALL": "C", **variables},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,  # which the server keeps open
            stderr=(errors := tempfile.TemporaryFile()),  # noqa: SIM115  closed with its last reference
            timeout=LIMIT,
        )
        errors.seek(0)
        assert done.returncode == 0, f"{program}: {errors.read().decode()}"

    def __exit__(self, *_: object) -> None:
        try:
            if (self.folder / "data" / "postmaster.pid").exists():
                self.stop()
        finally:
            shutil.rmtree(self.folder, ignore_errors=True)
