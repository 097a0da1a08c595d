"""When the device reached a place in its own order of work.

The host learns late what a device did: it launches steps ahead, and launching or reading one may itself take long, so
what a stopwatch says when the host reads a step's numbers is no time of that step. Two moments of the device are.
"""

import time

import torch


class DeviceEvent:
    """The end of all work launched so far: an event of the present CUDA stream, or the time by a CPU's clock."""

    def __init__(self, device: torch.device):
        self._event: torch.cuda.Event | None = None
        self._host = 0.0
        if device.type == "cuda":
            self._event = torch.cuda.Event(enable_timing=True)
            self._event.record()
        else:  # done when the call returns
            self._host = time.perf_counter()

    def synchronize(self) -> None:
        """Until the device is there."""
        if self._event is not None:
            self._event.synchronize()

    def seconds_since(self, earlier: "DeviceEvent") -> float:
        """Between two moments of one device; waits for this one."""
        if self._event is None:
            return self._host - earlier._host
        assert earlier._event is not None
        self._event.synchronize()
        return float(earlier._event.elapsed_time(self._event)) / 1e3
