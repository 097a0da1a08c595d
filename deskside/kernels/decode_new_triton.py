"""QK-norm, RoPE, cache write and attention of one new token per row in one Triton kernel. See `decode.attend_from_new`.

`_attend_from_new` is `_attend` of decode_triton.py for a token whose query, key and value are still in the output of
the fused projection. Every program computes the query heads that it needs; the program whose span has the new token
also computes its key, writes key and value to the cache, and uses them from registers.

It reads the last keys and values of its span, positions and page tables before the previous kernel, the projection, has
finished. They were written before the embedding of this step, which is launched without early start
(dependent_launch.py). The reads bypass the L1 cache (".cg"), which may hold outdated lines.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from deskside.kernels.attention.context import AttentionContext
from deskside.kernels.decode_triton import add_keys, add_loaded_keys, join_spans, scale_and_softcap
from deskside.kernels.dependent_launch import launch_options
from deskside.kernels.fused.reference import QkvLayout

MIN_SPAN = 64  # tokens that one program reads
MAX_SPANS = 64  # of a row: the scratch memory grows with them
# A span is doubled until the grid has at most this many programs, or a row few spans.
MAX_PROGRAMS, FEW_SPANS = 1536, 2


@triton.jit
def _normed_and_rotated(  # type: ignore[no-untyped-def]
    X, WEIGHT, cos, sin, eps, mask, C: tl.constexpr, BLOCK_C: tl.constexpr, ROPE: tl.constexpr
):
    """Return QK-norm and RoPE of some heads of one token, (M, BLOCK_C) float32. X: pointers to their channels (M, 1).

    WEIGHT: None without norm. cos, sin: (BLOCK_C,). RoPE pairs the channels of a head's two halves.
    """
    HALF: tl.constexpr = C // 2
    c = tl.arange(0, BLOCK_C)
    other = tl.where(c < HALF, c + HALF, c - HALF)  # the channel that is rotated with c
    x = tl.load(X + c[None, :], mask, 0.0).to(tl.float32)
    y = tl.load(X + other[None, :], mask, 0.0).to(tl.float32)
    if WEIGHT is not None:
        rstd = tl.rsqrt(tl.sum(x * x, axis=1) / C + eps)[:, None]
        x *= rstd * tl.load(WEIGHT + c, c < C, 0.0).to(tl.float32)[None, :]
        y *= rstd * tl.load(WEIGHT + other, c < C, 0.0).to(tl.float32)[None, :]
    if ROPE:
        x = x * cos[None, :] + tl.where((c < HALF)[None, :], -y, y) * sin[None, :]
    return x


@triton.jit
def _load_keys(  # type: ignore[no-untyped-def]
    K, V, TABLE, start, end, kv, c, KV_HEADS: tl.constexpr, C: tl.constexpr, S: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    """Return the positions of TILE keys from `start` on, the keys, and their values. From `end` on, both are 0."""
    key = start + tl.arange(0, TILE)
    page = tl.load(TABLE + key // S, key < end, 0, cache_modifier=".cg")
    offsets = ((page * KV_HEADS + kv) * S + key % S)[:, None] * C + c[None, :]
    mask = (key < end)[:, None] & (c < C)[None, :]
    k = tl.load(K + offsets, mask, 0.0, cache_modifier=".cg")
    v = tl.load(V + offsets, mask, 0.0, cache_modifier=".cg")
    return key, k, v


@triton.jit
def _attend_from_new(  # type: ignore[no-untyped-def]
    QKV, K, V, TABLE, POSITION, OUT, LSE, Q_WEIGHT, K_WEIGHT, COS, SIN, scale, softcap, window, eps, width,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, C: tl.constexpr, S: tl.constexpr,
    SPANS: tl.constexpr, SPAN: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr, BLOCK_C: tl.constexpr,
    WINDOWED: tl.constexpr, CAPPED: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """QKV: (B, HEADS + 2 KV_HEADS, C). POSITION: (B,). COS, SIN: (positions, C / 2), or None. Others: as `_attend`."""
    row = tl.program_id(0).to(tl.int64)
    kv = tl.program_id(1)
    span = tl.program_id(2)
    if PDL:
        gdc_launch_dependents()
    GROUP: tl.constexpr = HEADS // KV_HEADS
    HALF: tl.constexpr = C // 2
    newest = tl.load(POSITION + row, cache_modifier=".cg").to(tl.int32)
    begin = span * SPAN
    end = tl.minimum(begin + SPAN, newest + 1)
    seen = begin <= newest
    if WINDOWED:
        seen = seen & (end > newest - window + 1)
        begin = tl.maximum(begin, (newest - window + 1) // TILE * TILE)
    if not seen:
        return
    m = tl.arange(0, ROWS)
    c = tl.arange(0, BLOCK_C)
    TABLE += row * width
    tail = begin + (end - 1 - begin) // TILE * TILE  # the last tile, which has the new token if the span does
    key, k, v = _load_keys(K, V, TABLE, tail, tl.minimum(end, newest), kv, c, KV_HEADS, C, S, TILE)
    cos = tl.zeros((BLOCK_C,), tl.float32)
    sin = cos
    if COS is not None:
        angle = newest * HALF + tl.where(c < HALF, c, c - HALF)
        cos = tl.load(COS + angle, c < C, 0.0)
        sin = tl.load(SIN + angle, c < C, 0.0)
    if PDL:
        gdc_wait()
    ROPE: tl.constexpr = COS is not None
    mask = (m < GROUP)[:, None] & (c < C)[None, :]
    QKV += row * (HEADS + 2 * KV_HEADS) * C
    Q = QKV + (kv * GROUP + m)[:, None] * C
    q = _normed_and_rotated(Q, Q_WEIGHT, cos, sin, eps, mask, C, BLOCK_C, ROPE).to(QKV.dtype.element_ty)
    new_k = tl.zeros((1, BLOCK_C), K.dtype.element_ty)
    new_v = tl.zeros((1, BLOCK_C), V.dtype.element_ty)
    if end == newest + 1:
        zero = tl.arange(0, 1)[:, None]  # makes one row of what follows
        KEY = QKV + (HEADS + kv) * C + zero
        channels = (c < C)[None, :]
        new_k = _normed_and_rotated(KEY, K_WEIGHT, cos, sin, eps, channels, C, BLOCK_C, ROPE).to(new_k.dtype)
        new_v = tl.load(KEY + KV_HEADS * C + c[None, :], channels, 0.0).to(new_v.dtype)
        place = ((tl.load(TABLE + newest // S) * KV_HEADS + kv) * S + newest % S) * C + zero + c[None, :]
        tl.store(K + place, new_k, channels)
        tl.store(V + place, new_v, channels)
    position = tl.where(m < GROUP, newest, -1)
    max_score = tl.full((ROWS,), float("-inf"), tl.float32)
    sum_exp = tl.zeros((ROWS,), tl.float32)
    out = tl.zeros((ROWS, BLOCK_C), tl.float32)
    for start in range(begin, tail, TILE):
        max_score, sum_exp, out = add_keys(
            q, max_score, sum_exp, out, K, V, TABLE, start, tail, position, window, scale, softcap, kv, c,
            KV_HEADS, C, S, TILE, WINDOWED, WINDOWED, CAPPED, PRECISION,
        )  # fmt: skip
    is_new = (key == newest)[:, None]
    max_score, sum_exp, out = add_loaded_keys(
        q, max_score, sum_exp, out, tl.where(is_new, new_k, k), tl.where(is_new, new_v, v), key, end, position,
        window, scale, softcap, True, WINDOWED, CAPPED, PRECISION,
    )  # fmt: skip
    out = out / tl.where(sum_exp > 0, sum_exp, 1.0)[:, None]
    out_row = (row * SPANS + span) * HEADS + kv * GROUP + m
    tl.store(OUT + out_row[:, None] * C + c[None, :], out, mask)
    tl.store(LSE + out_row, tl.where(sum_exp > 0, max_score + tl.log2(sum_exp), float("-inf")), m < GROUP)


def attend_from_new(
    qkv_NW: Tensor,
    norms: tuple[Tensor, Tensor] | None,
    angles: tuple[Tensor, Tensor] | None,
    layout: QkvLayout,
    pools_PKSC: tuple[Tensor, Tensor],
    table_NM: Tensor,
    position_N: Tensor,
    options: AttentionContext,
) -> Tensor:
    """See `decode.attend_from_new`. Returns (N, H, C)."""
    N, H, K, C = len(qkv_NW), layout.heads, layout.kv_heads, layout.head_dim
    S, width, window = pools_PKSC[0].shape[2], table_NM.shape[1], options.window
    span = span_size(width * S, N * K)
    spans = triton.cdiv(width * S, span)
    # Each span's output, and log2 of its sum of exponentials.
    part = torch.empty(N, spans, 1, H, C, dtype=torch.float32, device=qkv_NW.device)
    lse = torch.empty(N, spans, 1, H, dtype=torch.float32, device=qkv_NW.device)
    # A copy would be the previous kernel, whose results this one may not read before it waits.
    assert position_N.is_contiguous() and table_NM.is_contiguous()
    block_c = max(16, triton.next_power_of_2(C))
    rows = max(16, triton.next_power_of_2(H // K))
    # Tokens per iteration, limited by a consumer card's shared memory and registers.
    tile = 64 if block_c * qkv_NW.element_size() <= 256 else 32
    precision, warps = ("ieee", 8) if qkv_NW.dtype == torch.float32 else ("tf32", 4)
    _attend_from_new[(N, K, spans)](
        qkv_NW.contiguous(), *pools_PKSC, table_NM, position_N, part, lse,
        *(norms or (None, None)), *(angles or (None, None)), *scale_and_softcap(options, C), window or 0, layout.eps,
        width, H, K, C, S, spans, span, tile, rows, block_c,
        window is not None, options.softcap is not None, precision,
        num_warps=warps, num_stages=2, **launch_options(qkv_NW.device, N * K * spans),
    )  # fmt: skip
    return join_spans(part, lse, position_N[:, None], span, options, qkv_NW.dtype)[:, 0]


def span_size(max_length: int, groups: int) -> int:
    """Return the tokens per span for rows of at most `max_length` tokens. groups: rows x key-value heads."""
    span = MIN_SPAN
    while (spans := triton.cdiv(max_length, span)) > MAX_SPANS or (
        spans > FEW_SPANS and groups * spans > MAX_PROGRAMS
    ):
        span *= 2
    return span
