"""Rows of a table of embeddings, handed out in the dtype of the activations; the table itself is in float32.

torch takes the rows in float32 and casts them in a second pass, and does the reverse for the gradient. On a card both
are one pass here, where the table trains and the activations have 16 bits.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


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
        from deskside.kernels import embedding_triton

        tokens_N = tokens.flatten()
        ctx.save_for_backward(tokens_N)
        ctx.entries = len(weight_VD)
        return embedding_triton.rows(tokens_N, weight_VD, dtype).view(*tokens.shape, -1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        from deskside.kernels import embedding_triton

        (tokens_N,) = ctx.saved_tensors
        grad_ND = grads[0].reshape(len(tokens_N), -1).contiguous()
        return embedding_triton.gradient(grad_ND, tokens_N, ctx.entries), None, None
