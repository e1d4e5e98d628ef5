"""Downloads that survive a bad line: resumed, retried, checked by sha256 and put in place whole."""

from __future__ import annotations

import hashlib
import http.client
import os
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from pathlib import Path

from deeprnn.data.limits import byte_limit
from deeprnn.data.sources import RemoteFile, cache_folder, find_file, sha256_of, source
from deeprnn.errors import UserError

RETRIES = 5
PAUSE = 1.0  # seconds before the first retry; doubles each time
TIMEOUT = 30.0
_BLOCK = 1 << 16
_PASSING = {408, 425, 429, 500, 502, 503, 504}

Progress = Callable[[int, int | None], None]
"""Told (bytes so far, bytes in all or None)."""


class _TryAgain(Exception):
    pass


def get(name: str, *, progress: Progress | None = None) -> list[tuple[Path, bool]]:
    """Fetch the files of a set into the cache folder; (place, was it downloaded now) for each.

    A file that is already found with the right sha256 is left alone. `DEEPRNN_MIRROR` replaces the public
    addresses by `<mirror>/<path in a data folder>`.
    """
    results = []
    for file in source(name).files:
        present = find_file(file)
        if present is not None and sha256_of(present) == file.sha256:
            results.append((present, False))
            continue
        place = cache_folder() / file.path
        if present not in (None, place):
            raise UserError(f"{present} has the wrong sha256 and hides a downloaded one: move it away first")
        fetch(address(file), place, file.sha256, progress=progress)
        results.append((place, True))
    return results


def address(file: RemoteFile) -> str:
    """Where a file is fetched from."""
    mirror = os.environ.get("DEEPRNN_MIRROR")
    return f"{mirror.rstrip('/')}/{urllib.parse.quote(file.path)}" if mirror else file.url


def fetch(url: str, place: Path, sha256: str, *, progress: Progress | None = None) -> None:
    """Download `url` to `place`, which appears only once its sha256 is right.

    A broken connection is continued from the byte it broke at, after a pause that doubles each time. What
    was received stays in `<place>.part` for the next call.
    """
    if not _is_web_address(url):
        raise UserError(f"cannot download {url}: only http and https addresses are fetched")
    place.parent.mkdir(parents=True, exist_ok=True)
    part = place.with_name(place.name + ".part")
    reason = ""
    for attempt in range(RETRIES + 1):
        if attempt:
            time.sleep(PAUSE * 2 ** (attempt - 1))
        try:
            _continue(url, part, progress)
            if (found := _digest(part)) == sha256:
                part.replace(place)
                return
            part.unlink()  # wrong bytes: nothing of them is worth keeping
            reason = f"its sha256 is {found[:16]}…, not {sha256[:16]}…"
        except _TryAgain as error:
            reason = str(error)
    raise UserError(
        f"could not download {url} in {RETRIES + 1} attempts: {reason}. "
        f"Try again later, or put the file at {place} yourself"
    )


def _is_web_address(url: str) -> bool:
    try:
        return urllib.parse.urlsplit(url).scheme in ("http", "https")
    except ValueError:  # a bracket that opens no address
        return False


def _continue(url: str, part: Path, progress: Progress | None) -> None:
    have = part.stat().st_size if part.exists() else 0
    request = urllib.request.Request(url, headers={"User-Agent": "deeprnn"})
    if have:
        request.add_header("Range", f"bytes={have}-")
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT) as answer:
            if have and answer.status != 206:
                have = 0  # the server sends the whole file again
            _receive(answer, part, have, progress)
    except urllib.error.HTTPError as error:
        if error.code == 416:  # nothing beyond what we have: the part is whole, or not the file's
            return
        if error.code in _PASSING:
            raise _TryAgain(f"the server answered {error.code} {error.reason}") from error
        raise UserError(f"cannot download {url}: the server answered {error.code} {error.reason}") from error
    except (urllib.error.URLError, http.client.HTTPException, TimeoutError, ConnectionError) as error:
        raise _TryAgain(f"the connection failed ({getattr(error, 'reason', None) or error!r})") from error


def _receive(answer: http.client.HTTPResponse, part: Path, have: int, progress: Progress | None) -> None:
    length = answer.headers.get("Content-Length")
    total = have + int(length) if length and length.isdigit() else None
    limit = byte_limit()
    with part.open("ab" if have else "wb") as file:
        while block := answer.read(_BLOCK):
            file.write(block)
            have += len(block)
            if have > limit:
                raise UserError(f"{answer.url} sends more than the limit of {limit:,} bytes; stopped")
            if progress:
                progress(have, total)
    if total is not None and have < total:
        raise _TryAgain(f"the connection ended after {have:,} of {total:,} bytes")


def _digest(part: Path) -> str:
    return sha256_of(part) if part.exists() else hashlib.sha256().hexdigest()
