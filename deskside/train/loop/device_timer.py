"""Device-side timing of training steps.

The host runs ahead of the GPU, so a host timer measures when results are read, not when work ran. These events are
recorded in stream order, and the time between two of them is GPU time.
"""

import time

import torch


class DeviceEvent:
    """A timestamp in stream order: a CUDA event on a GPU, ``time.perf_counter()`` on a CPU."""

    def __init__(self, device: torch.device):
        self._event: torch.cuda.Event | None = None
        self._host = 0.0
        if device.type == "cuda":
            self._event = torch.cuda.Event(enable_timing=True)
            self._event.record()
        else:  # CPU work has finished when the call that did it returns
            self._host = time.perf_counter()

    def synchronize(self) -> None:
        """Block until all work recorded before this event has finished."""
        if self._event is not None:
            self._event.synchronize()

    def seconds_since(self, start: "DeviceEvent") -> float:
        """Return the seconds between `start` and this event. Blocks until this event has completed."""
        if self._event is None:
            return self._host - start._host
        assert start._event is not None
        self._event.synchronize()
        return float(start._event.elapsed_time(self._event)) / 1e3
