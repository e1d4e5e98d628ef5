"""Where packs are kept safe from the loss of a machine: any address that fsspec knows (file, s3, gs, …)."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

from deeprnn.errors import UserError, need
from deeprnn.files import write_atomically

ORDER = (
    *("metrics.jsonl", "best.json", "best.safetensors"),
    *("previous.safetensors", "previous.json", "last.safetensors", "last.json"),
)
"""what is copied, in this order: wherever it is cut off, some checkpoint and its tensors are both there"""


class Store:
    """A folder by its address, with copies of packs' and trials' folders."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self.fs, self.base = _open(self.url)

    def __reduce__(self) -> tuple[Any, ...]:
        return Store, (self.url,)

    def check(self) -> None:
        """Refuse a place that cannot be written, before anything depends on it."""
        with _explained(self.url):
            self.fs.makedirs(self.base, exist_ok=True)
            self._write(f"{self.base}/.checked", b"")

    def upload(self, folder: Path, name: str) -> None:
        """Copy a folder's files there."""
        with _explained(self.url):
            self.fs.makedirs(f"{self.base}/{name}", exist_ok=True)
            for file in ORDER:
                if (folder / file).is_file():
                    self._write(f"{self.base}/{name}/{file}", (folder / file).read_bytes())

    def download(self, name: str, folder: Path) -> None:
        """Bring what was copied there, where it is missing here."""
        with _explained(self.url):
            copies = {Path(p).name: p for p in self._list(f"{self.base}/{name}")}
            if any((folder / file).exists() for file in ORDER):
                return
            for file in ORDER:
                if file in copies:
                    write_atomically(folder / file, self.fs.cat_file(copies[file]))

    def remove(self, name: str) -> None:
        """Take a copy away."""
        with _explained(self.url), contextlib.suppress(FileNotFoundError):
            self.fs.rm(f"{self.base}/{name}", recursive=True)

    def _list(self, path: str) -> list[str]:
        self.fs.invalidate_cache()  # object stores remember listings; another machine may have written since
        try:
            return [str(p) for p in self.fs.ls(path, detail=False)]
        except FileNotFoundError:
            return []

    def _write(self, path: str, content: bytes) -> None:
        """Object stores replace an object whole; in a file system a rename does that."""
        if "file" not in self.fs.protocol:
            self.fs.pipe_file(path, content)
            return
        write_atomically(Path(path), content)


def _open(url: str) -> tuple[Any, str]:
    fsspec = need("fsspec", extra="ray")
    try:
        return fsspec.core.url_to_fs(url)
    except ImportError as error:  # s3fs, gcsfs: packages of their own
        raise UserError(f"--store {url}: {error}") from None
    except (ValueError, OSError) as error:
        raise UserError(f"--store {url} is no address of a folder: {error}") from None


@contextlib.contextmanager
def _explained(url: str) -> Any:
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # whatever a file system's own package raises
        raise UserError(f"--store {url} cannot be used: {type(error).__name__}: {error}") from error
