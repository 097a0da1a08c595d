"""Access control and limits between the network and the server.

Threats on a workstation, and the defense against each:

- Another web page in the user's browser can send requests to 127.0.0.1. Requests with a foreign Origin are refused, no
  CORS header is ever sent, and bodies must be application/json, which a page cannot send across origins without a
  preflight. A page can also resolve its own name to 127.0.0.1 (DNS rebinding), so the Host header must be known there.
  Starlette's TrustedHostMiddleware is not used: it splits `[::1]:8000` at the first colon, and answers in plain text
  where OpenAI's clients expect JSON.
- Anyone on the network. Every address but loopback requires an API key, which is compared in constant time.
- A client that sends too much or too slowly, or does not read. Heads and bodies have a maximum size and time,
  connections a maximum number, and a client that stops reading is disconnected.
"""

import asyncio
import hashlib
import hmac
import json
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from deskside.serve.protocol import ApiError
from deskside.serve.web_files import WEB_PREFIX

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]

MAX_HEAD_BYTES = 16 * 1024  # of a request's head: request line and headers
# Paths other than WEB_PREFIX that need no key: the chat page, which is the same on every server, and the health check.
PUBLIC_PATHS = ("/", "/health")


@dataclass(frozen=True)
class ClientLimits:
    """Resource limits for clients."""

    body_bytes: int = 1 << 20
    head_seconds: float = 10
    body_seconds: float = 20
    stall_seconds: float = 30  # maximum time in which a client does not read its response
    connections: int = 256


class RequestGuard:
    """ASGI middleware that rejects forbidden or oversized requests, and passes the others on with their complete body.

    Args:
        app: The application.
        hosts: Allowed names in the Host header; None for any.
        api_keys: Clients must send one of these; none if anyone may use the server.
        limits: Maximum size and time of a body.
    """

    def __init__(self, app: App, hosts: frozenset[str] | None, api_keys: Sequence[str], limits: ClientLimits):
        self._app, self._hosts, self._limits = app, hosts, limits
        self._keys = [_digest(key.encode()) for key in api_keys]

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
        replayed = False

        async def replay() -> Message:
            """Return the body that was read, then further messages, such as a disconnect."""
            nonlocal replayed
            if replayed:
                return await receive()
            replayed = True
            return {"type": "http.request", "body": body, "more_body": False}

        await self._app(scope, replay, send)

    def _check(self, scope: MutableMapping[str, Any]) -> None:
        # Reversed, so that the first of repeated headers counts.
        headers: dict[bytes, bytes] = dict(reversed(scope["headers"]))
        host = headers.get(b"host", b"").decode("latin-1")
        if self._hosts is not None and _host_name(host) not in self._hosts:
            raise ApiError(403, "the Host header does not name this server", code="wrong_host")
        origin = headers.get(b"origin")
        if origin is not None and origin.decode("latin-1").partition("://")[2].lower() != host.lower():
            raise ApiError(403, "requests from other web pages are refused", code="cross_origin")
        path = scope["path"]
        if self._keys and path not in PUBLIC_PATHS and not path.startswith(WEB_PREFIX):
            scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
            given = _digest(key.strip())
            # The sum compares every key, whichever is right.
            matches = sum(hmac.compare_digest(given, key) for key in self._keys)
            if scheme.lower() != b"bearer" or not matches:
                raise ApiError(401, "an API key is needed: Authorization: Bearer KEY", code="invalid_api_key")
        if scope["method"] == "POST":
            content_type = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
            if content_type != b"application/json":
                raise ApiError(415, "the body must be application/json (Content-Type)")
        length = headers.get(b"content-length", b"0")
        # A number of more than 18 digits is too large in any case; int() rejects very long ones.
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
    """Send an error response. Most errors close the connection, because a body may still be in transit."""
    body = json.dumps(error.body).encode()
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        (b"cache-control", b"no-store"),
        (b"x-content-type-options", b"nosniff"),
    ]
    if error.status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    if error.retry_after is not None:
        headers.append((b"retry-after", str(error.retry_after).encode()))
    if error.status in (403, 408, 413, 415):
        headers.append((b"connection", b"close"))
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def _digest(key: bytes) -> bytes:
    """Return a hash, so that comparing keys takes the same time for every length."""
    return hashlib.sha256(key).digest()


def _host_name(host: str) -> str:
    """Return the name in a Host header, without the port."""
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return host.partition(":")[0].lower()


def connection_class(limits: ClientLimits) -> type[H11Protocol]:
    """Return uvicorn's HTTP connection class with additional limits.

    uvicorn limits how long a connection may idle after a response, but neither the time that the head of a request may
    take nor the time that a client may leave its response unread.
    """

    class Connection(H11Protocol):
        _head_timer: asyncio.TimerHandle | None = None
        _stall_timer: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            if len(self.connections) > limits.connections:
                transport.write(
                    b"HTTP/1.1 503 Service Unavailable\r\nconnection: close\r\nretry-after: 5\r\n"
                    b"content-length: 0\r\n\r\n"
                )
                transport.close()
                return
            self._start_head_timer()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self.conn.their_state is h11.IDLE:  # the head is incomplete
                self._start_head_timer()
            else:
                self._cancel_timer("_head_timer")

        def connection_lost(self, exc: Exception | None) -> None:
            self._cancel_timer("_head_timer")
            self._cancel_timer("_stall_timer")
            super().connection_lost(exc)

        def pause_writing(self) -> None:
            super().pause_writing()
            if self._stall_timer is None:
                self._stall_timer = self.loop.call_later(limits.stall_seconds, self.transport.abort)

        def resume_writing(self) -> None:
            super().resume_writing()
            self._cancel_timer("_stall_timer")

        def _start_head_timer(self) -> None:
            """Start the timer of a request head, unless it runs already: more bytes do not extend the time."""
            if self._head_timer is None:
                self._head_timer = self.loop.call_later(limits.head_seconds, self.transport.abort)

        def _cancel_timer(self, name: str) -> None:
            timer: asyncio.TimerHandle | None = getattr(self, name)
            if timer is not None:
                timer.cancel()
                setattr(self, name, None)

    return Connection
