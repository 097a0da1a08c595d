"""Log-probabilities of chosen tokens under a linear head, without the logits of a whole batch, and differentiable.

Cross-entropy (kernels/cross_entropy.py) can make its gradient in the forward pass, because the gradient of a sum is
known there. In DPO and GRPO the gradient of each token's log-probability is only known once all of them are, so the
backward pass makes the logits again, a chunk at a time, from the log-sum-exp that the forward pass kept.

Numbers: GEMMs in hidden's dtype, everything on logits in float32 (float64 for float64), the weight's gradient added up
in float32 over the chunks.
"""

from typing import Any

import torch
from torch import Tensor

from deskside.kernels.cross_entropy import CHUNK_TOKENS
from deskside.kernels.plain import at_least_float32


def token_logprobs(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    tokens_N: Tensor,
    *,
    temperature: float = 1.0,
    softcap: float | None = None,
    chunk_tokens: int = CHUNK_TOKENS,
) -> tuple[Tensor, Tensor]:
    """log softmax(cap(hidden weight^T) / temperature)[token] and the entropy of that distribution, each float32 (N,).

    Differentiable in hidden and weight through the log-probabilities; the entropy is for reports and has no gradient.
    tokens_N: int64, each from 0 to V - 1.
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
        for start in range(0, len(tokens_N), chunk_tokens):
            part = slice(start, start + chunk_tokens)
            logits = _capped(hidden_ND[part] @ weight.T, softcap, wide).div_(temperature)
            total_N[part] = logits.logsumexp(-1)
            logprobs_N[part] = logits.gather(1, tokens_N[part, None])[:, 0] - total_N[part]
            mean = (logits * torch.exp(logits - total_N[part, None])).sum(-1)
            entropy_N[part] = total_N[part] - mean
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
            capped = _capped(hidden_ND[part] @ weight.T, ctx.softcap, wide)
            # d log p[token] / d logits is onehot(token) - p
            d_logits = torch.exp(capped / ctx.temperature - total_N[part, None]).neg_()
            d_logits.scatter_add_(1, tokens_N[part, None], torch.ones_like(d_logits[:, :1]))
            d_logits *= d_logprobs_N[part, None]
            if ctx.softcap is not None:
                d_logits *= 1 - (capped / ctx.softcap).square_()
            d_logits = d_logits.to(hidden_ND.dtype)
            if d_hidden is not None:
                torch.mm(d_logits, weight, out=d_hidden[part])
            if d_weight is not None:
                d_weight += d_logits.T @ hidden_ND[part]
        return d_hidden, None if d_weight is None else d_weight.to(weight_VD.dtype), None, None, None, None


def _capped(logits: Tensor, softcap: float | None, wide: torch.dtype) -> Tensor:
    logits = logits.to(wide)
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def by_sequence(values_M: Tensor, mask_SL: Tensor) -> Tensor:
    """Values of sequences one after the other -> (S, L), zero where the mask is false. Differentiable.

    mask_SL: bool, in each row as many True at the front as the sequence has values; in all of them M. By gathering: the
    gradient of scattering under a mask asks the device how many there are, and the host would wait for it.
    """
    lengths_S = mask_SL.sum(1)
    first_S = lengths_S.cumsum(0) - lengths_S
    index_SL = first_S[:, None] + torch.arange(mask_SL.shape[1], device=mask_SL.device)
    index_SL = torch.where(mask_SL, index_SL, len(values_M))  # a zero after the last value
    padded = torch.cat((values_M, values_M.new_zeros(1)))
    return padded.index_select(0, index_SL.flatten()).view(mask_SL.shape)
