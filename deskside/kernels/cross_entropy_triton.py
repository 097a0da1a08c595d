"""Triton kernel for the element-wise part of the chunked cross-entropy: the loss and the gradient of the logits.

Each program handles one row of logits and reads it twice: once for the maximum and the sum of exponentials (online
softmax), and once for the gradient. The second read marks its data evict_first, so that finished rows leave the L2
cache before rows that are still needed; it therefore mostly hits the cache.

The kernel is limited by instructions as much as by memory bandwidth, so it computes little per entry: exponentials have
base 2, as in the hardware; factors of a probability become terms of its exponent; and the -1 of the target's entry is
applied at the end, so that no column index is compared with the target.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from deskside.kernels.cross_entropy import FutureTargets, LossOptions
from deskside.kernels.functional import IGNORED

BLOCK, FP8_BLOCK = 16384, 8192  # entries of a row per iteration; chosen on an H200 (docs/log.md)


@triton.jit
def capped(x, softcap, CAPPED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return softcap * tanh(x / softcap). A single return, because Triton also compiles the code after a return."""
    y = x
    if CAPPED:
        y = softcap * (2 * tl.sigmoid(2 * x / softcap) - 1)
    return y


@triton.jit
def loss_and_grad(  # type: ignore[no-untyped-def]
    LOGITS, TARGETS, LOSSES, GRADS, FUTURE, WEIGHTS, V, row_stride, z_loss, softcap, scale,
    BLOCK_V: tl.constexpr, EVEN: tl.constexpr, CAPPED: tl.constexpr, IGNORED: tl.constexpr, GRAD: tl.constexpr,
    SIGNED: tl.constexpr, K: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Write LOSSES (n,) float32 and, with GRAD, `scale` times the gradient of their sum into GRADS (n, V).

    GRADS may be LOGITS itself. EVEN: BLOCK_V divides V, so nothing is masked. SIGNED: with a z-loss, the factor
    1 + 2 z_loss lse of the probabilities is negative where lse is far below zero, so its sign is kept separately.
    K: number of targets in each row of FUTURE (n, K), with the weights WEIGHTS (K,); LOSSES is then (n, 2). BLOCK_K: a
    power of two above K; the vectors of this length hold the next token in element 0 and the future targets behind it.
    """
    LOG2E: tl.constexpr = 1.4426950408889634
    row = tl.program_id(0).to(tl.int64)
    logits = LOGITS + row * row_stride
    target = tl.load(TARGETS + row)
    valid = target != IGNORED
    target_column = tl.where(valid, target, 0)
    target_logit = capped(tl.load(logits + target_column).to(tl.float32), softcap, CAPPED)
    if K > 0:
        places = tl.arange(0, BLOCK_K)
        later = (places > 0) & (places <= K)
        targets_K = tl.load(FUTURE + row * K + places - 1, mask=later, other=IGNORED)
        targets_K = tl.where(places == 0, target, targets_K)
        weights_K = tl.where(places == 0, 1.0, tl.load(WEIGHTS + places - 1, mask=later, other=0.0))
        valid_K = targets_K != IGNORED
        weights_K = tl.where(valid_K, weights_K, 0.0)
        logits_K = capped(
            tl.load(logits + targets_K, mask=valid_K, other=0.0).to(tl.float32), softcap, CAPPED
        )
    max_logit = -float("inf")
    sum_exp = 0.0
    start = 0
    while start < V:
        columns = start + tl.arange(0, BLOCK_V)
        if EVEN:
            raw = tl.load(logits + columns)
        else:
            raw = tl.load(logits + columns, mask=columns < V, other=-float("inf"))
        x = capped(raw.to(tl.float32), softcap, CAPPED)
        if CAPPED and not EVEN:
            x = tl.where(columns < V, x, -float("inf"))
        new_max = tl.maximum(max_logit, tl.max(x, axis=0))
        exponent = x * LOG2E - new_max * LOG2E
        sum_exp = sum_exp * tl.exp2((max_logit - new_max) * LOG2E) + tl.sum(tl.exp2(exponent), axis=0)
        max_logit = new_max
        start += BLOCK_V
    lse = max_logit + tl.log(sum_exp)
    next_loss = tl.where(valid, lse - target_logit + z_loss * lse * lse, 0.0)
    if K > 0:
        tl.store(LOSSES + 2 * row, next_loss)
        tl.store(LOSSES + 2 * row + 1, tl.sum(tl.where(later, weights_K * (lse - logits_K), 0.0), axis=0))
    else:
        tl.store(LOSSES + row, next_loss)
    if GRAD:
        grads = GRADS + row * row_stride
        factor = scale * (1 + 2 * z_loss * lse)
        if K > 0:
            later_weight = tl.sum(tl.where(later, weights_K, 0.0), axis=0)
            factor = tl.where(valid, factor, 0.0) + scale * later_weight
        # factor * exp(x - lse) = 2^(x log2(e) + offset). The gradient of an ignored row is 2^-inf = 0.
        sign = 1.0
        if SIGNED:
            sign = tl.where(factor < 0, -1.0, 1.0)
            factor = tl.abs(factor)
        if K > 0:
            offset = tl.log2(factor) - lse * LOG2E
        else:
            offset = tl.where(valid, tl.log2(factor) - lse * LOG2E, -float("inf"))
        start = 0
        while start < V:
            columns = start + tl.arange(0, BLOCK_V)
            if EVEN:
                raw = tl.load(logits + columns, eviction_policy="evict_first")
            else:
                raw = tl.load(logits + columns, mask=columns < V, other=0.0, eviction_policy="evict_first")
            x = capped(raw.to(tl.float32), softcap, CAPPED)
            grad = tl.exp2(x * LOG2E + offset)
            if SIGNED:
                grad *= sign
            if CAPPED:
                grad *= 1 - (x / softcap) * (x / softcap)
            if EVEN:
                tl.store(grads + columns, grad.to(GRADS.dtype.element_ty))
            else:
                tl.store(grads + columns, grad.to(GRADS.dtype.element_ty), mask=columns < V)
            start += BLOCK_V
        if K > 0:
            # A token that is several of the targets has one entry, written several times with the same value.
            same_KK = targets_K[:, None] == targets_K[None, :]
            weight_at_target_K = tl.sum(tl.where(same_KK, weights_K[None, :], 0.0), axis=1)
            corrected_K = sign * tl.exp2(logits_K * LOG2E + offset) - scale * weight_at_target_K
            if CAPPED:
                corrected_K *= 1 - (logits_K / softcap) * (logits_K / softcap)
            tl.debug_barrier()  # as below
            tl.store(grads + targets_K, corrected_K.to(GRADS.dtype.element_ty), mask=valid_K)
        else:
            corrected = sign * tl.exp2(target_logit * LOG2E + offset) - scale
            if CAPPED:
                corrected *= 1 - (target_logit / softcap) * (target_logit / softcap)
            tl.debug_barrier()  # another thread may have written the target's entry, which is overwritten here
            tl.store(grads + target_column, corrected.to(GRADS.dtype.element_ty), mask=valid)


def chunk_loss_and_grad(
    logits: Tensor, targets: Tensor, options: LossOptions, future: FutureTargets | None = None
) -> tuple[Tensor, Tensor]:
    """See `cross_entropy.chunk_loss_and_grad`. The gradient is in the memory of the logits."""
    return _launch(logits, targets, options, logits, future=future), logits


def chunk_loss_and_fp8_grad(
    logits: Tensor,
    targets: Tensor,
    options: LossOptions,
    scale: float,
    future: FutureTargets | None = None,
) -> tuple[Tensor, Tensor]:
    """See `cross_entropy.chunk_loss_and_fp8_grad`."""
    grads = torch.empty(logits.shape, dtype=torch.float8_e5m2, device=logits.device)
    return _launch(logits, targets, options, grads, scale, future), grads


def chunk_loss(logits: Tensor, targets: Tensor, options: LossOptions) -> Tensor:
    """Return the losses (n,) float32 of a chunk."""
    return _launch(logits, targets, options, None)


def _launch(
    logits: Tensor,
    targets: Tensor,
    options: LossOptions,
    grads: Tensor | None,
    scale: float = 1.0,
    future: FutureTargets | None = None,
) -> Tensor:
    (n, V), softcap, z_loss = logits.shape, options.softcap, options.z_loss
    K = 0 if future is None else future.targets_NK.shape[1]
    losses = torch.empty((n, 2) if K else n, dtype=torch.float32, device=logits.device)
    later_targets, weights = (None, None) if future is None else future
    fp8 = grads is not None and grads.element_size() == 1
    block = min(FP8_BLOCK if fp8 else BLOCK, triton.next_power_of_2(V))
    loss_and_grad[(n,)](
        logits, targets, losses, logits if grads is None else grads, later_targets, weights,
        V, logits.stride(0), z_loss, softcap or 1.0,
        scale, block, V % block == 0, softcap is not None, IGNORED, grads is not None,
        z_loss > 0, K, triton.next_power_of_2(K + 1),
        num_warps=max(1, block // 1024),
    )  # fmt: skip
    return losses
