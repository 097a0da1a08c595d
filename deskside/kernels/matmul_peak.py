"""The matmul speed that this device reaches in practice: the yardstick of model FLOPs utilisation.

Data sheets promise a rate that power limits do not let a card hold, so utilisation is given against this measurement.
The operands are random: on zeros a GPU draws less power and clocks higher than on any real data.
"""

import statistics
import time

import torch

SIZES = {"cuda": 8192, "cpu": 1024}
RUNS = {"cuda": 20, "cpu": 5}


def measure_matmul_peak(device: torch.device | str, dtype: torch.dtype, size: int | None = None) -> float:
    """FLOP/s of a square matmul, the median of several after a warm-up. Well under a second.

    `size`: side of the matrices; None takes one that fills the device.
    """
    device = torch.device(device)
    n = SIZES[device.type] if size is None else size
    generator = torch.Generator(device).manual_seed(0)
    left, right = (torch.randn(n, n, generator=generator, device=device).to(dtype) for _ in range(2))
    out = torch.empty_like(left)
    torch.mm(left, right, out=out)
    seconds = []
    for _ in range(RUNS[device.type]):
        if device.type == "cuda":
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            torch.mm(left, right, out=out)
            end.record()
            end.synchronize()
            seconds.append(begin.elapsed_time(end) / 1e3)
        else:
            start = time.perf_counter()
            torch.mm(left, right, out=out)
            seconds.append(time.perf_counter() - start)
    return 2 * n**3 / statistics.median(seconds)
