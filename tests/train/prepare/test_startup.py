"""The seconds of the parts of a start."""

import time

import pytest

from deskside.train.prepare.startup import Startup


def test_each_part_has_its_own_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "perf_counter", lambda: 64.0)
    startup = Startup(10.0)
    startup.done("earlier phases", 60.0)
    startup.done("imports")
    assert startup.to_json()["seconds"] == {"earlier phases": 50.0, "imports": 4.0}
