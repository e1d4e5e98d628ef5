"""What stands before every request: which hosts are answered, which sites may ask, which headers go out."""

from __future__ import annotations

import ipaddress
import json
import re
from collections.abc import Iterable

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

POLICY = (
    "default-src 'self'; img-src 'self' data: blob:; object-src 'none'; base-uri 'none'; "
    "form-action 'self'; frame-ancestors 'none'"
)
HOST = re.compile(
    r"(?:\[(?P<address>[0-9A-Fa-f:.]{2,45})\]|(?P<name>[A-Za-z0-9._-]{1,253}))(?::[0-9]{1,5})?", re.ASCII
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), microphone=(), geolocation=()",
}


class Guard:
    """ASGI middleware: refuse foreign names and foreign sites, add the security headers.

    A page elsewhere could let its own domain name resolve to 127.0.0.1 and read this server as if it were
    its own site (DNS rebinding). Such a request carries that name in its Host header; an address in
    numbers cannot be rebound, so those and the given names are served, nothing else.
    """

    def __init__(self, app: ASGIApp, names: Iterable[str] = ()) -> None:
        self.app = app
        self.names = {"localhost", *(name.lower() for name in names)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve, or refuse."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        refusal = self._refusal(Headers(scope=scope), scope["method"])
        if refusal:
            await _refuse(send_with_headers, *refusal)
            return
        await self.app(scope, receive, send_with_headers)

    def _refusal(self, headers: Headers, method: str) -> tuple[int, str] | None:
        host = headers.get("host", "")
        if not self.knows(host):
            name = _name(host)
            if name is None:
                return 400, "the Host header is no host name with a port"
            return 421, f"this server does not answer to the name {name!r}: start it with --names {name}"
        if method in ("GET", "HEAD"):
            return None
        origin = headers.get("origin")
        if headers.get("sec-fetch-site", "none") not in ("same-origin", "none"):
            return 403, "requests from other sites are refused"
        if origin is not None and origin.partition("://")[2].lower() != host.lower():
            return 403, "requests from other sites are refused"
        return None

    def knows(self, host: str) -> bool:
        """Whether a Host header names this server."""
        name = _name(host)
        return name is not None and (name in self.names or _is_address(name))


def _name(host: str) -> str | None:
    """The name in a Host header, None where it is not a name and perhaps a port and nothing else."""
    match = HOST.fullmatch(host)
    return (match["address"] or match["name"]).lower().rstrip(".") if match else None


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


async def _refuse(send: Send, status: int, message: str) -> None:
    body = json.dumps({"error": message}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
