"""Attacks on the part of the server in front of the model, over real sockets, with short timeouts."""

import asyncio
import contextlib
import json
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import uvicorn

from deskside.cli.shared_options import is_loopback
from deskside.serve.request_guard import MAX_HEAD_BYTES, ClientLimits, RequestGuard, connection_class

LIMITS = ClientLimits(body_bytes=1000, head_seconds=0.6, body_seconds=0.8, stall_seconds=0.8, connections=12)
WAIT_SECONDS = 60.0  # for what the server does at once, or after the limits above
GOOD = {"Host": "127.0.0.1", "Content-Type": "application/json"}


async def echo(scope: Any, receive: Any, send: Any) -> None:
    """Return the request body. /flood sends more than any buffer holds."""
    body = (await receive())["body"]
    length = [] if scope["path"] == "/flood" else [(b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": length})
    for _ in range(2000 if scope["path"] == "/flood" else 0):
        await send({"type": "http.response.body", "body": b"x" * 65536, "more_body": True})
    await send({"type": "http.response.body", "body": body})


@contextlib.contextmanager
def guarded(
    api_keys: tuple[str, ...] = (), hosts: frozenset[str] | None = None
) -> Iterator[tuple[int, uvicorn.Server]]:
    hosts = frozenset({"localhost", "127.0.0.1", "::1"}) if hosts is None else hosts
    config = uvicorn.Config(
        RequestGuard(echo, hosts, api_keys, LIMITS),
        http=connection_class(LIMITS),
        ws="none",
        loop="asyncio",
        lifespan="off",
        log_config=None,
        access_log=False,
        h11_max_incomplete_event_size=MAX_HEAD_BYTES,
        timeout_graceful_shutdown=1,
        timeout_keep_alive=600,  # no connection is closed by uvicorn's own limit
    )
    server = uvicorn.Server(config)
    bound = socket.create_server(("127.0.0.1", 0))
    thread = threading.Thread(target=asyncio.run, args=(server.serve([bound]),))
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield bound.getsockname()[1], server
    finally:
        server.should_exit = True
        thread.join(timeout=WAIT_SECONDS)
    assert not thread.is_alive()


@pytest.fixture(scope="module")
def running() -> Iterator[tuple[int, uvicorn.Server]]:
    with guarded() as found:
        yield found


@pytest.fixture
def port(running: tuple[int, uvicorn.Server]) -> int:
    return running[0]


def head(method: str, path: str, headers: dict[str, str]) -> bytes:
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    return f"{method} {path} HTTP/1.1\r\n{lines}\r\n".encode("latin-1")


def ask(port: int, sent: bytes, seconds: float = WAIT_SECONDS) -> tuple[int, dict[str, Any] | bytes]:
    """Return status and content of the answer to raw bytes."""
    with socket.create_connection(("127.0.0.1", port), timeout=seconds) as connection:
        with contextlib.suppress(ConnectionError):  # refused before everything was sent
            connection.sendall(sent)
        got = b""
        while b"\r\n\r\n" not in got:
            part = connection.recv(65536)
            assert part, f"closed after {got!r}"
            got += part
        top, _, content = got.partition(b"\r\n\r\n")
        length = next(
            (int(x.split(b":")[1]) for x in top.split(b"\r\n") if x.lower().startswith(b"content-length")),
            None,
        )
        while length is not None and len(content) < length:
            content += connection.recv(65536)
        status = int(top.split(b" ")[1])
        return status, json.loads(content) if status >= 400 and content.startswith(b"{") else content


def post(port: int, body: bytes, path: str = "/", **headers: str) -> tuple[int, Any]:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return ask(port, head("POST", path, {**GOOD, "Content-Length": str(len(body)), **named}) + body)


def wait_until_closed(connection: socket.socket) -> None:
    """Wait until the server closes the connection."""
    connection.settimeout(WAIT_SECONDS)
    with contextlib.suppress(ConnectionError):
        while connection.recv(65536):
            pass


def test_a_good_request_passes(port: int) -> None:
    status, content = post(port, b'{"a": 1}')
    assert status == 200 and b'{"a": 1}' in content


def test_huge_bodies(port: int) -> None:
    for length in ("1001", "99999999999", "9" * 400):
        status, told = ask(port, head("POST", "/", {**GOOD, "Content-Length": length}) + b"x")
        assert status in (400, 413), told
        if status == 413:
            assert "larger than 1,000 bytes" in told["error"]["message"]  # type: ignore[index, call-overload]
    chunks = b"".join(b"1f4\r\n" + b"x" * 500 + b"\r\n" for _ in range(3)) + b"0\r\n\r\n"
    status, _ = ask(port, head("POST", "/", {**GOOD, "Transfer-Encoding": "chunked"}) + chunks)
    assert status == 413
    assert post(port, b"x" * 1000)[0] == 200


def test_heads_too_long_or_broken(port: int) -> None:
    for sent in (
        b"GET /" + b"a" * MAX_HEAD_BYTES * 30 + b" HTTP/1.1\r\n\r\n",
        head("GET", "/", {"Host": "127.0.0.1", "X": "y" * MAX_HEAD_BYTES * 30}),
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: -1\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n folded: header\r\nbad header\r\n\r\n",
    ):
        assert ask(port, sent)[0] == 400, sent[:50]


def test_slow_heads_and_silent_connections_are_dropped(port: int) -> None:
    with socket.create_connection(("127.0.0.1", port)) as silent:
        began = time.monotonic()
        wait_until_closed(silent)
        assert time.monotonic() - began > 0.3
    with socket.create_connection(("127.0.0.1", port)) as slow:
        request = head("GET", "/", {"Host": "127.0.0.1"} | {f"X{n}": "y" for n in range(40)})
        with pytest.raises(ConnectionError):  # otherwise each byte would have bought more time
            for byte in request:
                slow.send(bytes([byte]))
                time.sleep(0.05)


def test_slow_heads_after_a_first_answer(port: int) -> None:
    with socket.create_connection(("127.0.0.1", port)) as kept:
        kept.sendall(head("GET", "/", {"Host": "127.0.0.1"}))
        assert b"200" in kept.recv(65536)
        kept.sendall(b"GET / HTTP/1.1\r\nHos")
        wait_until_closed(kept)


def test_slow_bodies_are_refused(port: int) -> None:
    with socket.create_connection(("127.0.0.1", port)) as slow:
        slow.sendall(head("POST", "/", {**GOOD, "Content-Length": "100"}) + b"{")
        slow.settimeout(WAIT_SECONDS)
        assert b" 408 " in slow.recv(65536)


def test_a_reader_that_stands_still_is_dropped(running: tuple[int, uvicorn.Server]) -> None:
    port, server = running
    with socket.create_connection(("127.0.0.1", port)) as still:
        still.sendall(head("GET", "/flood", {"Host": "127.0.0.1"}))
        until = time.monotonic() + WAIT_SECONDS
        time.sleep(0.3)
        assert server.server_state.tasks
        while server.server_state.tasks or server.server_state.connections:
            assert time.monotonic() < until, "a flood that nobody reads goes on"
            time.sleep(0.05)


def test_too_many_connections(running: tuple[int, uvicorn.Server]) -> None:
    port, server = running
    until = time.monotonic() + WAIT_SECONDS
    while server.server_state.connections and time.monotonic() < until:
        time.sleep(0.05)
    with contextlib.ExitStack() as stack:
        held = [stack.enter_context(socket.create_connection(("127.0.0.1", port))) for _ in range(30)]
        time.sleep(0.2)
        answers = []
        for connection in held[12:]:
            connection.settimeout(WAIT_SECONDS)
            answers.append(connection.recv(1000))
        assert all(answer.startswith(b"HTTP/1.1 503") and b"retry-after" in answer for answer in answers)
        assert len(server.server_state.connections) <= 12
    time.sleep(0.2)
    assert post(port, b"{}")[0] == 200


def test_pages_of_others_are_refused(port: int) -> None:
    assert post(port, b"{}", Origin="http://evil.example")[1]["error"]["code"] == "cross_origin"
    assert post(port, b"{}", Origin="null")[0] == 403
    assert post(port, b"{}", Host=f"localhost:{port}", Origin=f"http://localhost:{port}")[0] == 200
    assert post(port, b"{}", Host=f"localhost:{port}", Origin="http://localhost:1")[0] == 403
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""):
        assert post(port, b"{}", Content_Type=kind)[0] == 415
    preflight = head("OPTIONS", "/v1/completions", {"Host": "127.0.0.1", "Origin": "http://evil.example"})
    assert ask(port, preflight)[0] == 403


@pytest.mark.parametrize(
    "host", ["evil.example", "127.0.0.1.evil.example", "", "localhost.evil", "[::2]", "127.1"]
)
def test_names_that_are_not_ours_are_refused(port: int, host: str) -> None:
    assert post(port, b"{}", Host=host)[1]["error"]["code"] == "wrong_host"


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:80", "127.0.0.1:8000", "[::1]:8000", "[::1]"])
def test_our_names_pass(port: int, host: str) -> None:
    assert post(port, b"{}", Host=host)[0] == 200


def test_api_keys() -> None:
    with guarded(("first", "right")) as (port, _):
        for given in (
            "",
            "right",
            "Basic right",
            "Bearer",
            "Bearer ",
            "Bearer wrong",
            "Bearer rightt",
            "Bearer \xff",
        ):
            status, told = post(port, b"{}", "/v1/completions", Authorization=given)
            assert status == 401 and told["error"]["type"] == "authentication_error", given
        assert post(port, b"{}", "/v1/completions", Authorization="bearer right")[0] == 200
        assert post(port, b"{}", "/v1/completions", Authorization="Bearer first")[0] == 200
        # Paths are compared as the app sees them, so another spelling of a path does not bypass the guard.
        for path in (
            "//v1/completions",
            "/%2e/v1/models",
            "/health/",
            "/v1/../health",
            "/health/../v1/models",
        ):
            assert post(port, b"{}", path)[0] == 401, path


@pytest.mark.parametrize(
    ("host", "expected"),
    [("127.0.0.1", True), ("127.8.8.8", True), ("::1", True), ("localhost", True)]
    + [(host, False) for host in ("0.0.0.0", "::", "192.168.1.2", "example.org", "")],
)
def test_loopback(host: str, expected: bool) -> None:
    assert is_loopback(host) is expected
