"""Downloads that survive a bad line: resumed, retried, checked by sha256 and put in place whole.

Ours and not pooch's, which cannot go on with a broken download or bound its size, and needs more packages.
"""

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
RETRIES_OFFLINE = 1  # where no connection is made at all: waiting would seldom help
PAUSE = 1.0  # seconds before the first retry; doubles each time
TIMEOUT = 10.0
_BLOCK = 1 << 16
_PASSING = {408, 425, 429, 500, 502, 503, 504}

Progress = Callable[[int, int | None], None]
"""Told (bytes so far, bytes in all or None)."""

Tell = Callable[[str], None]
"""Told what is being done, in a sentence, before it is done."""


class _TryAgain(Exception):
    def __init__(self, reason: str, *, offline: bool = False) -> None:
        super().__init__(reason)
        self.offline = offline


def get(
    name: str, *, progress: Progress | None = None, tell: Tell = lambda sentence: None
) -> list[tuple[Path, bool]]:
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
        fetch(address(file), place, file.sha256, progress=progress, tell=tell)
        results.append((place, True))
    return results


def address(file: RemoteFile) -> str:
    """Where a file is fetched from."""
    mirror = os.environ.get("DEEPRNN_MIRROR")
    return f"{mirror.rstrip('/')}/{urllib.parse.quote(file.path)}" if mirror else file.url


def fetch(
    url: str,
    place: Path,
    sha256: str,
    *,
    progress: Progress | None = None,
    tell: Tell = lambda sentence: None,
) -> None:
    """Download `url` to `place`, which appears only once its sha256 is right.

    A broken connection is continued from the byte it broke at, after a pause that doubles each time. What
    was received stays in `<place>.part` for the next call.
    """
    if not _is_web_address(url):
        raise UserError(f"cannot download {url}: only http and https addresses are fetched")
    place.parent.mkdir(parents=True, exist_ok=True)
    part = place.with_name(place.name + ".part")
    reason, attempt, retries = "", 0, RETRIES
    tell(f"fetching {url}")
    while attempt <= retries:
        if attempt:
            pause = PAUSE * 2 ** (attempt - 1)
            tell(f"{reason}; trying again in {pause:g} s ({retries - attempt + 1} left)")
            time.sleep(pause)
        attempt += 1
        try:
            _continue(url, part, progress)
            if (digest := _digest(part)) == sha256:
                part.replace(place)
                return
            part.unlink()  # wrong bytes: nothing of them is worth keeping
            reason = f"its sha256 is {digest[:16]}…, not {sha256[:16]}…"
        except _TryAgain as error:
            reason = str(error)
            retries = min(RETRIES, RETRIES_OFFLINE) if error.offline else RETRIES
    raise UserError(
        f"could not download {url} in {attempt} attempt{'s' if attempt > 1 else ''}: {reason}. "
        f"Check the network (a proxy is taken from $https_proxy), try again later, or put the file at {place} yourself"
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
    except urllib.error.URLError as error:
        raise _TryAgain(f"no connection was made ({error.reason})", offline=True) from error
    except (http.client.HTTPException, TimeoutError, ConnectionError) as error:
        raise _TryAgain(f"the connection failed ({error!r})") from error


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
