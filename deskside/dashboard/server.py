"""The web server of the dashboard: Streamlit's, with an index page that knows the address of the server.

Streamlit's index page does not know it. Opened at /run, it asks for /run/_stcore/health first, which answers with
404 and an error on the browser's console, and tries the root half a second later.
"""

import sys
from collections.abc import Mapping
from pathlib import Path

import streamlit as st
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import HTMLResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deskside.dashboard.page import PAGES

PAGE = Path(__file__).with_name("page.py")
HEAD = "<head>"
# Streamlit's scripts read this object. The base of "." is also that of their own addresses, behind a proxy too.
BASE_SCRIPT = '<script>window.__streamlit = {BACKEND_BASE_URL: new URL(".", location.href).href}</script>'


def serve(root: Path, settings: Mapping[str, object]) -> None:
    """Serve the dashboard of a directory until the process is stopped. settings: Streamlit's options."""
    sys.argv = [str(PAGE), str(root)]  # App.run gives them to the script
    routes = [Route("/", _index), *(Route(f"/{spec.name}", _index) for spec in PAGES)]
    st.App(PAGE, routes=routes, middleware=[Middleware(ClosedWebSockets)]).run(config=settings)


class ClosedWebSockets:
    """ASGI middleware that ends a WebSocket without an error once either side has closed it.

    If a browser leaves while a page is sent to it, Streamlit 1.67 takes the failed read for a text frame and closes the
    WebSocket a second time, which raises RuntimeError: a traceback in the terminal for a tab that was closed.
    """

    def __init__(self, app: ASGIApp):
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Call the application."""
        closed = False

        async def noting_receive() -> Message:
            nonlocal closed
            message = await receive()
            closed = closed or message["type"] == "websocket.disconnect"
            return message

        async def noting_send(message: Message) -> None:
            nonlocal closed
            try:
                await send(message)
            except OSError:
                closed = True
                raise
            closed = closed or message["type"] == "websocket.close"

        try:
            await self.app(scope, noting_receive, noting_send)
        except RuntimeError:
            if scope["type"] != "websocket" or not closed:
                raise


def index_page() -> str:
    """Return Streamlit's index page with `BASE_SCRIPT`."""
    page = Path(st.__file__).with_name("static").joinpath("index.html").read_text("utf-8")
    return page.replace(HEAD, HEAD + BASE_SCRIPT, 1)


async def _index(request: Request) -> HTMLResponse:
    return HTMLResponse(index_page(), headers={"Cache-Control": "no-cache"})
