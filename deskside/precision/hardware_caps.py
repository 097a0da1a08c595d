"""Low-precision formats that the GPU's tensor cores support besides plain FP8.

fp4: NVFP4 operands go to the tensor cores directly (compute capability 10.x and 12.x). The self-check verifies the
results and falls back to emulation.
mxfp8: on 12.x, FP8 products are issued as MXFP8 with unit scales. GeForce cards run plain FP8 with float32
accumulation at half rate but block-scaled FP8 at full rate, with the same numbers. Both are timed when a run starts,
and the faster correct one is used. The run records the choice for its other processes and for a resume. We had no
such GPU: tests compile these paths and inspect their code, and at run time both checks above guard them.
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
    """Return the capabilities of a device. mxfp8: the result of an earlier trial. None: on compute capability 12.x two
    products are timed, which takes milliseconds once they are compiled."""
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
