"""Dequantization of MXFP4, the format of gpt-oss's experts: E2M1 codes with a power of two for 32 values.

Open Compute Project, OCP Microscaling Formats (MX) specification 1.0 (2023).
"""

import torch
import torch.nn.functional as F
from torch import Tensor

# By the code's four bits: sign, two bits of exponent, one bit of mantissa.
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_VALUES = (*_MAGNITUDES, *(-value for value in _MAGNITUDES))
_EXPONENT_BIAS = 127


def dequantize_mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """Return the values, exactly: uint8 (..., G, 16) and uint8 (..., G) -> float32 (..., 32 G).

    blocks: two codes in each byte, the first one in the lower bits. scales: exponents, plus 127. Raises ValueError for
    other shapes or dtypes.
    """
    shapes_fit = blocks.ndim > 1 and blocks.shape[-1] == 16 and blocks.shape[:-1] == scales.shape
    if not shapes_fit or {blocks.dtype, scales.dtype} != {torch.uint8}:
        raise ValueError(f"MXFP4 blocks {tuple(blocks.shape)} and scales {tuple(scales.shape)} do not fit")
    pairs = torch.tensor([(_VALUES[byte & 15], _VALUES[byte >> 4]) for byte in range(256)])
    values = F.embedding(blocks.to(torch.int32), pairs).flatten(-2)
    exponents = scales.to(torch.int32) - _EXPONENT_BIAS
    return torch.ldexp(values, exponents[..., None]).flatten(-2)
