"""Detect other processes that compute on the run's GPU, so that its speed is not taken for that of the whole GPU.

A game, another training run or a second study slows a run down by an unpredictable amount. What does not depend on
time, such as the loss after a number of tokens, stays valid; speed, power and energy do not, nor does the loss of a run
whose length is a time.
"""

import time
from collections.abc import Callable
from typing import Any

from deskside.run.directory import RunDirectory
from deskside.train.loop.callbacks import Watch
from deskside.train.nvml import NvmlDevice
from deskside.train.objective import RowDataset
from deskside.utils.signals import StopSignal

CHECK_SECONDS = 10.0  # between two queries of the driver, which keeps its samples for about that long


class GpuSharingWatch(Watch):
    """Training callback that asks the driver every `CHECK_SECONDS` for other processes that compute on the GPU.

    gpu: None if there is none, or if NVML cannot be used. clock: seconds since the epoch.
    """

    def __init__(self, gpu: NvmlDevice | None, clock: Callable[[], float] = time.time):
        self._gpu, self._clock = gpu, clock
        self._checks = self._shared = 0

    def begin(self, run: RunDirectory, stop: StopSignal, validation: RowDataset) -> None:
        super().begin(run, stop, validation)
        self._last = self._clock()

    def on_step(self, row: dict[str, Any], total_steps: int) -> None:
        now = self._clock()
        if self._gpu is None or now - self._last < CHECK_SECONDS:
            return
        others = self._gpu.other_busy_processes(self._last)
        self._last = now
        if others is None:
            return
        self._checks += 1
        if not others:
            return
        if not self._shared:
            self.warn(
                "another process computes on this GPU, so this run is slower than it would be alone; "
                "nvidia-smi shows which one"
            )
        self._shared += 1

    @property
    def share(self) -> float | None:
        """Fraction of the checks that found another process; None without a check."""
        return self._shared / self._checks if self._checks else None
