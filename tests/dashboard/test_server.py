"""WebSockets that a browser has closed end without an error. The rest of the server is tested with a browser."""

import asyncio
from typing import Any

import pytest

pytest.importorskip("streamlit", reason="streamlit is not installed")
from deskside.dashboard.server import ClosedWebSockets


def call(kind: str, messages: list[str], sent: list[str], failing: bool = False) -> list[str]:
    """Call an application that receives and sends these messages, and then fails as Streamlit does."""
    received = iter(messages)
    delivered = []

    async def application(scope: Any, receive: Any, send: Any) -> None:
        for _ in messages:
            await receive()
        for message in sent:
            try:
                await send({"type": message})
            except OSError:
                break
        raise RuntimeError('Cannot call "send" once a close message has been sent.')

    async def receive() -> dict[str, str]:
        return {"type": next(received)}

    async def send(message: dict[str, str]) -> None:
        if failing:
            raise ConnectionResetError
        delivered.append(message["type"])

    asyncio.run(ClosedWebSockets(application)({"type": kind}, receive, send))  # type: ignore[arg-type]
    return delivered


def test_a_closed_websocket_ends_without_an_error() -> None:
    connect, close = ["websocket.connect"], "websocket.close"
    assert call("websocket", [*connect, "websocket.disconnect"], []) == []
    assert call("websocket", connect, ["websocket.accept", close]) == ["websocket.accept", close]
    assert call("websocket", connect, ["websocket.send"], failing=True) == []


def test_other_errors_are_raised() -> None:
    for kind, messages in (("websocket", ["websocket.connect"]), ("http", ["http.disconnect"])):
        with pytest.raises(RuntimeError):
            call(kind, messages, [f"{kind}.send"])
