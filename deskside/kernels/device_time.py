"""The time that a GPU takes for work that a host launches."""

import statistics
from collections.abc import Callable

import torch

# Clock cycles, about a millisecond: the host launches meanwhile what is timed. Otherwise the time of a short kernel
# would be that of its launch, which takes tens of microseconds from Python.
WAIT_CYCLES = 2_000_000


def device_seconds(
    run: Callable[[], object], device: torch.device, runs: int = 10, warm_up: int = 2
) -> float:
    """Return the median of the seconds that the GPU `device` takes for `run()`, without the time of the launch."""
    times = []
    with torch.cuda.device(device):
        for number in range(warm_up + runs):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(WAIT_CYCLES)
            begin.record()
            run()
            end.record()
            end.synchronize()
            if number >= warm_up:
                times.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(times)
