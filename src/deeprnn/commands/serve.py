"""`deeprnn serve`: the page."""

from __future__ import annotations

import ipaddress
import socket
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import tyro

from deeprnn.errors import UserError, need


@dataclass(frozen=True)
class Serve:
    """Open the page: browse runs, watch them learn, play with what they learned.

    Runs are looked for below the given folders (default: runs/, beside the run that comes with deeprnn).
    Nothing leaves this machine: the page needs no network, and the server answers only to localhost unless
    another --host is given.
    """

    runs: Annotated[tuple[Path, ...], tyro.conf.Positional] = ()
    """Folders that hold runs, or runs themselves."""
    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 lets the whole network in, without a password."""
    port: int = 8000
    """Port to listen on; 0 picks a free one."""
    names: tuple[str, ...] = field(default=())
    """Further host names to answer to, beside localhost and addresses in numbers."""
    workers: int = 2
    """Threads that compute."""
    threads: int = 1
    """CPU threads that each of these uses."""
    queue: int = 64
    """Requests that may wait or compute at once; one more is told to come back later."""
    edit: Literal["local", "always", "never"] = "local"
    """When runs may be renamed, tagged and deleted from the page: while only this machine reaches it, or regardless."""
    open: bool = False
    """Open a browser."""

    def run(self) -> int:
        """Serve until interrupted."""
        need("uvicorn", extra="web")
        need("starlette", extra="web")
        from deeprnn.console import console
        from deeprnn.runs import shipped
        from deeprnn.web.app import create_app
        from deeprnn.web.limits import Limits
        from deeprnn.web.server import make_server

        named = self.runs or (Path("runs"),)
        folders = named if self.runs else (*named, shipped.FOLDER)
        self._check()
        names = (*self.names, *(() if _is_address(self.host) else (self.host,)))
        limits = Limits(workers=self.workers, threads=self.threads, jobs=self.queue)
        server = make_server(create_app(folders, limits, names, self.editable), limits)
        listener = self._listen()
        url = f"http://{_shown(self.host)}:{listener.getsockname()[1]}/"
        console().print(f"deeprnn: {', '.join(map(str, named))} at {url} (Ctrl+C stops)")
        if not _is_local(self.host):
            console(stderr=True).print(
                f"warning: {self.host} lets other machines in, and there is no password"
            )
        if self.open:
            import webbrowser

            webbrowser.open(url)
        server.run(sockets=[listener])
        return 0

    @property
    def editable(self) -> bool:
        """Whether the page may change runs: others who reach it have no password to give."""
        return self.edit == "always" or (self.edit == "local" and _is_local(self.host))

    def _check(self) -> None:
        for folder in self.runs:
            if not folder.is_dir():
                raise UserError(f"there is no folder {str(folder)!r}: name one that holds runs")
        if min(self.workers, self.queue, self.threads) < 1:
            raise UserError("--workers, --threads and --queue must be at least 1")
        from deeprnn.commands.training import MOST_THREADS

        if max(self.workers, self.threads) > MOST_THREADS:
            raise UserError(f"--workers and --threads must be at most {MOST_THREADS:,}")

    def _listen(self) -> socket.socket:
        """Bind here, so that a taken port is a plain message and port 0 can be told."""
        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((self.host, self.port))
        except (
            OSError,
            OverflowError,
            TypeError,
            UnicodeError,
        ) as error:  # no port, no host, or no name of one
            listener.close()
            raise UserError(
                f"cannot listen on {self.host} port {self.port}: {error}: try --port 0"
            ) from error
        listener.listen(256)
        return listener


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _is_local(host: str) -> bool:
    return host == "localhost" or (_is_address(host) and ipaddress.ip_address(host).is_loopback)


def _shown(host: str) -> str:
    if host in ("0.0.0.0", "::"):
        return "localhost"
    return f"[{host}]" if ":" in host else host
