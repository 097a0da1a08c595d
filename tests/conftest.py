"""One torch thread per test process: the models are tiny, and two test processes share two cores."""

import os

import pytest


def pytest_configure(config: pytest.Config) -> None:
    os.environ.setdefault(
        "OMP_NUM_THREADS", "1"
    )  # for this process, its workers, and the runs that tests start
