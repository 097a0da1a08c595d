"""Weights from their INT8 codes, in the dtype that a product takes.

A card reads each code once and writes each weight once, 3 bytes per weight in 16 bits, in one Triton kernel. Torch
would take three passes with a float32 copy in between. Scales on the product in place of the weight are no better: one
pass over the codes and one over the product, which at 4,096 tokens is twice as many numbers as the weights of Qwen2.5
1.5B; and both mix dtypes, for which torch has no vectorised kernel. Elsewhere the plain torch below, which the kernel
is tested against.
"""

import torch
from torch import Tensor


def dequantize_int8(codes_RC: Tensor, scale_R: Tensor, dtype: torch.dtype) -> Tensor:
    """codes (rows, columns) int8, times its row's scale (rows,) float32 in float32, rounded once to `dtype`."""
    if codes_RC.is_cuda:
        from deskside.kernels.dequantize_triton import dequantize_int8 as kernel

        return kernel(codes_RC, scale_R, dtype)
    return codes_RC.float().mul_(scale_R[:, None]).to(dtype)
