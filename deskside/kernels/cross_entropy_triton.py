"""The element-wise part of the chunked cross-entropy on a card: loss, and the gradient of the logits in their place.

One program takes one row of logits. A row of up to 65,536 entries is held in registers: it is read once and its
gradient written once, the fewest bytes there can be. A longer row is read twice, in pieces, with a running maximum.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

LONGEST_HELD = 65536


@triton.jit
def loss_and_grad(  # type: ignore[no-untyped-def]
    LOGITS, TARGETS, LOSSES, GRADS, V, row_stride, z_loss, softcap, scale,
    BLOCK: tl.constexpr, HELD: tl.constexpr, CAPPED: tl.constexpr, IGNORED: tl.constexpr, GRAD: tl.constexpr,
):  # fmt: skip
    """LOSSES (n,), float32. With GRAD, GRADS (n, V) becomes scale times the gradient of their sum; it may be
    LOGITS (n, V) itself. HELD: BLOCK holds the row."""
    row = tl.program_id(0).to(tl.int64)
    logits = LOGITS + row * row_stride
    grads = GRADS + row * row_stride
    target = tl.load(TARGETS + row)
    valid = target != IGNORED
    if HELD:
        columns = tl.arange(0, BLOCK)
        raw = tl.load(logits + columns, mask=columns < V, other=-float("inf")).to(tl.float32)
        x = _cap(raw, softcap, CAPPED)
        x = tl.where(columns < V, x, -float("inf"))
        highest = tl.max(x, axis=0)
        exponentials = tl.exp(x - highest)
        total = tl.sum(exponentials, axis=0)
        lse = highest + tl.log(total)
        picked = tl.sum(tl.where(columns == target, x, 0.0), axis=0)
        if GRAD:
            factor = tl.where(valid, (1 + 2 * z_loss * lse) / total, 0.0)
            grad = exponentials * factor - tl.where((columns == target) & valid, 1.0, 0.0)
            if CAPPED:
                grad *= 1 - (x / softcap) * (x / softcap)
            tl.store(grads + columns, (grad * scale).to(GRADS.dtype.element_ty), mask=columns < V)
    else:
        highest = -float("inf")
        total = 0.0
        picked = 0.0
        start = 0
        while start < V:
            columns = start + tl.arange(0, BLOCK)
            raw = tl.load(logits + columns, mask=columns < V, other=-float("inf")).to(tl.float32)
            x = tl.where(columns < V, _cap(raw, softcap, CAPPED), -float("inf"))
            higher = tl.maximum(highest, tl.max(x, axis=0))
            total = total * tl.exp(highest - higher) + tl.sum(tl.exp(x - higher), axis=0)
            picked += tl.sum(tl.where(columns == target, x, 0.0), axis=0)
            highest = higher
            start += BLOCK
        lse = highest + tl.log(total)
        if GRAD:
            factor = tl.where(valid, (1 + 2 * z_loss * lse) / total, 0.0)
            start = 0
            while start < V:
                columns = start + tl.arange(0, BLOCK)
                raw = tl.load(logits + columns, mask=columns < V, other=0.0).to(tl.float32)
                x = _cap(raw, softcap, CAPPED)
                grad = tl.exp(x - highest) * factor - tl.where((columns == target) & valid, 1.0, 0.0)
                if CAPPED:
                    grad *= 1 - (x / softcap) * (x / softcap)
                tl.store(grads + columns, (grad * scale).to(GRADS.dtype.element_ty), mask=columns < V)
                start += BLOCK
    tl.store(LOSSES + row, tl.where(valid, lse - picked + z_loss * lse * lse, 0.0))


@triton.jit
def _cap(x, softcap, CAPPED: tl.constexpr):  # type: ignore[no-untyped-def]
    """softcap * tanh(x / softcap). One return: Triton compiles what stands after a return too."""
    capped = x
    if CAPPED:
        capped = softcap * (2 * tl.sigmoid(2 * x / softcap) - 1)
    return capped


def chunk_loss_and_grad(
    logits: Tensor, targets: Tensor, softcap: float | None, z_loss: float, ignore_index: int
) -> tuple[Tensor, Tensor]:
    """(n,) float32 losses of a chunk, and its logits (n, V), overwritten by the gradient of the losses' sum."""
    return _launch(logits, targets, softcap, z_loss, ignore_index, logits, 1.0), logits


def chunk_loss_and_fp8_grad(
    logits: Tensor, targets: Tensor, softcap: float | None, z_loss: float, ignore_index: int, scale: float
) -> tuple[Tensor, Tensor]:
    """(n,) float32 losses of a chunk, and scale times the gradient of their sum, (n, V) in E5M2."""
    grads = torch.empty(logits.shape, dtype=torch.float8_e5m2, device=logits.device)
    return _launch(logits, targets, softcap, z_loss, ignore_index, grads, scale), grads


def chunk_loss(
    logits: Tensor, targets: Tensor, softcap: float | None, z_loss: float, ignore_index: int
) -> Tensor:
    """(n,) float32 losses of a chunk."""
    return _launch(logits, targets, softcap, z_loss, ignore_index, None, 1.0)


def _launch(
    logits: Tensor,
    targets: Tensor,
    softcap: float | None,
    z_loss: float,
    ignore_index: int,
    grads: Tensor | None,
    scale: float,
) -> Tensor:
    n, V = logits.shape
    losses = torch.empty(n, dtype=torch.float32, device=logits.device)
    held = V <= LONGEST_HELD
    block = triton.next_power_of_2(V) if held else 16384
    out = logits if grads is None else grads
    loss_and_grad[(n,)](
        logits, targets, losses, out, V, logits.stride(0), z_loss, softcap or 1.0, scale,
        block, held, softcap is not None, ignore_index, grads is not None,
        num_warps=max(4, min(32, block // 1024)),
    )  # fmt: skip
    return losses
