"""Attacks on the complete server: it says why it refuses, stays up, and answers the next valid request."""

import contextlib
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from benchmarks.serve_load import resident, served
from tests.serve.chatty import make_chatty

JSON = {"content-type": "application/json"}
PATHS = ("/v1/completions", "/v1/chat/completions")
WRONG = {
    "empty": b"",
    "no JSON": b"hello",
    "cut off": b'{"prompt": "a"',
    "two objects": b'{"prompt": "a"}{}',
    "a list": b'["prompt"]',
    "null": b"null",
    "deep lists": b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "deep objects": b'{"metadata": ' + b'{"a":' * 50_000 + b"1" + b"}" * 50_000 + b"}",
    "deep messages": b'{"messages": [{"role": "user", "content": ' + b"[" * 90_000 + b"]" * 90_000 + b"}]}",
    "invalid UTF-8": b'{"prompt": "\xc3\x28\xff", "messages": [{"role": "user", "content": "\xff"}]}',
    "half a surrogate": b'{"prompt": "\\ud800", "messages": [{"role": "user", "content": "\\ud800"}]}',
    "UTF-16": '{"prompt": "a", "messages": []}'.encode("utf-16"),
    "not a number": b'{"prompt": "a", "messages": [], "temperature": NaN}',
    "infinite": b'{"prompt": "a", "messages": [], "temperature": 1e999}',
    "a number's text": b'{"prompt": "a", "messages": [], "max_tokens": "5"}',
    "a half token": b'{"prompt": "a", "messages": [], "max_tokens": 1.5}',
    "true for one": b'{"prompt": "a", "messages": [], "n": true}',
    "too large": b'{"prompt": "a", "messages": [], "n": ' + b"9" * 4000 + b"}",
    "larger still": b'{"prompt": "a", "messages": [], "max_tokens": 99999999999999999999999999}',
    "null prompt": b'{"prompt": null, "messages": null}',
    "numbers": b'{"prompt": 5, "messages": 5}',
    "mixed": b'{"prompt": [1, "a"], "messages": [1, "a"]}',
    "negative tokens": b'{"prompt": [-1], "messages": [[-1]]}',
    "huge tokens": b'{"prompt": [99999999999999999999999], "messages": [{}]}',
    "no tokens": b'{"prompt": [[]], "messages": [{"role": 1}]}',
    "too many prompts": json.dumps({"prompt": ["a"] * 20000, "messages": [[]] * 20000}).encode(),
    "a million stops": json.dumps({"prompt": "a", "messages": [], "stop": ["x"] * 100_000}).encode(),
    "unknown": b'{"prompt": "a", "messages": [], "__class__": 1}',
    "a long name": b'{"prompt": "a", "messages": [], "' + b"k" * 500_000 + b'": 1}',
    "another model": b'{"prompt": "a", "messages": [{"role": "user", "content": "a"}], "model": "../../etc/passwd"}',
}  # fmt: skip


@pytest.fixture(scope="module")
def chatty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_chatty(tmp_path_factory.mktemp("attacks"))[1]


@pytest.fixture(scope="module")
def server(chatty: Path) -> Iterator[tuple[str, int]]:
    with served([str(chatty), "--device", "cpu"], {"OMP_NUM_THREADS": "1"}) as found:
        yield found


@pytest.fixture(scope="module")
def good(server: tuple[str, int]) -> str:
    return ask(server[0])


def ask(base: str) -> str:
    body = {"prompt": "the sea", "temperature": 0}
    response = httpx.post(f"{base}/v1/completions", json=body, timeout=60).raise_for_status()
    return str(response.json()["choices"][0]["text"])


@pytest.mark.parametrize("name", WRONG)
def test_malformed_requests_are_told_what_is_wrong(server: tuple[str, int], good: str, name: str) -> None:
    base, _ = server
    for path in PATHS:
        response = httpx.post(base + path, content=WRONG[name], headers=JSON, timeout=30)
        assert 400 <= response.status_code < 500, (path, response.text)
        error = response.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["type"] == "invalid_request_error"
        assert 5 < len(error["message"]) < 500 and "\n" not in error["message"]
        assert "Traceback" not in response.text and "/site-packages/" not in response.text
    assert ask(base) == good


def test_a_huge_body_is_refused_before_it_is_read(server: tuple[str, int], good: str) -> None:
    base, pid = server
    before = resident(pid)

    def endless() -> Iterator[bytes]:
        for _ in range(20_000):
            yield b"x" * 65536  # 1.3 GB

    with contextlib.suppress(httpx.WriteError, httpx.ReadError, httpx.RemoteProtocolError):
        response = httpx.post(f"{base}/v1/completions", content=endless(), headers=JSON, timeout=30)
        assert response.status_code == 413
    assert resident(pid) - before < 32
    assert ask(base) == good


def test_paths_and_methods(server: tuple[str, int]) -> None:
    base, _ = server
    for method, path, status in (
        ("GET", "/v1/completions", 405),
        ("DELETE", "/v1/models", 405),
        ("GET", "/docs", 404),
        ("GET", "/../../etc/passwd", 404),
        ("GET", "/index.html", 404),
        ("GET", "/web/", 404),
        ("GET", "/web/../app.py", 404),
        ("GET", "/web/%2e%2e/app.py", 404),
        ("POST", "/web/js/main.js", 415),
        ("GET", "/v1/models/" + "x" * 5000, 404),
    ):
        response = httpx.request(method, base + path)
        assert response.status_code == status, path
        assert response.json()["error"]["message"] and len(response.text) < 400
        assert not [name for name in response.headers if name.startswith("access-control")]


def test_connections_that_break_off_leave_nothing(server: tuple[str, int], good: str) -> None:
    base, pid = server
    port = int(base.rpartition(":")[2])
    body = json.dumps({"prompt": "the sea", "max_tokens": 3000, "stream": True}).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    for number in range(60):
        with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
            sent = head.encode() + body
            connection.sendall(sent[: len(sent) - 5] if number % 3 == 0 else sent)
            if number % 3 == 1:
                connection.recv(100)
            # A reset instead of an orderly close.
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    until = time.monotonic() + 60
    while len(os.listdir(f"/proc/{pid}/fd")) > 40:
        assert time.monotonic() < until, "sockets are left open"
        time.sleep(0.1)
    full = {"prompt": "a", "n": 64, "max_tokens": 2}  # all slots
    while httpx.post(f"{base}/v1/completions", json=full, timeout=60).status_code != 200:
        assert time.monotonic() < until, "places are left taken"
        time.sleep(0.1)
    assert ask(base) == good


BROKEN = """
import os, sys
from deskside.engine.steps import CachedModel
real, told = CachedModel.decode, []
def decode(self, *rest):
    told.append(1)
    if len(told) == 3: raise RuntimeError('CUDA error: an illegal memory access')
    return real(self, *rest)
CachedModel.decode = decode
from deskside.cli.main import main
sys.exit(main(['serve', sys.argv[1], '--port', '0', '--device', 'cpu']))
"""


def test_a_step_that_raises_ends_its_answers_and_not_the_server(chatty: Path) -> None:
    """The error simulates a GPU's failures, such as out of memory or a failing kernel."""
    process = subprocess.Popen(
        [sys.executable, "-c", BROKEN, str(chatty)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    try:
        assert process.stdout is not None
        base = next(word for word in process.stdout.readline().split() if word.startswith("http"))
        # Greedy, because a sampled answer may end before the third token.
        body = {"prompt": "the sea", "stream": True, "max_tokens": 50, "temperature": 0}
        lines = httpx.post(f"{base}/v1/completions", json=body, timeout=60).text.strip().split("\n\n")
        error = json.loads(lines[-1].removeprefix("data: "))["error"]
        assert error["type"] == "server_error" and "illegal memory access" in error["message"]
        assert httpx.get(f"{base}/health").json() == {"status": "ok"}
        first, again = ask(base), ask(base)
        assert first == again
        process.terminate()
        _, told = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0
    assert "the engine failed: RuntimeError: CUDA error" in told and "Traceback" not in told


def test_a_failing_template_refuses_its_request_alone(server: tuple[str, int], good: str) -> None:
    """These tests' template raises on a wizard, and divides by a length that can be 0."""
    base, _ = server
    for messages in ([{"role": "user", "content": "divide by zero"}], [{"role": "wizard", "content": "a"}]):
        response = httpx.post(f"{base}/v1/chat/completions", json={"messages": messages}, timeout=30)
        assert response.status_code == 400 and response.json()["error"]["param"] == "messages"
    assert ask(base) == good


def test_ctrl_c_twice_does_not_wait(chatty: Path) -> None:
    options = ["--port", "0", "--device", "cpu", "--drain-seconds", "600"]
    command = [sys.executable, "-m", "deskside", "serve", str(chatty), *options]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        base = next(word for word in process.stdout.readline().split() if word.startswith("http"))
        body = {"prompt": "the sea", "stream": True, "max_tokens": 4000, "temperature": 0, "n": 16}
        with httpx.stream("POST", f"{base}/v1/completions", json=body, timeout=60) as response:
            lines = response.iter_lines()
            next(lines)
            process.send_signal(signal.SIGINT)
            time.sleep(0.5)
            process.send_signal(signal.SIGINT)
            assert process.wait(timeout=60) == 0
        # The API's address, and that answers were cut off.
        assert len(process.stderr.read().splitlines()) <= 2
