"""Weights as the activations need them: rows of a table of embeddings, and INT8 codes times their scales.

On a GPU, each is one pass that reads what is stored and writes the activations' dtype; the plain torch below is what
the kernels are tested against.

Embeddings are stored in float32. torch takes the rows in float32 and casts them in a second pass, and does the reverse
for the gradient.

INT8 codes take 3 bytes of traffic per weight in 16 bits. torch would take three passes with a float32 copy in between.
Scales on the product in place of the weight are no better: one pass over the codes and one over the product, which at
4,096 tokens is twice as many numbers as the weights of Qwen2.5 1.5B; and both mix dtypes, for which torch has no
vectorised kernel.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def dequantize_int8(codes_RC: Tensor, scale_R: Tensor, dtype: torch.dtype) -> Tensor:
    """codes (rows, columns) int8, times its row's scale (rows,) float32 in float32, rounded once to `dtype`."""
    if codes_RC.is_cuda:
        from deskside.kernels.stored_weights_triton import dequantize_int8 as kernel

        return kernel(codes_RC, scale_R, dtype)
    return codes_RC.float().mul_(scale_R[:, None]).to(dtype)


def embedding(tokens: Tensor, weight_VD: Tensor, dtype: torch.dtype) -> Tensor:
    """tokens of any shape, int64 -> (*shape, D) in `dtype`. The gradient of the table is added up in its own dtype."""
    if _fused(weight_VD, dtype):
        x = _Embedding.apply(weight_VD, tokens, dtype)
        assert isinstance(x, Tensor)
        return x
    return F.embedding(tokens, weight_VD).to(dtype)


def _fused(weight: Tensor, dtype: torch.dtype) -> bool:
    trains = torch.is_grad_enabled() and weight.requires_grad and not torch.compiler.is_compiling()
    return trains and weight.is_cuda and weight.dtype == torch.float32 and dtype.itemsize == 2


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
