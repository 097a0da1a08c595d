"""Executors of a study's trials: this machine (`LocalExecutor`), or a Ray cluster (`ray_executor.py`).

The runner plans, journals and resumes in the same way for both. An executor says which devices are free to use now and
starts a trial on one of them; the runner then polls it.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from deskside.study.execute.attempt_lock import attempt_lock, is_idle
from deskside.study.execute.devices import Device
from deskside.study.execute.trial_process import TrialEnd, TrialJob, TrialProcess, WaitingProcess


class RunningTrial(Protocol):
    """A trial as seen by the study; see `TrialProcess`. pid: None if the process is on another machine."""

    @property
    def pid(self) -> int | None: ...
    def poll(self) -> TrialEnd | None: ...
    def seconds_without_progress(self) -> float: ...
    def kill_hung(self, reason: str) -> TrialEnd: ...
    def stop(self) -> None: ...
    def kill(self) -> None: ...


class Executor(Protocol):
    """Starts trials on devices."""

    def devices(self) -> Sequence[Device]:
        """Return the devices that may have a trial each, busy ones included. Raises RunError if there can be none."""

    def wait_until_idle(self, run: Path) -> None:
        """Wait until no earlier attempt writes to a run directory. Raises RunError if one does not stop in time."""

    def start(self, job: TrialJob, device: Device, lock: int | None) -> RunningTrial:
        """Start a trial. lock: descriptor that `StudyFolder.lock` yields."""

    def prepare(self, device: Device, lock: int | None) -> None:
        """Take note that another trial will start on this device; do now what makes its start faster."""

    def close(self) -> None:
        """End what `prepare` started. Running trials are not concerned."""


class LocalExecutor:
    """Runs trials as child processes. Earlier ones on this machine have ended when it starts (`StudyFolder.lock`)."""

    def __init__(self, devices: Sequence[Device]):
        self._devices = tuple(devices)
        self._waiting: dict[str, WaitingProcess] = {}  # by the name of the device

    def devices(self) -> Sequence[Device]:
        return self._devices

    def wait_until_idle(self, run: Path) -> None:
        if not is_idle(run):  # the study ran on a cluster before
            with attempt_lock(run):
                pass

    def start(self, job: TrialJob, device: Device, lock: int | None) -> RunningTrial:
        return TrialProcess(job, device.environment, lock, self._waiting.pop(device.name, None))

    def prepare(self, device: Device, lock: int | None) -> None:
        # On a CPU, the imports would take time from the trial that trains.
        if device.name.startswith("cuda") and device.name not in self._waiting:
            self._waiting[device.name] = WaitingProcess(device.environment, lock)

    def close(self) -> None:
        for process in self._waiting.values():
            process.close()
        self._waiting.clear()
