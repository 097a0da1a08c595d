"""Fixtures for the tests of the commands, shared with other packages, and a reset of the process's start time."""

import time

import pytest

import deskside
from tests.data.conftest import prepared
from tests.train.conftest import data, one_thread, short_ends

__all__ = ["data", "one_thread", "prepared", "short_ends"]


@pytest.fixture(autouse=True)
def just_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reset the start time of the process, which tests with a virtual clock change."""
    monkeypatch.setattr(deskside, "STARTED", time.perf_counter())
