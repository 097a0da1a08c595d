"""`deskside dashboard`: serves the page on this machine."""

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
from typing import Annotated

import tyro

from deskside.cli.parser import parse
from deskside.serve.address import is_loopback
from deskside.utils.errors import UsageError

FIRST_PORT, TRIED = 8501, 20
WAIT_SECONDS = 0.05
BUSY = (errno.EADDRINUSE, errno.EACCES, errno.EPERM)


@dataclass
class DashboardOptions:
    """Look at studies and runs in a browser, also while they are going on.

    It only reads. DIR is searched for studies and runs, five levels deep.

    Examples:
      deskside dashboard
      deskside dashboard studies/matrix16 --port 9000
    """

    directory: Annotated[
        tyro.conf.Positional[str], tyro.conf.arg(metavar="[DIR]", help="where studies and runs are")
    ] = "."
    port: Annotated[
        int | None, tyro.conf.arg(metavar="P", help="left out: 8501, or the next that is free")
    ] = None
    host: Annotated[str, tyro.conf.arg(metavar="H", help="address to listen on; there is no password")] = (
        "localhost"
    )


def run(argv: Sequence[str]) -> int:
    """The command. Returns when the server is stopped; raises UsageError."""
    options = parse(DashboardOptions, argv, "deskside dashboard")
    root = Path(options.directory)
    if not root.is_dir():
        what = "is a file" if root.exists() else "no such directory"
        raise UsageError(f"{root}: {what}; give a directory that holds studies or runs")
    if importlib.util.find_spec("streamlit") is None or importlib.util.find_spec("plotly") is None:
        raise UsageError("the dashboard needs streamlit and plotly: pip install 'deskside[dashboard]'")
    port = _port(options.host, options.port)
    shown = f"[{options.host}]" if ":" in options.host else options.host
    print(f"dashboard of {root}: http://{shown}:{port}  (Ctrl-C stops it)", flush=True)
    if not is_loopback(options.host):
        print(
            f"--host {options.host}: whoever reaches this address can read these runs; there is no password",
            file=sys.stderr,
        )
    _serve(root.resolve(), options.host, port)
    return 0


def settings(host: str, port: int) -> dict[str, str]:
    """Streamlit's own options: nothing is sent anywhere, nothing is asked, no button that deploys."""
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
    # A person's own configuration may be there; what is given here stands above it.
    from streamlit.web import cli

    arguments = ["run", str(Path(__file__).with_name("app.py"))]
    for name, value in settings(host, port).items():
        arguments += [f"--{name}", value]
    os.environ.setdefault("STREAMLIT_SERVER_SHOW_EMAIL_PROMPT", "false")
    threading.Thread(target=_ahead, args=(root, host, port), name="ahead", daemon=True).start()
    # What streamlit prints when it stops must not fail where nobody reads standard output any more.
    with contextlib.redirect_stdout(sys.stderr):
        cli.main([*arguments, "--", str(root)], standalone_mode=False)


def _ahead(root: Path, host: str, port: int) -> None:
    """Import and read what the first page shows, while the browser still loads streamlit's scripts.

    Not before the server listens: until then it would only take the time that the server needs to start.
    """
    while not _answers(host, port):
        time.sleep(WAIT_SECONDS)
    from deskside.dashboard import cached
    from deskside.dashboard.tabs import tab_overview  # noqa: F401

    cached.ahead(root)


def _answers(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=1).close()
    except OSError:
        return False
    return True


def _port(host: str, wanted: int | None) -> int:
    """A port that is free now. Raises UsageError when the wanted one is not, or the address is not this machine's."""
    if wanted is not None and not 1 <= wanted <= 65535:
        raise UsageError(f"--port: {wanted} is no port; give 1 to 65535")
    for port in [wanted] if wanted is not None else range(FIRST_PORT, FIRST_PORT + TRIED):
        reason = _taken(host, port)
        if reason is None:
            return port
    if wanted is not None:
        raise UsageError(f"--port: {wanted} of {host} cannot be listened on ({reason}); give another")
    raise UsageError(
        f"ports {FIRST_PORT} to {FIRST_PORT + TRIED - 1} of {host} are taken; give one with --port"
    )


def _taken(host: str, port: int) -> str | None:
    try:
        places = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except socket.gaierror as error:
        raise UsageError(
            f"--host: {host} is no address: {error.strerror}; leave it out for this machine alone"
        ) from None
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
