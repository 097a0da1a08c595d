"""`deskside dashboard`: options, errors, and that it starts without torch."""

import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from deskside.cli import dashboard as dashboard_command
from deskside.cli.main import main
from deskside.dashboard import file_cache
from deskside.utils.errors import UsageError


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Path, str, int]]:
    """Replace the server, and return the list of arguments that it is called with."""
    calls: list[tuple[Path, str, int]] = []
    monkeypatch.setattr(
        dashboard_command, "_serve", lambda root, host, port: calls.append((root, host, port))
    )
    return calls


def test_serves_only_this_machine_by_default(
    tmp_path: Path, served: list[tuple[Path, str, int]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["dashboard", str(tmp_path)]) == 0
    root, host, port = served[0]
    assert (root, host) == (tmp_path, "localhost")
    out, err = capsys.readouterr()
    assert f"http://localhost:{port}" in out and err == ""


def test_warns_about_a_public_address(
    tmp_path: Path, served: list[tuple[Path, str, int]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["dashboard", str(tmp_path), "--host", "0.0.0.0"]) == 0
    assert "no password" in capsys.readouterr().err
    assert main(["dashboard", str(tmp_path), "--host", "127.0.0.1"]) == 0
    assert capsys.readouterr().err == ""


def test_a_taken_port_is_skipped_unless_it_is_given(
    tmp_path: Path, served: list[tuple[Path, str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        taken = other.getsockname()[1]
        monkeypatch.setattr(dashboard_command, "FIRST_PORT", taken)
        dashboard_command.run([str(tmp_path), "--host", "127.0.0.1"])
        assert served[0][2] != taken
        with pytest.raises(UsageError, match=f"--port: {taken} is not available on 127.0.0.1"):
            dashboard_command.run([str(tmp_path), "--host", "127.0.0.1", "--port", str(taken)])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nowhere"], "nowhere: no such directory"),
        ([__file__], "is a file"),
        ([".", "--port", "0"], "0 is not a port"),
        ([".", "--port", "many"], "--port"),
        ([".", "--host", "203.0.113.7"], "not an address of this machine"),
        ([".", "--prot", "9"], "--port"),
    ],
)
def test_errors_are_one_line(words: list[str], message: str, served: list[object]) -> None:
    with pytest.raises(UsageError, match=message) as error:
        dashboard_command.run(words)
    assert "\n" not in str(error.value) and not served


def test_preloading_waits_until_the_server_listens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[Path] = []
    monkeypatch.setattr(file_cache, "preload", read.append)
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = server.getsockname()[1]
        thread = threading.Thread(target=dashboard_command._preload, args=(tmp_path, "127.0.0.1", port))
        thread.start()
        thread.join(4 * dashboard_command.WAIT_SECONDS)
        assert thread.is_alive() and not read
        server.listen()
        thread.join(30)
    assert not thread.is_alive() and read == [tmp_path]


def test_missing_streamlit_is_an_error_with_the_install_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dashboard_command.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"pip install 'deskside\[dashboard\]'"):
        dashboard_command.run([str(tmp_path)])


def test_telemetry_is_off() -> None:
    settings = dashboard_command.settings("localhost", 1)
    assert settings["browser.gatherUsageStats"] is False
    assert settings["server.headless"] is True and settings["client.toolbarMode"] == "minimal"
    assert settings["server.address"] == "localhost"


def test_the_settings_exist_in_this_streamlit() -> None:
    from streamlit import config

    assert set(dashboard_command.settings("localhost", 1)) <= set(config.get_config_options())


def test_neither_the_command_nor_any_tab_imports_torch() -> None:
    code = (
        "import sys, pkgutil, importlib, deskside.dashboard as d\n"
        "names = [m.name for m in pkgutil.walk_packages(d.__path__, 'deskside.dashboard.')]\n"
        "[importlib.import_module(n) for n in names]\n"
        "assert len(names) > 15\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=120).returncode == 0


def test_the_page_does_not_import_the_libraries_of_its_tabs() -> None:
    code = "import sys, deskside.dashboard.page; print(*[m for m in ('scipy', 'pandas', 'torch') if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.strip() == ""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_that_stops_it_is_no_failure(
    number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """uvicorn raises the signal again once the server has stopped."""
    monkeypatch.setattr("deskside.dashboard.server.serve", lambda root, settings: signal.raise_signal(number))
    monkeypatch.setattr("deskside.cli.dashboard._preload", lambda *where: None)
    assert main(["dashboard", str(tmp_path)]) == 0
