"""The watch for other processes on the GPU, with a driver that answers from a list."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest

from deskside.run.directory import RunDirectory
from deskside.train.loop.gpu_sharing import CHECK_SECONDS, GpuSharingWatch
from deskside.train.nvml import NvmlDevice
from deskside.utils.signals import StopSignal


class Driver:
    """Answers each question with the next number of processes, and keeps the questions."""

    def __init__(self, answers: Sequence[int | None]):
        self.answers, self.asked = list(answers), list[float]()

    def other_busy_processes(self, since: float) -> int | None:
        self.asked.append(since)
        return self.answers.pop(0)


def watch(tmp_path: Path, driver: Driver | None, seconds: Sequence[float]) -> GpuSharingWatch:
    """Return a watch after a step at each of these times, the first of which is the start."""
    times = iter(seconds)
    found = GpuSharingWatch(cast(NvmlDevice | None, driver), lambda: next(times))
    run = RunDirectory(tmp_path)
    found.begin(run, StopSignal(), cast(Any, None))
    for _ in seconds[1:]:
        found.on_step({}, 100)
    return found


def events(folder: Path) -> str:
    path = folder / "events.log"
    return path.read_text() if path.exists() else ""


@pytest.mark.parametrize(
    "answers, share", [([0, 0], 0.0), ([0, 2], 0.5), ([1, 1], 1.0), ([None, 1], 1.0), ([None, None], None)]
)
def test_share(tmp_path: Path, answers: list[int | None], share: float | None) -> None:
    """An answer that the driver does not have is no answer, and not zero."""
    driver = Driver(answers)
    found = watch(tmp_path, driver, [0.0, CHECK_SECONDS - 1, CHECK_SECONDS, 2 * CHECK_SECONDS])
    assert found.share == share
    assert driver.asked == [0.0, CHECK_SECONDS]  # since the last question
    assert events(tmp_path).count("warning") == bool(share)  # once


def test_without_a_gpu(tmp_path: Path) -> None:
    assert watch(tmp_path, None, [0.0, 100.0]).share is None
    assert events(tmp_path) == ""
