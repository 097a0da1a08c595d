"""Prepared data, the single thread of the tests that train, and a process that has just started."""

import time

import pytest

import deskside
from tests.data.conftest import prepared
from tests.train.conftest import data, one_thread, short_ends

__all__ = ["data", "one_thread", "prepared", "short_ends"]


@pytest.fixture(autouse=True)
def just_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests of training with a virtual clock leave their own start of the process behind."""
    monkeypatch.setattr(deskside, "STARTED", time.perf_counter())
