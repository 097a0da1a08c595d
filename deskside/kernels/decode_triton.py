"""The kernels of decode.py in Triton, and their launches. Imported only where tensors are on a GPU.

`_attend`: one program per row, key-value head and span of SPAN tokens; a program whose span the row has not
reached, or that lies before its window, returns at once. The grid can therefore cover the longest possible row, and one
CUDA graph serves all lengths. `_join` combines the spans of a row into one softmax:

    keys of a row   |---- span 0 ----|---- span 1 ----|-- span 2 --|
    _attend              o_0, l_0         o_1, l_1       o_2, l_2     l_i: log2 of the span's sum of exponentials
    _join           o = sum_i 2^(l_i - m) o_i / sum_i 2^(l_i - m),  m = max_i l_i
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from deskside.kernels.attention.context import AttentionContext
from deskside.kernels.cross_entropy_triton import capped
from deskside.kernels.dependent_launch import MAX_BLOCKS, launch_options
from deskside.kernels.fused.reference import QkvLayout
from deskside.utils import splitmix

MIN_SPAN = 256  # tokens that one program reads, doubled until a row has at most MAX_SPANS spans
MAX_SPANS = 64
LOG2E = 1.4426950408889634
LOG2_E = tl.constexpr(LOG2E)
NOISE_BLOCK = 1024  # random numbers per program
GOLDEN = tl.constexpr(splitmix.GOLDEN)
MULTIPLIER_1, MULTIPLIER_2 = tl.constexpr(splitmix.MULTIPLIER_1), tl.constexpr(splitmix.MULTIPLIER_2)


@triton.jit
def add_loaded_keys(  # type: ignore[no-untyped-def]
    q, max_score, sum_exp, out, k, v, key, end, position, window, scale, softcap,
    MASKED: tl.constexpr, WINDOWED: tl.constexpr, CAPPED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add the keys at positions `key` to the online softmax. MASKED: some query does not see all of them.

    scale, softcap: include log2(e), because exponentials are powers of 2.

    Sums are relative to the maximum so far, and are rescaled to each new one.
    """
    scores = capped(tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale, softcap, CAPPED)
    if MASKED:
        visible = (key < end)[None, :] & (key[None, :] <= position[:, None])
        if WINDOWED:
            visible = visible & (key[None, :] > position[:, None] - window)
        scores = tl.where(visible, scores, float("-inf"))
    new_max = tl.maximum(max_score, tl.max(scores, axis=1))
    # A query that has seen nothing yet would give -inf - (-inf).
    base = tl.where(new_max == float("-inf"), 0.0, new_max)
    weights = tl.exp2(scores - base[:, None])
    rescale = tl.exp2(max_score - base)
    sum_exp = sum_exp * rescale + tl.sum(weights, axis=1)
    out = out * rescale[:, None] + tl.dot(weights.to(v.dtype), v, input_precision=PRECISION)
    return new_max, sum_exp, out


@triton.jit
def add_keys(  # type: ignore[no-untyped-def]
    q, max_score, sum_exp, out, K, V, TABLE, start, end, position, window, scale, softcap, kv, c,
    KV_HEADS: tl.constexpr, C: tl.constexpr, S: tl.constexpr, TILE: tl.constexpr,
    MASKED: tl.constexpr, WINDOWED: tl.constexpr, CAPPED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Load TILE keys from `start` on, and add them as `add_loaded_keys` does."""
    key = start + tl.arange(0, TILE)
    mask = (c < C)[None, :]
    if MASKED:
        page = tl.load(TABLE + key // S, mask=key < end, other=0)
        mask = mask & (key < end)[:, None]
    else:
        page = tl.load(TABLE + key // S)
    offsets = ((page * KV_HEADS + kv) * S + key % S)[:, None] * C + c[None, :]
    k = tl.load(K + offsets, mask=mask, other=0.0)
    v = tl.load(V + offsets, mask=mask, other=0.0)
    return add_loaded_keys(
        q, max_score, sum_exp, out, k, v, key, end, position, window, scale, softcap,
        MASKED, WINDOWED, CAPPED, PRECISION,
    )  # fmt: skip


@triton.jit
def _attend(  # type: ignore[no-untyped-def]
    Q, K, V, TABLE, POSITION, OUT, LSE, scale, softcap, window, width,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, C: tl.constexpr, T: tl.constexpr, S: tl.constexpr,
    SPANS: tl.constexpr, SPAN: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr, BLOCK_C: tl.constexpr,
    WINDOWED: tl.constexpr, CAPPED: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Attend from the new tokens of a row to one span of its cache, for the query heads of one key-value head.

    Q: (B, T, HEADS, C). K, V: (pages, KV_HEADS, S, C). TABLE: (B, width). POSITION: (B, T).
    scale, softcap: as `add_keys`.
    OUT: (B, SPANS, T, HEADS, C) float32, normalized within a span. LSE: (B, SPANS, T, HEADS), log2 of the span's sum of
    exponentials, -inf for a query that sees nothing in the span.
    """
    row = tl.program_id(0).to(tl.int64)
    kv = tl.program_id(1)
    span = tl.program_id(2)
    GROUP: tl.constexpr = HEADS // KV_HEADS
    m = tl.arange(0, ROWS)  # a row of the tile is a new token and a head of the group
    t = m // GROUP
    head = kv * GROUP + m % GROUP
    row_mask = m < GROUP * T
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    newest = tl.load(POSITION + row * T + T - 1)
    oldest = tl.load(POSITION + row * T)
    begin = span * SPAN
    end = tl.minimum(begin + SPAN, newest + 1)
    if begin > newest:
        return
    if WINDOWED:
        if end <= oldest - window + 1:
            return
        begin = tl.maximum(begin, (oldest - window + 1) // TILE * TILE)
    position = tl.load(POSITION + row * T + t, mask=row_mask, other=-1)
    c = tl.arange(0, BLOCK_C)
    channel_mask = c < C
    q_ptrs = Q + ((row * T + t) * HEADS + head)[:, None] * C + c[None, :]
    q = tl.load(q_ptrs, mask=row_mask[:, None] & channel_mask[None, :], other=0.0)
    max_score = tl.full((ROWS,), float("-inf"), tl.float32)
    sum_exp = tl.zeros((ROWS,), tl.float32)
    out = tl.zeros((ROWS, BLOCK_C), tl.float32)
    TABLE += row * width
    for start in range(begin, end, TILE):
        max_score, sum_exp, out = add_keys(
            q, max_score, sum_exp, out, K, V, TABLE, start, end, position, window, scale, softcap, kv, c,
            KV_HEADS, C, S, TILE, True, WINDOWED, CAPPED, PRECISION,
        )  # fmt: skip
    out = out / tl.where(sum_exp > 0, sum_exp, 1.0)[:, None]
    out_row = ((row * SPANS + span) * T + t) * HEADS + head
    tl.store(OUT + out_row[:, None] * C + c[None, :], out, mask=row_mask[:, None] & channel_mask[None, :])
    tl.store(LSE + out_row, tl.where(sum_exp > 0, max_score + tl.log2(sum_exp), float("-inf")), mask=row_mask)


@triton.jit
def _join(  # type: ignore[no-untyped-def]
    PART, LSE, SINKS, POSITION, OUT, window,
    HEADS: tl.constexpr, C: tl.constexpr, T: tl.constexpr, SPANS: tl.constexpr, SPAN: tl.constexpr,
    BLOCK_C: tl.constexpr, WINDOWED: tl.constexpr, HAS_SINKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Combine the spans of `_attend` for one query and head. OUT: (B, T, HEADS, C). SINKS: (HEADS,), float32.

    A sink is one more span, whose value is zero.
    """
    row = tl.program_id(0).to(tl.int64)
    th = tl.program_id(1)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    newest = tl.load(POSITION + row * T + T - 1)
    first_span = 0
    if WINDOWED:
        first_span = tl.maximum(tl.load(POSITION + row * T) - window + 1, 0) // SPAN
    c = tl.arange(0, BLOCK_C)
    max_lse = float("-inf")
    sum_exp = 0.0
    if HAS_SINKS:
        max_lse = tl.load(SINKS + th % HEADS) * LOG2_E
        sum_exp = 1.0
    out = tl.zeros((BLOCK_C,), tl.float32)
    for span in range(first_span, newest // SPAN + 1):
        part_row = (row * SPANS + span) * T * HEADS + th
        lse = tl.load(LSE + part_row)
        new_max = tl.maximum(max_lse, lse)
        base = tl.where(new_max == float("-inf"), 0.0, new_max)
        weight = tl.exp2(lse - base)
        rescale = tl.exp2(max_lse - base)
        part = tl.load(PART + part_row * C + c, mask=c < C, other=0.0)
        out = out * rescale + part * weight
        sum_exp = sum_exp * rescale + weight
        max_lse = new_max
    out = out / tl.where(sum_exp > 0, sum_exp, 1.0)
    tl.store(OUT + (row * T * HEADS + th) * C + c, out.to(OUT.dtype.element_ty), mask=c < C)


def attend(
    q_BTHC: Tensor,
    k_PKSC: Tensor,
    v_PKSC: Tensor,
    table_BN: Tensor,
    positions_BT: Tensor,
    options: AttentionContext,
) -> Tensor:
    """See `decode.paged_attention`; for few queries. Returns (B, T, H, C)."""
    positions_BT, window = positions_BT.contiguous(), options.window
    (B, T, H, C), (_, K, S, _), width = q_BTHC.shape, k_PKSC.shape, table_BN.shape[1]
    span = span_size(width * S)
    spans = triton.cdiv(width * S, span)
    # Each span's output, and log2 of its sum of exponentials.
    part = torch.empty(B, spans, T, H, C, dtype=torch.float32, device=q_BTHC.device)
    lse = torch.empty(B, spans, T, H, dtype=torch.float32, device=q_BTHC.device)
    block_c = max(16, triton.next_power_of_2(C))
    rows = max(16, triton.next_power_of_2(T * H // K))
    # Tokens per iteration, limited by a consumer card's shared memory.
    tile = 64 if block_c * q_BTHC.element_size() <= 256 else 32
    # Products in full float32 run outside of the tensor cores: with four warps, 16 heads spill 5 KB a thread.
    precision, warps = ("ieee", 8) if q_BTHC.dtype == torch.float32 else ("tf32", 4)
    _attend[(B, K, spans)](
        q_BTHC.contiguous(), k_PKSC, v_PKSC, table_BN.contiguous(), positions_BT, part, lse,
        *scale_and_softcap(options, C), window or 0, width,
        H, K, C, T, S, spans, span, tile, rows, block_c, window is not None, options.softcap is not None, precision,
        num_warps=warps, num_stages=2, **launch_options(q_BTHC.device, B * K * spans),
    )  # fmt: skip
    return join_spans(part, lse, positions_BT, span, options, q_BTHC.dtype)


def join_spans(
    part_BsTHC: Tensor,
    lse_BsTH: Tensor,
    positions_BT: Tensor,
    span: int,
    options: AttentionContext,
    dtype: torch.dtype,
) -> Tensor:
    """Combine the outputs of all spans, (B, T, H, C) in `dtype`."""
    B, spans, T, H, C = part_BsTHC.shape
    window, sinks_H = options.window, options.sinks_H
    out = torch.empty(B, T, H, C, dtype=dtype, device=part_BsTHC.device)
    _join[(B, T * H)](
        part_BsTHC, lse_BsTH, sinks_H, positions_BT, out, window or 0,
        H, C, T, spans, span, triton.next_power_of_2(C), window is not None, sinks_H is not None,
        num_warps=1, **launch_options(out.device, B * T * H),
    )  # fmt: skip
    return out


def scale_and_softcap(options: AttentionContext, head_dim: int) -> tuple[float, float]:
    """Return the last two as `add_keys` takes them; the softcap is 0.0 if there is none."""
    scale = head_dim**-0.5 if options.scale is None else options.scale
    return scale * LOG2E, (options.softcap or 0.0) * LOG2E


def span_size(max_length: int) -> int:
    """Return the tokens per span for rows of at most `max_length` tokens."""
    span = MIN_SPAN
    while triton.cdiv(max_length, span) > MAX_SPANS:
        span *= 2
    return span


@triton.jit
def _into_cache(  # type: ignore[no-untyped-def]
    QKV, Q, K, V, Q_WEIGHT, K_WEIGHT, COS, SIN, POSITION, PAGE, OFFSET, N, eps,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, C: tl.constexpr, S: tl.constexpr, BLOCK_N: tl.constexpr,
    HEADS_EACH: tl.constexpr, BLOCK: tl.constexpr, NORM: tl.constexpr, ROPE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Process HEADS_EACH heads of BLOCK_N tokens. QKV: (N, (HEADS + 2 KV_HEADS) C). RoPE pairs a head's two halves."""
    HALF: tl.constexpr = C // 2
    ALL_HEADS: tl.constexpr = HEADS + 2 * KV_HEADS
    token = (tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    half = tl.arange(0, BLOCK)
    in_half = half < HALF
    in_tile = (token < N)[:, None] & in_half[None, :]
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    if ROPE:
        angle = tl.load(POSITION + token, token < N, 0)[:, None] * HALF + half[None, :]
        cos = tl.load(COS + angle, in_tile, 0.0)
        sin = tl.load(SIN + angle, in_tile, 0.0)
    # The first of a token's rows in the caches, one for each head of keys.
    cache_row = tl.load(PAGE + token, token < N, 0) * KV_HEADS * S + tl.load(OFFSET + token, token < N, 0)
    for i in range(HEADS_EACH):
        head = tl.program_id(1) * HEADS_EACH + i
        mask = in_tile & (head < ALL_HEADS)
        source = QKV + (token * ALL_HEADS + head)[:, None] * C + half[None, :]
        a = tl.load(source, mask, 0.0).to(tl.float32)
        b = tl.load(source + HALF, mask, 0.0).to(tl.float32)
        if head < HEADS + KV_HEADS:
            if NORM:
                rstd = tl.rsqrt(tl.sum(a * a + b * b, axis=1) / C + eps)[:, None]
                weights = Q_WEIGHT if head < HEADS else K_WEIGHT
                a = a * rstd * tl.load(weights + half, in_half, 0.0).to(tl.float32)[None, :]
                b = b * rstd * tl.load(weights + HALF + half, in_half, 0.0).to(tl.float32)[None, :]
            if ROPE:
                a, b = a * cos - b * sin, b * cos + a * sin
        if head < HEADS:
            out = Q + (token * HEADS + head)[:, None] * C + half[None, :]
            tl.store(out, a.to(Q.dtype.element_ty), mask)
            tl.store(out + HALF, b.to(Q.dtype.element_ty), mask)
        elif head < HEADS + KV_HEADS:
            out = K + (cache_row + (head - HEADS) * S)[:, None] * C + half[None, :]
            tl.store(out, a.to(K.dtype.element_ty), mask)
            tl.store(out + HALF, b.to(K.dtype.element_ty), mask)
        else:
            out = V + (cache_row + (head - HEADS - KV_HEADS) * S)[:, None] * C + half[None, :]
            tl.store(out, a.to(V.dtype.element_ty), mask)
            tl.store(out + HALF, b.to(V.dtype.element_ty), mask)


def qk_norm_rope_into_cache(
    qkv_NW: Tensor,
    norms: tuple[Tensor, Tensor] | None,
    angles: tuple[Tensor, Tensor] | None,
    layout: QkvLayout,
    pools_PKSC: tuple[Tensor, Tensor],
    slots_N: tuple[Tensor, Tensor, Tensor],
) -> Tensor:
    """See `decode.qk_norm_rope_into_cache`. qkv_NW must be contiguous."""
    N, C = len(qkv_NW), layout.head_dim
    q = torch.empty(N, layout.heads, C, dtype=qkv_NW.dtype, device=qkv_NW.device)
    heads = layout.heads + 2 * layout.kv_heads
    block = triton.next_power_of_2(C // 2)
    # Each head of a token has a program of its own while these are few. Programs of many tokens take blocks of them,
    # so that the angles are read once, and as many heads as keep the programs few.
    tokens = 1 if N * heads <= MAX_BLOCKS else max(1, 1024 // block)
    token_blocks = triton.cdiv(N, tokens)
    heads_each = triton.cdiv(token_blocks * heads, MAX_BLOCKS)
    grid = (token_blocks, triton.cdiv(heads, heads_each))
    _into_cache[grid](
        qkv_NW, q, *pools_PKSC, *(norms or (None, None)), *(angles or (None, None)),
        *(x_N.contiguous() for x_N in slots_N), N, layout.eps,
        layout.heads, layout.kv_heads, C, pools_PKSC[0].shape[2], tokens, heads_each, block, norms is not None,
        angles is not None,
        num_warps=min(4, max(1, tokens * block // 256)), **launch_options(q.device, grid[0] * grid[1]),
    )  # fmt: skip
    return q


@triton.jit
def _mix(x):  # type: ignore[no-untyped-def]
    x = (x ^ (x >> 30)) * MULTIPLIER_1
    x = (x ^ (x >> 27)) * MULTIPLIER_2
    return x ^ (x >> 31)


@triton.jit
def exponential(stream, count, token, PURPOSE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return exponential random numbers, see `exponentials`. All arguments are int64."""
    stream, count = stream.to(tl.uint64, bitcast=True), count.to(tl.uint64, bitcast=True)
    purpose = tl.full((), PURPOSE, tl.uint64)
    base = _mix(_mix(stream + purpose * GOLDEN) + count * GOLDEN)
    bits = _mix(base + (token.to(tl.int64) + 1).to(tl.uint64, bitcast=True) * GOLDEN) >> 32
    u = (bits.to(tl.float32) + 0.5) * 2.3283064365386963e-10  # 2^-32
    u = tl.minimum(u, 1 - 5.960464477539063e-08)  # 1 - 2^-24
    # -log1p(-u) by Kahan's method: the rounding error of 1 - u cancels in the quotient.
    one_minus_u = 1.0 - u
    rounded_u = 1.0 - one_minus_u
    quotient = u / tl.where(rounded_u > 0, rounded_u, 1.0)
    return tl.where(rounded_u > 0, -tl.log(one_minus_u) * quotient, u)


@triton.jit
def _exponentials(  # type: ignore[no-untyped-def]
    STREAM, COUNT, TOKEN, OUT, W, stream_step, count_step, token_row, token_column,
    PURPOSE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Draw a block of one row of OUT (B, W). STREAM and COUNT (B,) and TOKEN (B, W) are read with their strides."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < W
    stream, count = tl.load(STREAM + row * stream_step), tl.load(COUNT + row * count_step)
    token = tl.load(TOKEN + row * token_row + columns * token_column, mask=mask, other=0)
    tl.store(OUT + row * W + columns, exponential(stream, count, token, PURPOSE), mask=mask)


def exponentials(stream_B: Tensor, count_B: Tensor, purpose: int, token_BW: Tensor) -> Tensor:
    """Return the exponential random numbers of engine/counter_rng.py, (B, W) float32.

    stream_B, count_B, token_BW: int64, with any strides. In torch this takes about thirty passes over 64-bit integers,
    for the whole vocabulary where no filter has shortened it.
    """
    B, W = token_BW.shape
    out = torch.empty(B, W, dtype=torch.float32, device=token_BW.device)
    _exponentials[(B, triton.cdiv(W, NOISE_BLOCK))](
        stream_B, count_B, token_BW, out, W,
        stream_B.stride(0), count_B.stride(0), token_BW.stride(0), token_BW.stride(1),
        purpose, NOISE_BLOCK, num_warps=4,
    )  # fmt: skip
    return out
