"""The matmul throughput that this device reaches in practice: the reference for model FLOPs utilization.

Power limits keep a card below its data sheet, so utilization is given relative to this measurement. The operands are
random: on zeros a GPU draws less power and clocks higher than on real data.
"""

import statistics
import time

import torch
from torch import Tensor

SIZES = {"cuda": 8192, "cpu": 1024}
RUNS = {"cuda": 20, "cpu": 5}
SMALLEST_CPU_SIZE = 128
# A CPU without instructions for a dtype emulates it, and one bfloat16 product at 1024 then takes seconds. The size is
# doubled only until a product takes this long.
MIN_PRODUCT_SECONDS = 0.02


def measure_matmul_peak(device: torch.device | str, dtype: torch.dtype, size: int | None = None) -> float:
    """Return the FLOP/s of a square matmul, the median of several runs after a warm-up.

    size: rows and columns of the matrices. None: a size that fills the GPU; on a CPU, the smallest power of two from
    128 to 1,024 that takes long enough to be timed (1,024 if none does).
    """
    device = torch.device(device)
    if size is not None or device.type == "cuda":
        n = SIZES[device.type] if size is None else size
        return _measure(*_operands(n, device, dtype), RUNS[device.type])
    n = SMALLEST_CPU_SIZE
    while n < SIZES["cpu"] and 2 * n**3 / _measure(*_operands(n, device, dtype), 1) < MIN_PRODUCT_SECONDS:
        n *= 2
    return _measure(*_operands(n, device, dtype), RUNS["cpu"])


def _operands(n: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator(device).manual_seed(0)
    left, right = (torch.randn(n, n, generator=generator, device=device).to(dtype) for _ in range(2))
    return left, right


def _measure(left: Tensor, right: Tensor, runs: int) -> float:
    """Return the FLOP/s of left @ right, the median of `runs` after a warm-up."""
    out = torch.empty_like(left)
    torch.mm(left, right, out=out)
    seconds = []
    for _ in range(runs):
        if left.device.type == "cuda":
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
    return 2 * left.shape[0] ** 3 / statistics.median(seconds)
