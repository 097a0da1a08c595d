"""What stands between the network and the server: who may ask, how much, and how slowly.

Threats on a machine that somebody works at, and what answers each:

- another page in the person's browser. It can send requests to 127.0.0.1, so what names another origin is refused, no
  CORS header is ever sent, and bodies have to be application/json, which a page cannot send elsewhere without asking
  first. It can also give its own name this machine's address (DNS rebinding): the Host header has to be one of ours.
- somebody on the network. Any address but this machine's own needs a token, compared in constant time.
- a client that sends too much, too slowly, or reads nothing. Heads and bodies have a size and a time, connections a
  number, and a reader that stands still is dropped.
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

from deskside.serve.protocol import Refusal

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]

MAX_HEAD = 16 * 1024  # bytes of a request's line and headers
OPEN = ("/", "/health")  # paths that need no token: they tell nothing but that the server is there


@dataclass(frozen=True)
class Limits:
    """Bounds on what clients can take. Times in seconds."""

    body_bytes: int = 1 << 20
    head_seconds: float = 10
    body_seconds: float = 20
    stall_seconds: float = 30  # that a client may leave what is written to it unread
    connections: int = 256


class Guard:
    """ASGI around an app: refuses, or hands on with the whole body read.

    hosts: names that the Host header may hold; None takes any. token: None asks for none.
    """

    def __init__(self, app: App, hosts: frozenset[str] | None, token: str | None, limits: Limits):
        self._app, self._hosts, self._limits = app, hosts, limits
        self._token = None if token is None else _digest(token.encode())

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            self._check(scope)
            body = await self._body(scope, receive)
        except Refusal as refusal:
            await answer(send, refusal)
            return
        if body is None:
            return  # the client went away
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
            raise Refusal(403, "the Host header does not name this server", code="wrong_host")
        origin = headers.get(b"origin")
        if origin is not None and origin.decode("latin-1").partition("://")[2].lower() != host.lower():
            raise Refusal(403, "requests from other web pages are refused", code="cross_origin")
        if self._token is not None and scope["path"] not in OPEN:
            kind, _, given = headers.get(b"authorization", b"").partition(b" ")
            if kind.lower() != b"bearer" or not hmac.compare_digest(_digest(given.strip()), self._token):
                raise Refusal(401, "a token is needed: Authorization: Bearer TOKEN", code="invalid_api_key")
        if scope["method"] == "POST":
            kind = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
            if kind != b"application/json":
                raise Refusal(415, "the body has to be application/json (Content-Type)")
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and (len(length) > 18 or int(length) > self._limits.body_bytes):
            raise self._too_large()

    async def _body(self, scope: MutableMapping[str, Any], receive: Receive) -> bytes | None:
        """All of it; None when the client left. Raises Refusal."""
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
            raise Refusal(408, f"the body took longer than {self._limits.body_seconds:g} seconds") from None

    def _too_large(self) -> Refusal:
        return Refusal(413, f"the body is larger than {self._limits.body_bytes:,} bytes")


async def answer(send: Send, refusal: Refusal) -> None:
    """Send a refusal. The connection is closed after it where a body may still be on its way."""
    body = json.dumps(refusal.body).encode()
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        (b"cache-control", b"no-store"),
        (b"x-content-type-options", b"nosniff"),
    ]
    if refusal.status in (401,):
        headers.append((b"www-authenticate", b"Bearer"))
    if refusal.retry_after is not None:
        headers.append((b"retry-after", str(refusal.retry_after).encode()))
    if refusal.status in (403, 408, 413, 415):
        headers.append((b"connection", b"close"))
    await send({"type": "http.response.start", "status": refusal.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def _digest(token: bytes) -> bytes:
    """Of one length, so that comparing takes the same time for every token that is given."""
    return hashlib.sha256(token).digest()


def _name(host: str) -> str:
    """The Host header without its port."""
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return host.partition(":")[0].lower()


def connection_class(limits: Limits) -> type[H11Protocol]:
    """uvicorn's HTTP connection, with the times and the number that it leaves open.

    uvicorn bounds how long a connection idles after a response, but not how long the first byte, or the rest of a
    request's head, may take; and it waits for ever for a client that reads nothing.
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
            """From its first byte on, or the connection's beginning: later bytes buy no time."""
            if self._late is None:
                self._late = self.loop.call_later(limits.head_seconds, self.transport.abort)

        def _unset(self, name: str) -> None:
            timer: asyncio.TimerHandle | None = getattr(self, name)
            if timer is not None:
                timer.cancel()
                setattr(self, name, None)

    return Connection
