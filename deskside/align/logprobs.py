"""Log-probabilities of given tokens under a linear head, differentiable, without the logits of a whole batch.

Cross-entropy (kernels/cross_entropy.py) computes its gradient in the forward pass, because each token's loss has
weight 1 in the sum. In DPO and GRPO the weight of each token is known only after all log-probabilities are. So the
backward pass recomputes the logits chunk by chunk, and the probabilities from the saved log-sum-exp.

Precision: GEMMs in hidden's dtype, everything on logits in float32 (float64 for float64), the weight's gradient
accumulated in float32 over the chunks. Memory: in BF16 without a cap, 6 bytes per logit of a chunk.
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
    """Return the log-probability of each given token, and the entropy of its distribution, each (N,).

    The distribution is softmax(cap(hidden weight^T) / temperature). The log-probabilities are differentiable in hidden
    and weight; the entropy is for reports and has no gradient. tokens_N: int64, each from 0 to V - 1.
    """
    logprobs_and_entropy = _TokenLogprobs.apply(
        hidden_ND, weight_VD, tokens_N, temperature, softcap, chunk_tokens
    )
    assert isinstance(logprobs_and_entropy, tuple)
    return logprobs_and_entropy


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
        entropy_N, log_sum_exp_N = torch.empty_like(logprobs_N), torch.empty_like(logprobs_N)
        # Half chunks, because this pass has two wide tensors at once, so its peak stays below the backward pass's.
        size = -(-chunk_tokens // 2)
        for start in range(0, len(tokens_N), size):
            part = slice(start, start + size)
            logits = _logits(hidden_ND[part], weight, softcap, wide).div_(temperature)
            log_sum_exp_N[part], logprobs_N[part], entropy_N[part] = _logprob_statistics(
                logits, tokens_N[part]
            )
            del logits  # freed before the next ones are allocated
        ctx.save_for_backward(hidden_ND, weight_VD, tokens_N, log_sum_exp_N)
        ctx.temperature, ctx.softcap, ctx.chunk_tokens = temperature, softcap, chunk_tokens
        ctx.mark_non_differentiable(entropy_N)
        return logprobs_N, entropy_N

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        hidden_ND, weight_VD, tokens_N, log_sum_exp_N = ctx.saved_tensors
        wide = log_sum_exp_N.dtype
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
                log_sum_exp_N[part],
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


def _logprob_statistics(logits_nV: Tensor, tokens_n: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return (log-sum-exp, log-probability of the token, entropy), (n,) each. Overwrites the logits."""
    max_n = logits_nV.amax(-1)
    logits_nV -= max_n[:, None]
    token_logit_n = logits_nV.gather(1, tokens_n[:, None])[:, 0]
    exponentials_nV = logits_nV.exp()
    sum_n = exponentials_nV.sum(-1)
    log_sum_n = sum_n.log()
    entropy_n = log_sum_n - exponentials_nV.mul_(logits_nV).sum(-1) / sum_n
    return max_n + log_sum_n, token_logit_n - log_sum_n, entropy_n


def _d_logits(
    logits_nV: Tensor,
    tokens_n: Tensor,
    log_sum_exp_n: Tensor,
    d_logprobs_n: Tensor,
    temperature: float,
    softcap: float | None,
) -> Tensor:
    """Return the gradient of the logits before the cap. Overwrites the capped logits.

    d_logprobs_n: gradient of the log-probabilities, already divided by the temperature.
    """
    d_cap_nV = None if softcap is None else (logits_nV / softcap).square_().neg_().add_(1)
    # d log p[token] / d logits is onehot(token) - p
    logits_nV.div_(temperature).sub_(log_sum_exp_n[:, None]).exp_().neg_()
    logits_nV.scatter_add_(1, tokens_n[:, None], torch.ones_like(logits_nV[:, :1]))
    logits_nV *= d_logprobs_n[:, None]
    return logits_nV if d_cap_nV is None else logits_nV.mul_(d_cap_nV)


def pad_sequences(values_M: Tensor, mask_SL: Tensor) -> Tensor:
    """Pad concatenated sequences to (S, L) with zeros. Differentiable.

    mask_SL: bool, True for the leading values of each row, M in all. The values are gathered, not scattered under the
    mask, because the gradient of scattering needs the number of True values, so the host would wait for the device.
    """
    lengths_S = mask_SL.sum(1)
    first_S = lengths_S.cumsum(0) - lengths_S
    index_SL = first_S[:, None] + torch.arange(mask_SL.shape[1], device=mask_SL.device)
    index_SL = torch.where(mask_SL, index_SL, len(values_M))  # index of a zero after the last value
    padded = torch.cat((values_M, values_M.new_zeros(1)))
    return padded.index_select(0, index_SL.flatten()).view(mask_SL.shape)
