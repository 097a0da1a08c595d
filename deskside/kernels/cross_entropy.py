"""Cross-entropy of a linear head without the logits of a whole batch.

The logits are the largest tensor of a small model's step: 65,536 tokens x 32,768 entries in float32 are 8 GiB. So the
forward goes through the tokens in chunks. For each chunk it computes the logits, the loss and the gradient d_logits,
writes the chunk's rows of d_hidden, adds to d_weight, and frees the logits. The backward only multiplies d_hidden and
d_weight by the incoming gradient. (Wijmans et al. 2024, arXiv 2411.09009; Hsu et al. 2024, arXiv 2410.10989.)

Precision: the three GEMMs take hidden's dtype, to which d_logits is rounded; softmax and loss are in float32. d_weight
is accumulated in float32 over the chunks. float64 inputs stay float64 throughout.
"""

import sys
from typing import Any, NamedTuple

import torch
from torch import Tensor

from deskside.kernels.functional import IGNORED, at_least_float32, multiply_by_scalar

CHUNK_TOKENS = 8192
ReplacementRows = tuple[Tensor, Tensor]  # ids (n,) and values (n, D) of rows that replace those in the weight


class FutureTargets(NamedTuple):
    """Tokens after the next one that the same logits predict too: K per token, -100 where there is none.

    The loss of token n gets the additional terms weights_K[k] * -log softmax(logits_n)[targets_NK[n, k]]. They need no
    second softmax: with W the sum of all weights, one for the next token included, the gradient of the logits is
    W * softmax(logits) - (the weights at the targets). targets_NK: int64; weights_K: float32.
    """

    targets_NK: Tensor
    weights_K: Tensor


class LossOptions(NamedTuple):
    """Options of the cross entropy of logits.

    softcap: logits x become softcap * tanh(x / softcap); None leaves them. z_loss: the factor of the additional term
    logsumexp^2 (Chowdhery et al. 2022, arXiv 2204.02311). chunk_tokens: tokens whose logits exist at a time.
    """

    softcap: float | None = None
    z_loss: float = 0.0
    chunk_tokens: int = CHUNK_TOKENS


DEFAULTS = LossOptions()


def linear_cross_entropy(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    targets_N: Tensor,
    options: LossOptions = DEFAULTS,
    rows: ReplacementRows | None = None,
) -> Tensor:
    """Sum -log softmax(cap(hidden weight^T))[target] + z_loss * logsumexp^2 over tokens, as a float32 scalar.

    Tokens whose target is -100 are ignored. Differentiable in hidden, weight and values. options: the cap, z_loss and
    the chunks. rows: (ids (n,), values (n, D)); `values` replace the rows `ids` of the weight, which are then unused.
    This trains some rows of a frozen weight without a gradient of the whole weight.
    """
    tensors = (hidden_ND, weight_VD, None if rows is None else rows[1])
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors):
        return multi_token_cross_entropy(hidden_ND, weight_VD, targets_N, None, options, rows)[0]
    return token_losses(hidden_ND, weight_VD, targets_N, options, rows).sum()


def multi_token_cross_entropy(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    targets_N: Tensor,
    future: FutureTargets | None,
    options: LossOptions = DEFAULTS,
    rows: ReplacementRows | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the sum of all terms, next token and `future`, and the sum of the next token's only, without gradient.

    The second is that of `linear_cross_entropy`, whose arguments these are. Both are float32 scalars.
    """
    ids, values = rows or (None, None)
    total, next_token = _LinearCrossEntropy.apply(
        hidden_ND, weight_VD, targets_N, ids, values, options, future
    )
    return total, next_token


@torch.no_grad()
def token_losses(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    targets_N: Tensor,
    options: LossOptions = DEFAULTS,
    rows: ReplacementRows | None = None,
) -> Tensor:
    """Return the loss of each token, (N,) float32, 0 where ignored. Not differentiable; for evaluation."""
    weight = weight_VD.to(hidden_ND.dtype)
    ids, values = (None, None) if rows is None else (rows[0], rows[1].to(hidden_ND.dtype))
    chunk_loss, chunk = loss_kernels(hidden_ND).chunk_loss, options.chunk_tokens
    losses = [
        chunk_loss(_logits(hidden, weight, ids, values), targets, options)
        for hidden, targets in zip(hidden_ND.split(chunk), targets_N.split(chunk), strict=True)
    ]
    return torch.cat(losses)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        targets_N: Tensor,
        ids: Tensor | None,
        values: Tensor | None,
        options: LossOptions,
        future: FutureTargets | None,
    ) -> tuple[Tensor, Tensor]:
        accumulate_dtype = at_least_float32(hidden_ND)
        weight = weight_VD.to(hidden_ND.dtype)
        need_hidden, need_weight = ctx.needs_input_grad[:2]
        rows = None if values is None else values.to(hidden_ND.dtype)
        # d_hidden is computed with the unreplaced weight first; d_replaced_logits @ row_change then corrects it.
        row_change = None if rows is None else rows - weight[ids]
        d_rows = None if values is None else torch.zeros_like(values, dtype=accumulate_dtype)
        d_hidden = torch.empty_like(hidden_ND) if need_hidden else None
        d_weight = torch.zeros_like(weight_VD, dtype=accumulate_dtype) if need_weight else None
        losses: list[Tensor] = []
        chunk_loss_and_grad = loss_kernels(hidden_ND).chunk_loss_and_grad
        for start in range(0, hidden_ND.shape[0], options.chunk_tokens):
            chunk = slice(start, start + options.chunk_tokens)
            hidden = hidden_ND[chunk]
            chunk_losses, d_logits = chunk_loss_and_grad(
                _logits(hidden, weight, ids, rows), targets_N[chunk], options, part_of(future, chunk)
            )
            losses.append(chunk_losses)
            if d_hidden is not None:
                torch.mm(d_logits, weight, out=d_hidden[chunk])
            if ids is not None and d_rows is not None and row_change is not None:
                d_replaced_logits = d_logits.index_select(1, ids)
                add_matmul(d_rows, d_replaced_logits.T, hidden)
                if d_hidden is not None:
                    d_hidden[chunk] += d_replaced_logits @ row_change
                if d_weight is not None:
                    d_logits.index_fill_(1, ids, 0)
            if d_weight is not None:
                add_matmul(d_weight, d_logits.T, hidden)
        ctx.save_for_backward(d_hidden, d_weight, d_rows)
        ctx.weight_dtype = weight_VD.dtype
        ctx.rows_dtype = None if values is None else values.dtype
        total, next_token = summed(losses)
        ctx.mark_non_differentiable(next_token)
        return total, next_token

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor | None, ...]:
        d_hidden, d_weight, d_rows = ctx.saved_tensors
        grad, _ = grad_outputs
        if d_rows is not None:
            d_rows = multiply_by_scalar(d_rows, grad).to(ctx.rows_dtype)
        if d_hidden is not None:
            d_hidden = multiply_by_scalar(d_hidden, grad)
        if d_weight is not None:
            d_weight = multiply_by_scalar(d_weight, grad).to(ctx.weight_dtype)
        return d_hidden, d_weight, None, None, d_rows, None, None


def part_of(future: FutureTargets | None, chunk: slice) -> FutureTargets | None:
    """Return the future targets of a chunk of tokens."""
    return None if future is None else FutureTargets(future.targets_NK[chunk], future.weights_K)


def summed(losses: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Return the sum of all chunks' losses, and the next token's part of it. losses: of `chunk_loss_and_grad`."""
    if losses[0].ndim == 1:
        total = torch.cat(losses).sum()
        return total, total.clone()
    next_token, later = torch.cat(losses).sum(0).unbind()
    return next_token + later, next_token.clone()


def _logits(hidden: Tensor, weight: Tensor, ids: Tensor | None, rows: Tensor | None) -> Tensor:
    """Return the logits (n, V), with `rows` in place of the rows `ids` of the weight. All in hidden's dtype."""
    logits = hidden @ weight.T
    return logits if ids is None or rows is None else logits.index_copy_(1, ids, hidden @ rows.T)


def loss_kernels(hidden: Tensor) -> Any:
    """Return the module with the `chunk_loss` functions: Triton on a GPU, but torch for float64 or torch.compile."""
    if not hidden.is_cuda or hidden.dtype == torch.float64 or torch.compiler.is_compiling():
        return sys.modules[__name__]
    from deskside.kernels import cross_entropy_triton

    return cross_entropy_triton


def add_matmul(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add left @ right to `total`, whose dtype may be wider. On CUDA the GEMM itself writes float32."""
    if left.dtype == total.dtype:
        total.addmm_(left, right)
    elif left.is_cuda:
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:
        total.addmm_(left.to(total.dtype), right.to(total.dtype))


def chunk_loss_and_fp8_grad(
    logits: Tensor,
    targets: Tensor,
    options: LossOptions,
    scale: float,
    future: FutureTargets | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the losses of `chunk_loss_and_grad`, and `scale` times the gradient of their sum, (n, V) in E5M2."""
    losses, grad = chunk_loss_and_grad(logits.float(), targets, options, future)
    limit = torch.finfo(torch.float8_e5m2).max
    return losses, (grad * scale).clamp(-limit, limit).to(torch.float8_e5m2)


def chunk_loss(logits: Tensor, targets: Tensor, options: LossOptions) -> Tensor:
    """Return the losses (n,) of one chunk."""
    logits = _cap(logits.to(at_least_float32(logits)), options.softcap)
    valid = targets != IGNORED
    lse = torch.logsumexp(logits, dim=-1)
    target_logit = logits.gather(1, torch.where(valid, targets, 0)[:, None]).squeeze(1)
    return torch.where(valid, lse - target_logit + options.z_loss * lse * lse, 0.0)


def chunk_loss_and_grad(
    logits: Tensor, targets: Tensor, options: LossOptions, future: FutureTargets | None = None
) -> tuple[Tensor, Tensor]:
    """Return the losses (n,) of one chunk, and the gradient of their sum with respect to the logits (n, V).

    With `future`, the losses are (n, 2): the next token's, and the weighted sum of the later ones. The gradient has the
    logits' dtype. May overwrite the logits, because on a CPU allocating memory for each pass would cost more than the
    arithmetic.
    """
    softcap, z_loss = options.softcap, options.z_loss
    capped = _cap(logits.to(at_least_float32(logits)), softcap)
    slope = None if softcap is None else 1 - (capped / softcap) ** 2
    valid = targets != IGNORED
    target_nK, weight_nK = targets[:, None], valid[:, None].to(capped.dtype)
    if future is not None:
        target_nK = torch.cat((target_nK, future.targets_NK), 1)
        later = (future.targets_NK != IGNORED) * future.weights_K.to(capped.dtype)
        weight_nK = torch.cat((weight_nK, later), 1)
    target_nK = torch.where(target_nK != IGNORED, target_nK, 0)
    target_logit = capped.gather(1, target_nK)
    max_logit = capped.amax(dim=-1, keepdim=True)
    exponentials = capped.sub_(max_logit).exp_()
    sum_exp = exponentials.sum(dim=-1, keepdim=True)
    lse = max_logit + sum_exp.log()
    next_losses = (lse - target_logit[:, :1] + z_loss * lse * lse).squeeze(1)
    losses = torch.where(valid, next_losses, 0.0)
    factor = torch.where(valid[:, None], 1 + 2 * z_loss * lse, 0.0)
    if future is not None:
        losses = torch.stack((losses, (weight_nK * (lse - target_logit))[:, 1:].sum(1)), 1)
        factor = factor + weight_nK[:, 1:].sum(1, keepdim=True)
    grad = exponentials.mul_(factor / sum_exp)
    if torch.compiler.is_compiling():  # a comparison fuses with the other passes, a scatter does not
        entries = torch.arange(logits.shape[1], device=logits.device)
        for target, weight in zip(target_nK.split(1, 1), weight_nK.split(1, 1), strict=True):
            grad = torch.where(entries == target, grad - weight, grad)
    else:
        grad.scatter_add_(1, target_nK, -weight_nK)
    if slope is not None:
        grad = grad * slope
    return losses, grad.to(logits.dtype)


def _cap(logits: Tensor, softcap: float | None) -> Tensor:
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)
