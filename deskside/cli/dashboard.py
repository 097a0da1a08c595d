"""`deskside dashboard`: serve the dashboard on this machine."""

import contextlib
import errno
import importlib.util
import os
import socket
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import deskside.dashboard
from deskside.cli.options import Command, option
from deskside.cli.shared_options import addresses, is_loopback
from deskside.utils.errors import UsageError

FIRST_PORT, TRIED = 8501, 20
WAIT_SECONDS = 0.05
BUSY = (errno.EADDRINUSE, errno.EACCES, errno.EPERM)


@dataclass(kw_only=True)
class DashboardOptions:
    """Browse studies and runs live in a browser. Nothing is written.

    Studies and runs are searched five levels below DIR.

    Examples:
      deskside dashboard
      deskside dashboard studies/matrix16 --port 9000
    """

    directory: str = option("where studies and runs are", ".", metavar="DIR", positional=True)
    port: int | None = option("port; default: 8501, or the next free one", None, metavar="P")
    host: str = option("address to listen on; there is no password", "localhost", metavar="H")


COMMAND = Command("dashboard", DashboardOptions)


def run(argv: Sequence[str]) -> int:
    """Run `deskside dashboard` until it is stopped. Raises UsageError."""
    options = COMMAND.parse(argv)
    root = Path(options.directory)
    if not root.is_dir():
        what = "is a file" if root.exists() else "no such directory"
        raise UsageError(f"{root}: {what}; give a directory that holds studies or runs")
    if importlib.util.find_spec("streamlit") is None or importlib.util.find_spec("plotly") is None:
        raise UsageError("the dashboard needs streamlit and plotly: pip install 'deskside[dashboard]'")
    port = _free_port(options.host, options.port)
    shown = f"[{options.host}]" if ":" in options.host else options.host
    print(f"dashboard of {root}: http://{shown}:{port}  (Ctrl-C stops it)", flush=True)
    if not is_loopback(options.host):
        print(
            f"--host {options.host}: anyone who can reach this address can read these runs; there is no password",
            file=sys.stderr,
        )
    _serve(root.resolve(), options.host, port)
    return 0


def settings(host: str, port: int) -> dict[str, str]:
    """Return Streamlit's options: no telemetry, no questions, no deploy button."""
    return {
        "server.address": host,
        "server.port": str(port),
        "server.headless": "true",
        "server.fileWatcherType": "none",
        "server.runOnSave": "false",
        "browser.gatherUsageStats": "false",
        "client.toolbarMode": "minimal",
        "client.showErrorDetails": "none",
        "logger.hideWelcomeMessage": "true",
        "logger.level": "error",
        "theme.primaryColor": "#0072B2",
    }


def _serve(root: Path, host: str, port: int) -> None:
    # Options on the command line override the user's own Streamlit configuration.
    from streamlit.web import cli

    arguments = ["run", str(Path(str(deskside.dashboard.__file__)).with_name("page.py"))]
    for name, value in settings(host, port).items():
        arguments += [f"--{name}", value]
    os.environ.setdefault("STREAMLIT_SERVER_SHOW_EMAIL_PROMPT", "false")
    threading.Thread(target=_preload, args=(root, host, port), name="preload", daemon=True).start()
    # Streamlit prints when it stops, which must not fail if standard output has been closed.
    with contextlib.redirect_stdout(sys.stderr):
        cli.main([*arguments, "--", str(root)], standalone_mode=False)


def _preload(root: Path, host: str, port: int) -> None:
    """Load the data of the first page while the browser loads Streamlit's scripts.

    It waits for the server to listen, since earlier it would only delay the server's start.
    """
    while True:
        try:
            socket.create_connection((host, port), timeout=1).close()
            break
        except OSError:
            time.sleep(WAIT_SECONDS)
    from deskside.dashboard import file_cache
    from deskside.dashboard.tabs import tab_overview  # noqa: F401

    file_cache.preload(root)


def _free_port(host: str, wanted: int | None) -> int:
    """Return a free port. Raises UsageError if the wanted one is taken or the host is not this machine."""
    if wanted is not None and not 1 <= wanted <= 65535:
        raise UsageError(f"--port: {wanted} is not a port; give 1 to 65535")
    for port in [wanted] if wanted is not None else range(FIRST_PORT, FIRST_PORT + TRIED):
        reason = _why_taken(host, port)
        if reason is None:
            return port
    if wanted is not None:
        raise UsageError(f"--port: {wanted} of {host} is not available ({reason}); give another")
    raise UsageError(
        f"ports {FIRST_PORT} to {FIRST_PORT + TRIED - 1} of {host} are taken; give one with --port"
    )


def _why_taken(host: str, port: int) -> str | None:
    places = addresses(host, port)
    for family, kind, protocol, _, address in places:
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(address)
            except OSError as error:
                if error.errno in BUSY:
                    return error.strerror or str(error)
                if len(places) == 1:
                    raise UsageError(
                        f"--host: {host} is not an address of this machine: {error.strerror}"
                    ) from None
    return None
