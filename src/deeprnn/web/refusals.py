"""Answers that say no: a status, and a message a person can act on."""

from __future__ import annotations

import json
from typing import Any

import anyio
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from deeprnn.errors import UserError
from deeprnn.runs.reading import printable

READ_TO_REFUSE = 4
"""times the limit of a body, up to which it is read although it is refused"""


class Refusal(Exception):
    """A request that is not served, and why."""

    def __init__(self, status: int, message: str, **headers: str) -> None:
        super().__init__(message)
        self.status, self.message = status, message
        self.headers = {name.replace("_", "-"): value for name, value in headers.items()}


async def answer_refusal(_request: Request, error: Exception) -> Response:
    """Say why."""
    assert isinstance(error, Refusal)
    return JSONResponse({"error": printable(error.message, 2000)}, error.status, headers=error.headers)


async def answer_user_error(_request: Request, error: Exception) -> Response:
    """Answer a `UserError` as a fault of the request."""
    assert isinstance(error, UserError)
    return JSONResponse({"error": printable(str(error), 2000)}, 422)


async def answer_http(_request: Request, error: Exception) -> Response:
    """Unknown paths and methods, in the same words as the rest."""
    status = getattr(error, "status_code", 500)
    message = {404: "there is nothing at this address", 405: "this address does not take that method"}
    return JSONResponse({"error": message.get(status, str(getattr(error, "detail", error)))}, status)


async def answer_failure(_request: Request, _error: Exception) -> Response:
    """A fault of ours: the log has the traceback, the answer does not."""
    return JSONResponse({"error": "something went wrong on the server; its log says what"}, 500)


async def read_body(request: Request, limit: int, seconds: float, what: str = "the request") -> bytes:
    """The whole body, refused where it is too large or too slow.

    One that is a little too large is read to its end, and not kept: a client that is still sending when the connection
    closes never sees the answer. More than `READ_TO_REFUSE` times the limit is refused at once.
    """
    too_large = Refusal(413, f"{what} is larger than {limit / 1e6:g} MB, the most that is taken")
    declared = request.headers.get("content-length", "0")
    if declared.isdigit() and int(declared) > READ_TO_REFUSE * limit:
        raise too_large
    body, size = bytearray(), 0
    try:
        with anyio.fail_after(seconds):
            async for part in request.stream():
                size += len(part)
                if size > READ_TO_REFUSE * limit:
                    raise too_large
                if size <= limit:
                    body += part
    except TimeoutError:
        raise Refusal(408, f"{what} did not arrive within {seconds:g} seconds") from None
    except ClientDisconnect:
        raise Refusal(400, "the request broke off") from None
    if size > limit:
        raise too_large
    return bytes(body)


class Fields:
    """A JSON object read field by field, each with its type and bounds."""

    def __init__(self, values: dict[str, Any]) -> None:
        self._values = values

    @classmethod
    def parse(cls, body: bytes) -> Fields:
        """From the bytes of a request."""
        try:
            values = json.loads(body, parse_constant=_no_constant)
        except (ValueError, RecursionError) as error:
            raise Refusal(400, f"the request is not JSON: {error}") from None
        if not isinstance(values, dict):
            raise Refusal(400, "the request must be a JSON object")
        return cls(values)

    def number(self, name: str, low: float, high: float, default: float) -> float:
        """A number within bounds."""
        value = self._values.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise Refusal(422, f"{name} must be a number, not {_show(value)}")
        if not low <= value <= high:
            raise Refusal(422, f"{name}={_show(value)} is out of reach: choose {low:g} to {high:g}")
        return float(value)

    def whole(self, name: str, low: int, high: int, default: int) -> int:
        """A whole number within bounds."""
        value = self._values.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise Refusal(422, f"{name} must be a whole number, not {_show(value)}")
        if not low <= value <= high:
            raise Refusal(422, f"{name} is out of reach: choose {low} to {high}")
        return value

    def text(self, name: str, most: int) -> str:
        """A string of bounded length."""
        value = self._values.get(name, "")
        if not isinstance(value, str):
            raise Refusal(422, f"{name} must be text, not {_show(value)}")
        if any("\ud800" <= c <= "\udfff" for c in value):
            raise Refusal(422, f"{name} holds half a character (a lone surrogate): it is not valid Unicode")
        if len(value) > most:
            raise Refusal(422, f"{name} has {len(value):,} characters; at most {most:,} are read at once")
        return value

    def words(self, name: str, most: int) -> list[str]:
        """A short list of strings."""
        value = self._values.get(name, [])
        if (
            not isinstance(value, list)
            or len(value) > most
            or not all(isinstance(word, str) for word in value)
        ):
            raise Refusal(422, f"{name} must be a list of at most {most} texts")
        return value

    def frames(self, keys: int, most: int) -> list[list[int]]:
        """A piano roll: for each frame the sounding keys, counted from the lowest."""
        value = self._values.get("frames", [])
        if not isinstance(value, list):
            raise Refusal(422, "frames must be a list of lists of keys")
        if len(value) > most:
            raise Refusal(422, f"the roll has {len(value):,} frames; at most {most:,} are read at once")
        for t, frame in enumerate(value):
            if not isinstance(frame, list) or len(frame) > keys:
                raise Refusal(422, f"frame {t} must be a list of at most {keys} keys")
            if not all(type(key) is int and 0 <= key < keys for key in frame):
                raise Refusal(422, f"frame {t} has a key that is not a whole number from 0 to {keys - 1}")
        return value


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is no JSON number")


def _show(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."
