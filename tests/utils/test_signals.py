"""StopSignal: the first signal requests a stop, a second Ctrl-C raises, and the old handlers are restored."""

import os
import signal
import subprocess
import sys

import pytest

from deskside.utils.signals import Interrupted, StopSignal, add_remedy, hold, message
from tests.sources import ROOT


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_first_signal_only_sets_requested(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with StopSignal() as stop:
        assert stop.requested is None
        os.kill(os.getpid(), number)
        assert stop.requested == number.name
        os.kill(os.getpid(), signal.SIGTERM)  # a scheduler may send a second signal
        assert stop.requested == "SIGTERM"
    assert signal.getsignal(number) is before


def test_second_ctrl_c_raises_keyboard_interrupt() -> None:
    with pytest.raises(KeyboardInterrupt), StopSignal():
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_ignored_sighup_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopSignal() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            assert stop.requested is None
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_the_innermost_remedy_is_said() -> None:
    error, terminated = KeyboardInterrupt(), Interrupted(signal.SIGTERM)
    assert message(error) == "interrupted" and message(terminated) == "interrupted by SIGTERM"
    for remedy in ("resume with: a", "continue with: b"):
        add_remedy(error, remedy)
        add_remedy(terminated, remedy)
    assert message(error) == "interrupted; resume with: a"
    assert message(terminated) == "interrupted by SIGTERM; resume with: a"


def test_a_held_signal_waits_until_the_process_is_ready() -> None:
    """Ctrl-C comes before a started process can handle it."""
    program = (
        "import os, signal\n"
        "os.kill(os.getpid(), signal.SIGINT)\n"
        "from deskside.utils.signals import release\n"
        "try:\n"
        "    release(signal.SIGINT)\n"
        "except KeyboardInterrupt:\n"
        "    print('interrupted')\n"
    )
    with hold(signal.SIGINT):
        started = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT)
    assert (started.stdout, started.stderr) == ("interrupted\n", "")
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, [])
