"""Data, one thread, and a machine that does nothing else."""

import pytest

from tests.train.conftest import data, one_thread, short_ends

__all__ = ["data", "one_thread", "short_ends"]


@pytest.fixture
def quiet_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time kept for the end of a run grows with the machine's load, which must not change a test."""
    monkeypatch.setattr("deskside.pipeline.pipeline_state.contention", lambda: 1.0)
