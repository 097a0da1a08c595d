"""Low-precision formats that the GPU's tensor cores support besides plain FP8.

fp4: tensor cores of compute capability 10.x and 12.x multiply NVFP4 operands directly. If the self-check finds wrong
results, NVFP4 is emulated.
mxfp8: on 12.x, FP8 products can run as MXFP8 with all block scales equal to 1, which leaves the values unchanged.
GeForce cards run plain FP8 with float32 accumulation at half rate, but block-scaled FP8 at full rate. Both products are
timed when a run starts, and MXFP8 is used if it is faster and its result agrees with that of plain FP8. The run records
the choice for its other processes and for a resume.
grouped_fp8: torch's grouped product takes FP8 operands, for the experts of a mixture. It exists on 9.0 and, in newer
builds of torch, on 10.x; the self-check finds out.

We have not run fp4 or mxfp8 on such a GPU. Tests compile them and inspect the generated code. In a run, the self-check
and the comparison with the plain product detect wrong results.
"""

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from deskside.kernels.device_time import device_seconds

SIZE = 2048  # rows and columns of the operands of the timed product
AGREEMENT = 1e-2  # relative error between both products; both accumulate in float32 and round to bfloat16


@dataclass(frozen=True)
class HardwareCaps:
    """Formats that run on the tensor cores. fp4: NVFP4. mxfp8: FP8 operands as MXFP8 with unit scales. grouped_fp8:
    FP8 operands of grouped products."""

    fp4: bool = False
    mxfp8: bool = False
    grouped_fp8: bool = False


NONE = HardwareCaps()


def hardware_caps(device: torch.device, mxfp8: bool | None = None) -> HardwareCaps:
    """Return the capabilities of a device.

    mxfp8: the recorded result of an earlier timing. If None, the two FP8 products are timed on compute capability 12.x,
    which takes milliseconds once they are compiled.
    """
    if device.type != "cuda" or torch.version.hip is not None:
        return HardwareCaps()
    major = torch.cuda.get_device_capability(device)[0]
    return HardwareCaps(
        fp4=major in (10, 12),
        mxfp8=major == 12 and (_mxfp8_is_faster(device) if mxfp8 is None else mxfp8),
        grouped_fp8=major in (9, 10),
    )


@cache
def _mxfp8_is_faster(device: torch.device) -> bool:
    """Return True if MXFP8 products agree with plain FP8 products on this device and are faster."""
    from deskside.kernels.nvfp4.native import fp8_matmul

    generator = torch.Generator(device).manual_seed(0)
    left, right = (
        torch.randn(SIZE, SIZE, generator=generator, device=device).to(torch.float8_e4m3fn) for _ in range(2)
    )
    one = torch.ones((), device=device)

    def plain() -> Tensor:
        return torch._scaled_mm(left, right.T, one, one, out_dtype=torch.bfloat16)

    def block_scaled() -> Tensor:
        return fp8_matmul(left, right, one)

    try:
        expected, result = plain().float(), block_scaled().float()
    except RuntimeError:
        return False  # one of them is not supported here; the self-check tests the plain product
    agrees = bool((result - expected).norm() <= AGREEMENT * expected.norm())
    return agrees and device_seconds(block_scaled, device) < device_seconds(plain, device)
