"""One torch thread per test process: the models are tiny, and two test processes share two cores."""

import os

import hypothesis
import pytest

# No test is failed by the clock: what takes 20 ms alone takes 300 on a machine that does something else.
hypothesis.settings.register_profile("deskside", deadline=None)
hypothesis.settings.load_profile("deskside")


def pytest_configure(config: pytest.Config) -> None:
    os.environ.setdefault(
        "OMP_NUM_THREADS", "1"
    )  # for this process, its workers, and the runs that tests start
