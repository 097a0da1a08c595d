"""One torch thread per test process: the models are tiny, and two test processes share two cores."""

import gc
import os
import shutil
import signal
import tempfile

import hypothesis
import pytest

from deskside.utils.files import cache_folder
from tests import long_form

# No test fails by the clock: what takes 20 ms alone takes 300 ms on a busy machine. The default suite tries the same
# examples every time, so that a failure is due to the commit. The long form tries new ones, and twice as many.
hypothesis.settings.register_profile("default suite", deadline=None, derandomize=True, max_examples=50)
hypothesis.settings.register_profile("long form", deadline=None)


def pytest_configure(config: pytest.Config) -> None:
    hypothesis.settings.load_profile("default suite" if config.option.markexpr == "not full" else "long form")
    # Until collection ends, nothing is garbage. Searching for it took a fifth of the collection's time.
    gc.disable()
    # nohup ignores SIGHUP, and a shell ignores SIGINT for background processes. Children inherit both.
    for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, handler)
    # For this process, its workers, and the runs that tests start.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # Tests neither read nor write the user's trials and added facts, but use FlashAttention-4's compiled kernels.
    if not hasattr(config, "workerinput"):
        os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_DIR", str(cache_folder() / "flash-attn-4"))
        os.environ["DESKSIDE_CACHE"] = tempfile.mkdtemp(prefix="deskside-cache-")
        os.environ["DESKSIDE_DATA"] = os.path.join(os.environ["DESKSIDE_CACHE"], "data")


@pytest.hookimpl(tryfirst=True)  # before -m selects by marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests that took long when the suite was last timed as `full`."""
    listed = set(long_form.read_list())
    for item in items:
        if item.nodeid in listed or long_form.function_of(item.nodeid) in listed:
            item.add_marker(pytest.mark.full)


def pytest_collection_finish() -> None:
    """Exclude modules and collected tests from Python's garbage collector, which
    then only visits what tests create.
    """
    gc.freeze()
    gc.enable()


@pytest.fixture
def no_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the figures out of the reports of runs. They take longer than the run of a test that is about neither."""
    monkeypatch.setattr("deskside.report.run_figures.draw", lambda *_: ([], []))


def pytest_unconfigure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        shutil.rmtree(os.environ["DESKSIDE_CACHE"], ignore_errors=True)
