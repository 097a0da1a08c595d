"""Log-probabilities of given tokens under a linear head, differentiable, without the logits of a whole batch.

Cross-entropy (kernels/cross_entropy.py) can compute its gradient in the forward pass, because the gradient of a sum
is known there. In DPO and GRPO the gradient of each token's log-probability depends on all of them, so the backward
pass recomputes the logits chunk by chunk from the saved log-sum-exp.

Precision: GEMMs in hidden's dtype, everything on logits in float32 (float64 for float64), the weight's gradient
accumulated in float32 over the chunks. Memory: 6 bytes per logit of a chunk, updated in place.
"""

from typing import Any

import torch
from torch import Tensor

from deskside.kernels.cross_entropy import CHUNK_TOKENS, add_matmul
from deskside.kernels.functional import at_least_float32


def token_logprobs(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    tokens_N: Tensor,
    *,
    temperature: float = 1.0,
    softcap: float | None = None,
    chunk_tokens: int = CHUNK_TOKENS,
) -> tuple[Tensor, Tensor]:
    """Return log softmax(cap(hidden weight^T) / temperature)[token] and the entropy of that distribution, each
    float32 (N,).

    Differentiable in hidden and weight through the log-probabilities; the entropy is for reports and has no
    gradient. tokens_N: int64, each from 0 to V - 1.
    """
    found = _TokenLogprobs.apply(hidden_ND, weight_VD, tokens_N, temperature, softcap, chunk_tokens)
    assert isinstance(found, tuple)
    return found


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        tokens_N: Tensor,
        temperature: float,
        softcap: float | None,
        chunk_tokens: int,
    ) -> tuple[Tensor, Tensor]:
        wide = at_least_float32(hidden_ND)
        weight = weight_VD.to(hidden_ND.dtype)
        logprobs_N = torch.empty(len(tokens_N), dtype=wide, device=hidden_ND.device)
        entropy_N, total_N = torch.empty_like(logprobs_N), torch.empty_like(logprobs_N)
        # Half a chunk has two wide tensors here; a whole chunk has one and a half in the backward pass.
        size = -(-chunk_tokens // 2)
        for start in range(0, len(tokens_N), size):
            part = slice(start, start + size)
            logits = _logits(hidden_ND[part], weight, softcap, wide).div_(temperature)
            total_N[part], logprobs_N[part], entropy_N[part] = _judged(logits, tokens_N[part])
            del logits  # freed before the next ones are allocated
        ctx.save_for_backward(hidden_ND, weight_VD, tokens_N, total_N)
        ctx.temperature, ctx.softcap, ctx.chunk_tokens = temperature, softcap, chunk_tokens
        ctx.mark_non_differentiable(entropy_N)
        return logprobs_N, entropy_N

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        hidden_ND, weight_VD, tokens_N, total_N = ctx.saved_tensors
        wide = total_N.dtype
        weight = weight_VD.to(hidden_ND.dtype)
        d_logprobs_N = grad_outputs[0] / ctx.temperature
        need_hidden, need_weight = ctx.needs_input_grad[:2]
        d_hidden = torch.empty_like(hidden_ND) if need_hidden else None
        d_weight = torch.zeros_like(weight_VD, dtype=wide) if need_weight else None
        for start in range(0, len(tokens_N), ctx.chunk_tokens):
            part = slice(start, start + ctx.chunk_tokens)
            d_logits = _d_logits(
                _logits(hidden_ND[part], weight, ctx.softcap, wide),
                tokens_N[part],
                total_N[part],
                d_logprobs_N[part],
                ctx.temperature,
                ctx.softcap,
            ).to(hidden_ND.dtype)
            if d_hidden is not None:
                torch.mm(d_logits, weight, out=d_hidden[part])
            if d_weight is not None:
                add_matmul(d_weight, d_logits.T, hidden_ND[part])
            del d_logits
        return d_hidden, None if d_weight is None else d_weight.to(weight_VD.dtype), None, None, None, None


def _logits(hidden_nD: Tensor, weight_VD: Tensor, softcap: float | None, wide: torch.dtype) -> Tensor:
    """Return the capped logits (n, V) in dtype `wide`."""
    logits = (hidden_nD @ weight_VD.T).to(wide)
    return logits if softcap is None else logits.div_(softcap).tanh_().mul_(softcap)


def _judged(logits_nV: Tensor, tokens_n: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return (log-sum-exp, log-probability of the token, entropy), (n,) each. Overwrites the logits."""
    highest_n = logits_nV.amax(-1)
    logits_nV -= highest_n[:, None]
    picked_n = logits_nV.gather(1, tokens_n[:, None])[:, 0]
    exponentials_nV = logits_nV.exp()
    sum_n = exponentials_nV.sum(-1)
    log_sum_n = sum_n.log()
    entropy_n = log_sum_n - exponentials_nV.mul_(logits_nV).sum(-1) / sum_n
    return highest_n + log_sum_n, picked_n - log_sum_n, entropy_n


def _d_logits(
    logits_nV: Tensor,
    tokens_n: Tensor,
    total_n: Tensor,
    d_logprobs_n: Tensor,
    temperature: float,
    softcap: float | None,
) -> Tensor:
    """Return the gradient of the raw logits, without the temperature's factor. Overwrites the capped logits."""
    slope_nV = None if softcap is None else (logits_nV / softcap).square_().neg_().add_(1)
    # d log p[token] / d logits is onehot(token) - p
    logits_nV.div_(temperature).sub_(total_n[:, None]).exp_().neg_()
    logits_nV.scatter_add_(1, tokens_n[:, None], torch.ones_like(logits_nV[:, :1]))
    logits_nV *= d_logprobs_n[:, None]
    return logits_nV if slope_nV is None else logits_nV.mul_(slope_nV)


def by_sequence(values_M: Tensor, mask_SL: Tensor) -> Tensor:
    """Arrange concatenated sequences as (S, L), zero where the mask is false. Differentiable.

    mask_SL: bool, True for the leading values of each row, M in all. It gathers, because the gradient of scattering
    under a mask needs the number of True values, for which the host would wait.
    """
    lengths_S = mask_SL.sum(1)
    first_S = lengths_S.cumsum(0) - lengths_S
    index_SL = first_S[:, None] + torch.arange(mask_SL.shape[1], device=mask_SL.device)
    index_SL = torch.where(mask_SL, index_SL, len(values_M))  # index of a zero after the last value
    padded = torch.cat((values_M, values_M.new_zeros(1)))
    return padded.index_select(0, index_SL.flatten()).view(mask_SL.shape)
