"""Triton kernel for the element-wise part of the chunked cross-entropy: the loss and the gradient of the logits.

Each program handles one row of logits and reads it twice: once for the maximum and the sum of exponentials (online
softmax), and once for the gradient. The second read mostly hits the L2 cache, because it marks its data evict_first, so
that finished rows are evicted before rows that are still needed.

The kernel is limited by instructions as much as by memory bandwidth, so it computes little per entry: exponentials have
base 2, as the GPU computes them; factors of a probability are added to its exponent; and the -1 of the target's entry
is applied once at the end, so that no column index is compared with the target.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from deskside.kernels.functional import IGNORED

BLOCK, FP8_BLOCK = 16384, 8192  # entries of a row at a time; chosen on an H200 (docs/log.md)


@triton.jit
def _capped(x, softcap, CAPPED: tl.constexpr):  # type: ignore[no-untyped-def]
    """softcap * tanh(x / softcap). One return, because Triton also compiles the code after a return."""
    capped = x
    if CAPPED:
        capped = softcap * (2 * tl.sigmoid(2 * x / softcap) - 1)
    return capped


@triton.jit
def loss_and_grad(  # type: ignore[no-untyped-def]
    LOGITS, TARGETS, LOSSES, GRADS, V, row_stride, z_loss, softcap, scale,
    BLOCK_V: tl.constexpr, WHOLE: tl.constexpr, CAPPED: tl.constexpr, IGNORED: tl.constexpr, GRAD: tl.constexpr,
    SIGNED: tl.constexpr,
):  # fmt: skip
    """LOSSES (n,), float32. With GRAD, GRADS (n, V) becomes scale times the gradient of their sum; it may be LOGITS
    (n, V) itself. WHOLE: BLOCK_V divides V, so nothing is masked. SIGNED: there is a z-loss, under which the factor of
    the probabilities, 1 + 2 z_loss lse, is negative where lse is far below zero."""
    LOG2E: tl.constexpr = 1.4426950408889634
    row = tl.program_id(0).to(tl.int64)
    logits = LOGITS + row * row_stride
    target = tl.load(TARGETS + row)
    valid = target != IGNORED
    at = tl.where(valid, target, 0)
    picked = _capped(tl.load(logits + at).to(tl.float32), softcap, CAPPED)
    highest = -float("inf")
    total = 0.0
    start = 0
    while start < V:
        columns = start + tl.arange(0, BLOCK_V)
        if WHOLE:
            raw = tl.load(logits + columns)
        else:
            raw = tl.load(logits + columns, mask=columns < V, other=-float("inf"))
        x = _capped(raw.to(tl.float32), softcap, CAPPED)
        if CAPPED and not WHOLE:
            x = tl.where(columns < V, x, -float("inf"))
        higher = tl.maximum(highest, tl.max(x, axis=0))
        shifted = x * LOG2E - higher * LOG2E
        total = total * tl.exp2((highest - higher) * LOG2E) + tl.sum(tl.exp2(shifted), axis=0)
        highest = higher
        start += BLOCK_V
    lse = highest + tl.log(total)
    tl.store(LOSSES + row, tl.where(valid, lse - picked + z_loss * lse * lse, 0.0))
    if GRAD:
        grads = GRADS + row * row_stride
        factor = scale * (1 + 2 * z_loss * lse)
        # factor * exp(x - lse) as one power of two; an ignored row's gradient is 2^-inf = 0.
        sign = 1.0
        if SIGNED:
            sign = tl.where(factor < 0, -1.0, 1.0)
            factor = tl.abs(factor)
        offset = tl.where(valid, tl.log2(factor) - lse * LOG2E, -float("inf"))
        start = 0
        while start < V:
            columns = start + tl.arange(0, BLOCK_V)
            if WHOLE:
                raw = tl.load(logits + columns, eviction_policy="evict_first")
            else:
                raw = tl.load(logits + columns, mask=columns < V, other=0.0, eviction_policy="evict_first")
            x = _capped(raw.to(tl.float32), softcap, CAPPED)
            grad = tl.exp2(x * LOG2E + offset)
            if SIGNED:
                grad *= sign
            if CAPPED:
                grad *= 1 - (x / softcap) * (x / softcap)
            if WHOLE:
                tl.store(grads + columns, grad.to(GRADS.dtype.element_ty))
            else:
                tl.store(grads + columns, grad.to(GRADS.dtype.element_ty), mask=columns < V)
            start += BLOCK_V
        corrected = sign * tl.exp2(picked * LOG2E + offset) - scale
        if CAPPED:
            corrected *= 1 - (picked / softcap) * (picked / softcap)
        tl.debug_barrier()  # the target's entry has been written by some thread of this program
        tl.store(grads + at, corrected.to(GRADS.dtype.element_ty), mask=valid)


def chunk_loss_and_grad(
    logits: Tensor, targets: Tensor, softcap: float | None, z_loss: float
) -> tuple[Tensor, Tensor]:
    """(n,) float32 losses of a chunk, and its logits (n, V), overwritten by the gradient of the losses' sum."""
    return _launch(logits, targets, softcap, z_loss, logits, 1.0), logits


def chunk_loss_and_fp8_grad(
    logits: Tensor, targets: Tensor, softcap: float | None, z_loss: float, scale: float
) -> tuple[Tensor, Tensor]:
    """(n,) float32 losses of a chunk, and scale times the gradient of their sum, (n, V) in E5M2."""
    grads = torch.empty(logits.shape, dtype=torch.float8_e5m2, device=logits.device)
    return _launch(logits, targets, softcap, z_loss, grads, scale), grads


def chunk_loss(logits: Tensor, targets: Tensor, softcap: float | None, z_loss: float) -> Tensor:
    """(n,) float32 losses of a chunk."""
    return _launch(logits, targets, softcap, z_loss, None, 1.0)


def _launch(
    logits: Tensor,
    targets: Tensor,
    softcap: float | None,
    z_loss: float,
    grads: Tensor | None,
    scale: float,
) -> Tensor:
    n, V = logits.shape
    losses = torch.empty(n, dtype=torch.float32, device=logits.device)
    narrow = grads is not None and grads.element_size() == 1
    block = min(FP8_BLOCK if narrow else BLOCK, triton.next_power_of_2(V))
    loss_and_grad[(n,)](
        logits, targets, losses, logits if grads is None else grads, V, logits.stride(0), z_loss, softcap or 1.0,
        scale, block, V % block == 0, softcap is not None, IGNORED, grads is not None,
        z_loss > 0,
        num_warps=max(1, block // 1024),
    )  # fmt: skip
    return losses
