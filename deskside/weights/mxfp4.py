"""Dequantization of MXFP4, the format of gpt-oss's experts: E2M1 codes with a power of two for 32 values.

Open Compute Project, OCP Microscaling Formats (MX) specification 1.0 (2023).
"""

import torch
from torch import Tensor

# By the code's four bits: sign, two bits of exponent, one bit of mantissa.
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_EXPONENT_BIAS = 127


def dequantize_mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """Return the values, exactly: uint8 (..., G, 16) and uint8 (..., G) -> float32 (..., 32 G).

    blocks: two codes in each byte, the first one in the lower bits. scales: exponents, plus 127.
    """
    values = torch.tensor([*_E2M1, *(-value for value in _E2M1)])
    codes = torch.stack((blocks & 15, blocks >> 4), dim=-1).flatten(-2)
    exponents = scales.to(torch.int32) - _EXPONENT_BIAS
    return torch.ldexp(values[codes.to(torch.int64)], exponents[..., None]).flatten(-2)
