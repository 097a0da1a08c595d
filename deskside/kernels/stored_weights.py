"""Stored weights converted to the activations' dtype: rows of an embedding table, and codes (INT8 or FP8) times scales.

On a GPU, each is one kernel that reads the stored weights and writes the activations' dtype; for embeddings only in
training. The plain torch below is the reference for the kernels.

Trained embeddings are stored in float32. torch would gather float32 rows and cast them in a second pass, and do the
reverse for the gradient.

Dequantizing INT8 to 16 bits moves 3 bytes per weight. torch would need three passes and a float32 copy. Scaling the
product instead of the weight is no better: it takes one pass over the codes and one over the product, which at 4,096
tokens has twice as many values as the weights of Qwen2.5 1.5B; and both passes mix dtypes, for which torch has no
vectorized kernel.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

MAX_FEW_ROWS = 64  # the most rows of x in `linear_from_codes` for which the kernel is faster


def linear_from_codes(x: Tensor, codes_RC: Tensor, scale_R: Tensor) -> Tensor:
    """Return x W^T, (..., R), where W is `dequantize_rows`. codes: int8 or float8_e4m3fn.

    With few rows of x on a GPU, reading W determines the time. A kernel then reads the codes, half the bytes of 16
    bits, and scales the float32 sums; W itself is never rounded to 16 bits. More rows multiply the dequantized W.
    """
    rows = x.numel() // x.shape[-1]
    if x.is_cuda and 0 < rows <= MAX_FEW_ROWS:
        from deskside.kernels.stored_weights_triton import few_rows_product

        return few_rows_product(x.reshape(rows, -1), codes_RC, scale_R).view(*x.shape[:-1], len(codes_RC))
    return F.linear(x, dequantize_rows(codes_RC, scale_R, x.dtype))


def dequantize_rows(codes_RC: Tensor, scale_R: Tensor, dtype: torch.dtype) -> Tensor:
    """Return int8 or FP8 codes (rows, columns) times the float32 scale of their row (rows,), in `dtype`."""
    if codes_RC.is_cuda:
        from deskside.kernels.stored_weights_triton import dequantize_rows as kernel

        return kernel(codes_RC, scale_R, dtype)
    return codes_RC.float().mul_(scale_R[:, None]).to(dtype)


def embedding(tokens: Tensor, weight_VD: Tensor, dtype: torch.dtype) -> Tensor:
    """Look up int64 tokens of any shape: (*shape, D) in `dtype`. The gradient is accumulated in the weight's dtype."""
    if _use_kernel(weight_VD, dtype):
        x = _Embedding.apply(weight_VD, tokens, dtype)
        assert isinstance(x, Tensor)
        return x
    return F.embedding(tokens, weight_VD).to(dtype)


def _use_kernel(weight: Tensor, dtype: torch.dtype) -> bool:
    needs_grad = torch.is_grad_enabled() and weight.requires_grad and not torch.compiler.is_compiling()
    return needs_grad and weight.is_cuda and weight.dtype == torch.float32 and dtype.itemsize == 2


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight_VD: Tensor, tokens: Tensor, dtype: torch.dtype) -> Tensor:
        from deskside.kernels import stored_weights_triton

        tokens_N = tokens.flatten()
        ctx.save_for_backward(tokens_N)
        ctx.entries = len(weight_VD)
        return stored_weights_triton.embedding(tokens_N, weight_VD, dtype).view(*tokens.shape, -1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        from deskside.kernels import stored_weights_triton

        (tokens_N,) = ctx.saved_tensors
        grad_ND = grads[0].reshape(len(tokens_N), -1).contiguous()
        return stored_weights_triton.embedding_gradient(grad_ND, tokens_N, ctx.entries), None, None
