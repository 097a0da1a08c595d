"""Access control and limits between the network and the server.

Threats on a workstation, and the defense against each:

- Another web page in the user's browser can send requests to 127.0.0.1. Requests with a foreign Origin are refused, no
  CORS header is ever sent, and bodies must be application/json, which a page cannot send across origins without a
  preflight. A page can also resolve its own name to this machine (DNS rebinding), so the Host header must be known.
  Starlette's TrustedHostMiddleware is not used: it splits `[::1]:8000` at the first colon, and answers in plain text
  where OpenAI's clients expect JSON.
- Anyone on the network. Every address but loopback requires a token, which is compared in constant time.
- A client that sends too much or too slowly, or does not read. Heads and bodies have a maximum size and time,
  connections a maximum number, and a client that stops reading is disconnected.
"""

import asyncio
import hashlib
import hmac
import json
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from deskside.serve.protocol import ApiError

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]

MAX_HEAD = 16 * 1024  # bytes of a request's line and headers
OPEN = ("/", "/health")  # paths without a token; they only show that the server is running


@dataclass(frozen=True)
class ClientLimits:
    """Limits of what clients can use. Times are in seconds."""

    body_bytes: int = 1 << 20
    head_seconds: float = 10
    body_seconds: float = 20
    stall_seconds: float = 30  # maximum time without reading the response
    connections: int = 256


class RequestGuard:
    """ASGI middleware that refuses requests, or passes them on with their complete body.

    Args:
        app: The application.
        hosts: Allowed names in the Host header, None for any.
        token: The bearer token, None for none.
        limits: Sizes and times.
    """

    def __init__(self, app: App, hosts: frozenset[str] | None, token: str | None, limits: ClientLimits):
        self._app, self._hosts, self._limits = app, hosts, limits
        self._token = None if token is None else _digest(token.encode())

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            self._check(scope)
            body = await self._body(scope, receive)
        except ApiError as error:
            await send_error(send, error)
            return
        if body is None:
            return  # the client has disconnected
        given = False

        async def replay() -> Message:
            nonlocal given
            if given:
                return await receive()
            given = True
            return {"type": "http.request", "body": body, "more_body": False}

        await self._app(scope, replay, send)

    def _check(self, scope: MutableMapping[str, Any]) -> None:
        headers: dict[bytes, bytes] = dict(reversed(scope["headers"]))
        host = headers.get(b"host", b"").decode("latin-1")
        if self._hosts is not None and _name(host) not in self._hosts:
            raise ApiError(403, "the Host header does not name this server", code="wrong_host")
        origin = headers.get(b"origin")
        if origin is not None and origin.decode("latin-1").partition("://")[2].lower() != host.lower():
            raise ApiError(403, "requests from other web pages are refused", code="cross_origin")
        if self._token is not None and scope["path"] not in OPEN:
            kind, _, given = headers.get(b"authorization", b"").partition(b" ")
            if kind.lower() != b"bearer" or not hmac.compare_digest(_digest(given.strip()), self._token):
                raise ApiError(401, "a token is needed: Authorization: Bearer TOKEN", code="invalid_api_key")
        if scope["method"] == "POST":
            kind = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
            if kind != b"application/json":
                raise ApiError(415, "the body must be application/json (Content-Type)")
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and (len(length) > 18 or int(length) > self._limits.body_bytes):
            raise self._too_large()

    async def _body(self, scope: MutableMapping[str, Any], receive: Receive) -> bytes | None:
        """Read the whole body; None if the client has disconnected. Raises ApiError."""
        parts: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout(self._limits.body_seconds):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return None
                    parts.append(message.get("body", b""))
                    size += len(parts[-1])
                    if size > self._limits.body_bytes:
                        raise self._too_large()
                    if not message.get("more_body", False):
                        return b"".join(parts)
        except TimeoutError:
            raise ApiError(408, f"the body took longer than {self._limits.body_seconds:g} seconds") from None

    def _too_large(self) -> ApiError:
        return ApiError(413, f"the body is larger than {self._limits.body_bytes:,} bytes")


async def send_error(send: Send, error: ApiError) -> None:
    """Send an error response, and close the connection if a body may still be in transit."""
    body = json.dumps(error.body).encode()
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        (b"cache-control", b"no-store"),
        (b"x-content-type-options", b"nosniff"),
    ]
    if error.status in (401,):
        headers.append((b"www-authenticate", b"Bearer"))
    if error.retry_after is not None:
        headers.append((b"retry-after", str(error.retry_after).encode()))
    if error.status in (403, 408, 413, 415):
        headers.append((b"connection", b"close"))
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def _digest(token: bytes) -> bytes:
    """Return a hash of fixed length, so that comparing takes the same time for every token."""
    return hashlib.sha256(token).digest()


def _name(host: str) -> str:
    """Return the Host header without the port."""
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return host.partition(":")[0].lower()


def connection_class(limits: ClientLimits) -> type[H11Protocol]:
    """Return uvicorn's HTTP connection class with further limits.

    uvicorn limits how long a connection idles after a response, but not how long the head of a request may take, and
    it waits forever for a client that does not read.
    """

    class Connection(H11Protocol):
        _late: asyncio.TimerHandle | None = None
        _stalled: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            if len(self.connections) > limits.connections:
                transport.write(
                    b"HTTP/1.1 503 Service Unavailable\r\nconnection: close\r\nretry-after: 5\r\n"
                    b"content-length: 0\r\n\r\n"
                )
                transport.close()
                return
            self._expect_head()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self.conn.their_state is h11.IDLE:  # part of a head
                self._expect_head()
            else:
                self._unset("_late")

        def connection_lost(self, exc: Exception | None) -> None:
            self._unset("_late")
            self._unset("_stalled")
            super().connection_lost(exc)

        def pause_writing(self) -> None:
            super().pause_writing()
            if self._stalled is None:
                self._stalled = self.loop.call_later(limits.stall_seconds, self.transport.abort)

        def resume_writing(self) -> None:
            super().resume_writing()
            self._unset("_stalled")

        def _expect_head(self) -> None:
            """Start the timer of a request head, unless it runs: more bytes do not extend it."""
            if self._late is None:
                self._late = self.loop.call_later(limits.head_seconds, self.transport.abort)

        def _unset(self, name: str) -> None:
            timer: asyncio.TimerHandle | None = getattr(self, name)
            if timer is not None:
                timer.cancel()
                setattr(self, name, None)

    return Connection
