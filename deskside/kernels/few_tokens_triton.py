"""The kernels of few_tokens.py in Triton, and their launches. Imported only where tensors are on a GPU.

`_one_token`: a program multiplies OUTPUTS rows of the weight by one token, elementwise, and sums; the norm before the
layer is part of the kernel. With up to ONE_BY_ONE tokens, the programs of the same rows of the weight run together, so
that all but the first find them in the L2 cache.

`_few_tokens`: a program multiplies OUTPUTS rows of the weight by all tokens on the tensor cores. It prefetches its
weights into the L2 cache before it waits for the previous kernel, and then reads weights and tokens in several stages.

K: channels of the input, F: outputs, N: tokens.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from deskside.kernels.dependent_launch import launch_options
from deskside.kernels.few_tokens import AddNorm
from deskside.kernels.fused.launch import ACTIVATION_IDS, next_power_of_2
from deskside.kernels.fused.triton_gated import activation

NO_ACTIVATION = -1
ONE_BY_ONE = 4  # tokens up to which each has programs of its own; chosen by an estimate, not measured


class Tile(NamedTuple):
    """Tile of a program, its warps, and the stages of its loads: outputs x channels of the weight at once."""

    outputs: int
    channels: int
    warps: int
    stages: int = 1


# Tiles by number of tokens, rounded up to one of these, and by whether there are a gate and an up weight. They were the
# fastest in benchmarks.few_tokens for 124m on an H200. For 32 tokens, none were tried.
TILES = {
    (1, False): Tile(4, 2048, 4),
    (1, True): Tile(4, 1024, 2),
    (16, False): Tile(16, 128, 4, 6),
    (16, True): Tile(16, 128, 4, 6),
    (32, False): Tile(16, 128, 4, 4),
    (32, True): Tile(16, 128, 4, 4),
    (64, False): Tile(16, 128, 4, 4),
    (64, True): Tile(16, 64, 4, 8),
}


@triton.jit
def _one_token(  # type: ignore[no-untyped-def]
    X, DELTA, SUM, NORM_WEIGHT, WEIGHT, BIAS, OUT, N, eps,
    F: tl.constexpr, K: tl.constexpr, OUTPUTS: tl.constexpr, CHANNELS: tl.constexpr,
    KIND: tl.constexpr, GATED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute OUTPUTS elements of a row of OUT (N, F). X, DELTA, SUM: (N, K). WEIGHT: (F, K), or (2 F, K) if GATED."""
    if PDL:
        gdc_launch_dependents()
    n, block = tl.program_id(0) % N, tl.program_id(0) // N
    X += n * K
    OUT += n * F
    f = block * OUTPUTS + tl.arange(0, OUTPUTS)
    k = tl.arange(0, CHANNELS)
    inside = (f < F)[:, None]
    rows = WEIGHT + f.to(tl.int64)[:, None] * K + k[None, :]
    # The first weights are read before the previous kernel has finished.
    w = tl.load(rows, inside & (k < K)[None, :], 0.0, cache_modifier=".cg")
    if GATED:
        rows_up = rows + F * K
        u = tl.load(rows_up, inside & (k < K)[None, :], 0.0, cache_modifier=".cg")
    if PDL:
        gdc_wait()
    total = tl.zeros((OUTPUTS, CHANNELS), tl.float32)
    total_up = tl.zeros((OUTPUTS, CHANNELS), tl.float32)
    squares = tl.zeros((CHANNELS,), tl.float32)
    for start in range(0, K, CHANNELS):
        channel = start + k
        mask = channel < K
        x = tl.load(X + channel, mask, 0.0).to(tl.float32)
        if DELTA is not None:
            # Rounded as it is stored: the next norm reads the stored value.
            rounded = (x + tl.load(DELTA + n * K + channel, mask, 0.0).to(tl.float32)).to(X.dtype.element_ty)
            if block == 0:
                tl.store(SUM + n * K + channel, rounded, mask)
            x = rounded.to(tl.float32)
            squares += x * x
            x *= tl.load(NORM_WEIGHT + channel, mask, 0.0).to(tl.float32)
        total += w.to(tl.float32) * x[None, :]
        following = inside & (channel + CHANNELS < K)[None, :]
        w = tl.load(rows + start + CHANNELS, following, 0.0)
        if GATED:
            total_up += u.to(tl.float32) * x[None, :]
            u = tl.load(rows_up + start + CHANNELS, following, 0.0)
    out = tl.sum(total, axis=1)
    up = tl.sum(total_up, axis=1) if GATED else out
    if DELTA is not None:
        rstd = tl.rsqrt(tl.sum(squares, axis=0) / K + eps)
        out *= rstd
        up *= rstd
    if BIAS is not None:
        out += tl.load(BIAS + f, f < F, 0.0).to(tl.float32)
        if GATED:
            up += tl.load(BIAS + F + f, f < F, 0.0).to(tl.float32)
    if KIND >= 0:
        out, _ = activation(out, KIND)
    if GATED:
        out *= up
    tl.store(OUT + f, out.to(OUT.dtype.element_ty), f < F)


_PREFETCH = "prefetch.global.L2 [$1]; mov.u32 $0, 0;"
PREFETCH = tl.constexpr(_PREFETCH)


@triton.jit
def _few_tokens(  # type: ignore[no-untyped-def]
    X, WEIGHT, BIAS, OUT, N,
    F: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, CHANNELS: tl.constexpr,
    LINES: tl.constexpr, KIND: tl.constexpr, GATED: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute OUTPUTS columns of OUT (N, F). X: (N, K). LINES: of 128 bytes in a row of the weight, rounded up."""
    if PDL:
        gdc_launch_dependents()
    f = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    n = tl.arange(0, ROWS)
    rows = WEIGHT + tl.minimum(f, F - 1).to(tl.int64)[:, None] * K
    rows_up = rows + F * K
    if PDL:
        line = tl.minimum(tl.arange(0, LINES) * (128 // (X.dtype.element_ty.primitive_bitwidth // 8)), K - 1)
        tl.inline_asm_elementwise(
            PREFETCH, "=r,l", [rows + line[None, :]], dtype=tl.int32, is_pure=False, pack=1
        )
        if GATED:
            tl.inline_asm_elementwise(
                PREFETCH, "=r,l", [rows_up + line[None, :]], dtype=tl.int32, is_pure=False, pack=1
            )
        gdc_wait()
    total = tl.zeros((ROWS, OUTPUTS), tl.float32)
    total_up = tl.zeros((ROWS, OUTPUTS), tl.float32)
    tokens = X + tl.minimum(n, N - 1)[:, None] * K
    for start in range(0, K, CHANNELS):
        k = start + tl.arange(0, CHANNELS)[None, :]
        if K % CHANNELS == 0:
            x = tl.load(tokens + k)
            w = tl.load(rows + k)
        else:
            x = tl.load(tokens + k, k < K, 0.0)
            w = tl.load(rows + k, k < K, 0.0)
        total = tl.dot(x, tl.trans(w), total, input_precision=PRECISION)
        if GATED:
            if K % CHANNELS == 0:
                u = tl.load(rows_up + k)
            else:
                u = tl.load(rows_up + k, k < K, 0.0)
            total_up = tl.dot(x, tl.trans(u), total_up, input_precision=PRECISION)
    if BIAS is not None:
        total += tl.load(BIAS + f, f < F, 0.0).to(tl.float32)[None, :]
        if GATED:
            total_up += tl.load(BIAS + F + f, f < F, 0.0).to(tl.float32)[None, :]
    if KIND >= 0:
        total, _ = activation(total, KIND)
    if GATED:
        total *= total_up
    tl.store(
        OUT + n[:, None] * F + f[None, :], total.to(OUT.dtype.element_ty), (n < N)[:, None] & (f < F)[None, :]
    )


@triton.jit
def _add_norm(  # type: ignore[no-untyped-def]
    X, DELTA, WEIGHT, SUM, NORMED, eps, K: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    """Add and normalize one token, like `triton_norm.add_norm`, with an early start. All but WEIGHT (K,) are (N, K)."""
    if PDL:
        gdc_launch_dependents()
    k = tl.arange(0, BLOCK)
    offsets = tl.program_id(0).to(tl.int64) * K + k
    weight = tl.load(WEIGHT + k, k < K, 0.0).to(tl.float32)
    if PDL:
        gdc_wait()
    x = tl.load(X + offsets, k < K, 0.0).to(tl.float32) + tl.load(DELTA + offsets, k < K, 0.0).to(tl.float32)
    rounded = x.to(SUM.dtype.element_ty)
    tl.store(SUM + offsets, rounded, k < K)
    x = rounded.to(tl.float32)
    rstd = tl.rsqrt(tl.sum(x * x, axis=0) / K + eps)
    tl.store(NORMED + offsets, (x * rstd * weight).to(NORMED.dtype.element_ty), k < K)


def padded(tokens: int) -> int:
    """Return the number of tokens for which a tile is chosen."""
    return 1 if tokens <= ONE_BY_ONE else max(16, next_power_of_2(tokens))


def launch(
    x_NK: Tensor,
    norm: AddNorm | None,
    weight_FK: Tensor,
    bias_F: Tensor | None = None,
    activation: str | None = None,
    gated: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return x, or its sum with norm.delta, and the output. See `few_tokens.add_norm_linear`; norm may be None."""
    x_NK = x_NK.contiguous()
    N, K = x_NK.shape
    F = len(weight_FK) // (2 if gated else 1)
    out_NF = torch.empty(N, F, dtype=x_NK.dtype, device=x_NK.device)
    kind = NO_ACTIVATION if activation is None else ACTIVATION_IDS[activation]
    rows = padded(N)
    tile = TILES[rows, gated]
    if rows == 1:
        grid = (N * triton.cdiv(F, tile.outputs),)
        delta_NK, norm_weight_K, eps = (None, None, 0.0) if norm is None else norm
        sum_NK = x_NK if delta_NK is None else torch.empty_like(x_NK)
        _one_token[grid](
            x_NK, None if delta_NK is None else delta_NK.contiguous(), sum_NK, norm_weight_K, weight_FK, bias_F,
            out_NF, N, eps, F, K, tile.outputs, min(tile.channels, next_power_of_2(K)), kind, gated,
            num_warps=tile.warps, **launch_options(x_NK.device, grid[0]),
        )  # fmt: skip
        return sum_NK, out_NF
    normed_NK = x_NK
    if norm is not None:
        x_NK, normed_NK = add_norm(x_NK, norm)
    # Products in full float32 run outside of the tensor cores, and their operands have twice the bytes.
    precision, most = ("ieee", 32) if x_NK.dtype == torch.float32 else ("tf32", tile.channels)
    channels = min(most, max(16, next_power_of_2(K)))
    lines = next_power_of_2(triton.cdiv(K * x_NK.element_size(), 128))
    grid = (triton.cdiv(F, tile.outputs),)
    _few_tokens[grid](
        normed_NK, weight_FK, bias_F, out_NF, N, F, K, rows, tile.outputs, channels, lines, kind, gated, precision,
        num_warps=tile.warps, num_stages=tile.stages, **launch_options(x_NK.device, grid[0]),
    )  # fmt: skip
    return x_NK, out_NF


def add_norm(x_NK: Tensor, norm: AddNorm) -> tuple[Tensor, Tensor]:
    """Return x + norm.delta and its norm, (N, K) each."""
    N, K = x_NK.shape
    sum_NK, normed_NK = torch.empty_like(x_NK), torch.empty_like(x_NK)
    block = next_power_of_2(K)
    _add_norm[(N,)](
        x_NK, norm.delta_NK.contiguous(), norm.weight_K, sum_NK, normed_NK, norm.eps, K, block,
        num_warps=min(8, max(1, block // 256)), **launch_options(x_NK.device, N),
    )  # fmt: skip
    return sum_NK, normed_NK
