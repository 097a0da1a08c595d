"""`deskside dashboard`: serve the dashboard on this machine."""

import contextlib
import errno
import importlib.util
import socket
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from deskside.cli.options import Command, option
from deskside.cli.shared_options import addresses, check_directory, is_loopback
from deskside.utils.console import say
from deskside.utils.errors import UsageError

FIRST_PORT, PORTS_TRIED = 8501, 20
WAIT_SECONDS = 0.05  # between two attempts to connect to the server
PORT_UNAVAILABLE = (errno.EADDRINUSE, errno.EACCES, errno.EPERM)


@dataclass(kw_only=True)
class DashboardOptions:
    """Browse studies and runs live in a browser. The dashboard changes no files.

    It searches DIR for studies and runs, down to five levels below it.

    Examples:
      deskside dashboard
      deskside dashboard studies/matrix16 --port 9000
    """

    directory: str = option("directory of studies and runs", ".", metavar="DIR", positional=True)
    port: int | None = option("port; default: 8501, or the next free one", None, metavar="P")
    host: str = option("address to listen on; there is no password", "localhost", metavar="H")


COMMAND = Command("dashboard", DashboardOptions)


def run(argv: Sequence[str]) -> int:
    """Run `deskside dashboard` until it is stopped. Raises UsageError."""
    options = COMMAND.parse(argv)
    root = Path(options.directory)
    check_directory(root, "give a directory that holds studies or runs")
    if importlib.util.find_spec("streamlit") is None or importlib.util.find_spec("plotly") is None:
        raise UsageError("the dashboard needs streamlit and plotly: pip install 'deskside[dashboard]'")
    port = _free_port(options.host, options.port)
    url_host = f"[{options.host}]" if ":" in options.host else options.host  # IPv6
    print(f"dashboard of {root}: http://{url_host}:{port}  (Ctrl-C stops it)", flush=True)
    if not is_loopback(options.host):
        say(
            f"--host {options.host}: anyone who can reach this address can read these runs; there is no password"
        )
    _serve(root.resolve(), options.host, port)
    return 0


def settings(host: str, port: int) -> dict[str, str | int | bool]:
    """Return Streamlit's options, without telemetry, prompts and deploy button."""
    from deskside.dashboard import theme  # imports streamlit

    return {
        "server.address": host,
        "server.port": port,
        "server.baseUrlPath": "",
        "server.headless": True,
        "server.fileWatcherType": "none",
        "server.runOnSave": False,
        "browser.gatherUsageStats": False,
        "client.toolbarMode": "minimal",
        "client.showErrorDetails": "none",
        "logger.hideWelcomeMessage": True,
        "logger.level": "error",
        **theme.options(),
    }


def _serve(root: Path, host: str, port: int) -> None:
    from deskside.dashboard.server import serve  # imports streamlit

    threading.Thread(target=_preload, args=(root, host, port), name="preload", daemon=True).start()
    # Streamlit prints a line when it stops; this must not fail if standard output has been closed. Once it has stopped,
    # uvicorn raises the signal that stopped it again.
    with contextlib.redirect_stdout(sys.stderr), contextlib.suppress(KeyboardInterrupt):
        serve(root, settings(host, port))


def _preload(root: Path, host: str, port: int) -> None:
    """Load the data of the first page while the browser loads Streamlit's scripts.

    Loading starts once the server listens; any earlier, it would delay the start of the server.
    """
    while True:
        try:
            socket.create_connection((host, port), timeout=1).close()
            break
        except OSError:
            time.sleep(WAIT_SECONDS)
    from deskside.dashboard import file_cache
    from deskside.dashboard.views import runs  # noqa: F401

    file_cache.preload(root)
    # Importing the page of a run takes a second, for which its first visitor would wait.
    from deskside.dashboard.views import run  # noqa: F401


def _free_port(host: str, requested: int | None) -> int:
    """Return the requested port, or the first free one. Raises UsageError if there is none."""
    if requested is not None:
        if not 1 <= requested <= 65535:
            raise UsageError(f"--port: {requested} is not a port; give 1 to 65535")
        if (reason := _unavailable_reason(host, requested)) is not None:
            raise UsageError(f"--port: {requested} is not available on {host} ({reason}); give another")
        return requested
    for port in range(FIRST_PORT, FIRST_PORT + PORTS_TRIED):
        if _unavailable_reason(host, port) is None:
            return port
    raise UsageError(
        f"ports {FIRST_PORT} to {FIRST_PORT + PORTS_TRIED - 1} are not available on {host}; give another with --port"
    )


def _unavailable_reason(host: str, port: int) -> str | None:
    """Return why a port cannot be used, or None. Raises UsageError if the host is not an address of this machine."""
    candidates = addresses(host, port)
    for family, kind, protocol, _, address in candidates:
        with socket.socket(family, kind, protocol) as bound:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                bound.bind(address)
            except OSError as error:
                if error.errno in PORT_UNAVAILABLE:
                    return error.strerror or str(error)
                if len(candidates) == 1:
                    raise UsageError(
                        f"--host: {host} is not an address of this machine: {error.strerror}"
                    ) from None
    return None
