"""Data, one thread, and a machine without other load."""

import pytest

from tests.train.conftest import data, one_thread, short_ends

__all__ = ["data", "one_thread", "short_ends"]


@pytest.fixture
def quiet_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fix the machine's load, because the time reserved for the end of a run grows with it."""
    monkeypatch.setattr("deskside.pipeline.pipeline_state.contention", lambda: 1.0)
