"""What the card's matrix units take besides plain FP8, found by asking the card and by running it.

fp4: NVFP4 operands go to the tensor cores as they are (compute capability 10.x and 12.x). Whether that computes right
is for the self-check, which falls back to emulation.
mxfp8: on 12.x, FP8 products are issued as MXFP8 with unit scales. GeForce cards run plain FP8 with float32 sums at half
of their rate, and block-scaled FP8 at the whole of it; the numbers are the same. Both ways are timed when a run begins,
and the faster one that agrees is taken; the run keeps the answer, for its other processes and for when it is resumed.
No such card has been at hand: these paths are compiled and inspected in tests, and guarded by running them here.
"""

import statistics
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

SIZE = 2048
RUNS = 5
AGREEMENT = 1e-2  # relative; both sum in float32 and round to bfloat16


@dataclass(frozen=True)
class HardwareCaps:
    """fp4: NVFP4 natively. mxfp8: FP8 as MXFP8 with unit scales."""

    fp4: bool = False
    mxfp8: bool = False


NONE = HardwareCaps()


def hardware_caps(device: torch.device, mxfp8: bool | None = None) -> HardwareCaps:
    """Of this device. mxfp8: what a trial found before; None: on compute capability 12.x two products are timed, which
    takes milliseconds once they are compiled."""
    if device.type != "cuda" or torch.version.hip is not None:
        return HardwareCaps()
    major = torch.cuda.get_device_capability(device)[0]
    return HardwareCaps(
        fp4=major in (10, 12),
        mxfp8=major == 12 and (_mxfp8_is_faster(device) if mxfp8 is None else mxfp8),
    )


@cache
def _mxfp8_is_faster(device: torch.device) -> bool:
    from deskside.kernels.nvfp4.native import fp8_matmul

    generator = torch.Generator(device).manual_seed(0)
    left, right = (
        torch.randn(SIZE, SIZE, generator=generator, device=device).to(torch.float8_e4m3fn) for _ in range(2)
    )
    one = torch.ones((), device=device)

    def plain() -> Tensor:
        return torch._scaled_mm(left, right.T, one, one, out_dtype=torch.bfloat16)

    def blocks() -> Tensor:
        return fp8_matmul(left, right, one)

    try:
        expected, got = plain().float(), blocks().float()
    except RuntimeError:
        return False  # a card or a library that cannot do one of them: plain products are judged by the self-check
    agrees = bool((got - expected).norm() <= AGREEMENT * expected.norm())
    return agrees and _milliseconds(blocks) < _milliseconds(plain)


def _milliseconds(function: object) -> float:
    assert callable(function)
    times = []
    for _ in range(RUNS):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        function()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times)
