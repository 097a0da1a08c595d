"""The kernel of prefill.py in Triton, and its launch. Imported only where tensors are on a GPU.

One program per tile of QUERIES new tokens of one row and key-value head; the query heads of the group are part of the
tile. The grid depends only on the number of packed tokens and rows, not on how the tokens are distributed over the
rows, so one CUDA graph serves every distribution. Row r begins at tile cu_seqlens[r] // QUERIES + r: this leaves every
row at least as many tiles as it needs, and a program finds its row by bisection (as in vLLM's unified attention).
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from deskside.kernels.attention.context import AttentionContext
from deskside.kernels.decode_triton import LOG2_E, add_keys, scale_and_softcap


@triton.jit
def _attend_packed(  # type: ignore[no-untyped-def]
    Q, K, V, TABLE, LENGTH, CU_SEQLENS, SINKS, OUT, scale, softcap, window, width, rows, N,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, C: tl.constexpr, S: tl.constexpr, QUERIES: tl.constexpr,
    TILE_ROWS: tl.constexpr, TILE: tl.constexpr, BLOCK_C: tl.constexpr, WINDOWED: tl.constexpr,
    CAPPED: tl.constexpr, HAS_SINKS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Q, OUT: (N, HEADS, C). K, V: (pages, KV_HEADS, S, C). TABLE: (rows, width). scale, softcap: as `add_keys`."""
    tile = tl.program_id(0)
    kv = tl.program_id(1)
    GROUP: tl.constexpr = HEADS // KV_HEADS
    low = tl.full((), 0, tl.int32)
    high = tl.full((), 1, tl.int32) + rows  # tokens after the last row are padding, as one more row
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(CU_SEQLENS + middle) // QUERIES + middle <= tile:
            low = middle
        else:
            high = middle
    row = low
    begin = tl.load(CU_SEQLENS + row)
    count = tl.load(CU_SEQLENS + row + 1, mask=row < rows, other=N) - begin
    first = (tile - begin // QUERIES - row) * QUERIES
    if first >= count:
        return
    m = tl.arange(0, TILE_ROWS)  # a row of the tile is a new token and a head of the group
    token = first + m // GROUP
    mask = (m // GROUP < QUERIES) & (token < count)
    c = tl.arange(0, BLOCK_C)
    head = kv * GROUP + m % GROUP
    offsets = ((begin + token).to(tl.int64) * HEADS + head)[:, None] * C + c[None, :]
    mask_MC = mask[:, None] & (c < C)[None, :]
    out = tl.zeros((TILE_ROWS, BLOCK_C), tl.float32)
    if row == rows:
        # Later layers read padding too, so it must be finite.
        tl.store(OUT + offsets, out.to(OUT.dtype.element_ty), mask=mask_MC)
        return
    length = tl.load(LENGTH + row)
    q = tl.load(Q + offsets, mask=mask_MC, other=0.0)
    max_score = tl.full((TILE_ROWS,), float("-inf"), tl.float32)
    sum_exp = tl.zeros((TILE_ROWS,), tl.float32)
    if HAS_SINKS:  # a sink is a key whose value is zero
        max_score = tl.load(SINKS + head) * LOG2_E
        sum_exp += 1.0
    oldest = length + first
    end = length + tl.minimum(first + QUERIES, count)  # of the keys that the newest query sees
    position = length + token
    TABLE += row.to(tl.int64) * width
    if WINDOWED:
        partly = tl.maximum(oldest - window + 1, 0) // TILE * TILE
    else:
        partly = (oldest + 1) // TILE * TILE  # every query sees all keys before this one
        for start in range(0, partly, TILE):
            max_score, sum_exp, out = add_keys(
                q, max_score, sum_exp, out, K, V, TABLE, start, end, position, window, scale, softcap, kv, c,
                KV_HEADS, C, S, TILE, False, WINDOWED, CAPPED, PRECISION,
            )  # fmt: skip
    for start in range(partly, end, TILE):
        max_score, sum_exp, out = add_keys(
            q, max_score, sum_exp, out, K, V, TABLE, start, end, position, window, scale, softcap, kv, c,
            KV_HEADS, C, S, TILE, True, WINDOWED, CAPPED, PRECISION,
        )  # fmt: skip
    out = out / tl.where(sum_exp > 0, sum_exp, 1.0)[:, None]
    tl.store(OUT + offsets, out.to(OUT.dtype.element_ty), mask=mask_MC)


class Launch(NamedTuple):
    """Tile sizes and launch options that fit the shared memory of consumer cards, 99 KB."""

    tile_rows: int
    tile: int
    warps: int
    stages: int


def launch_of(head_bytes: int, dtype: torch.dtype) -> Launch:
    """Return the launch for heads of this many bytes, a power of two."""
    # Products in full float32 run outside of the tensor cores, and larger tiles spill.
    if dtype == torch.float32:
        return Launch(64, 64 if head_bytes <= 256 else 32, 8, 2)
    if head_bytes <= 128:
        return Launch(128, 64, 4, 3)
    if head_bytes <= 256:
        return Launch(128, 64, 8, 2)
    return Launch(64, 32, 4, 2)


def attend_packed(
    q_NHC: Tensor,
    k_PKSC: Tensor,
    v_PKSC: Tensor,
    table_LN: Tensor,
    lengths_L: Tensor,
    cu_seqlens: Tensor,
    options: AttentionContext,
) -> Tensor:
    """See `prefill.packed_attention`."""
    (N, H, C), (_, K, S, _), (L, width) = q_NHC.shape, k_PKSC.shape, table_LN.shape
    window = options.window
    block_c = max(16, triton.next_power_of_2(C))
    launch = launch_of(block_c * q_NHC.element_size(), q_NHC.dtype)
    queries = launch.tile_rows // (H // K)
    out_NHC = torch.empty_like(q_NHC, memory_format=torch.contiguous_format)
    precision = "ieee" if q_NHC.dtype == torch.float32 else "tf32"
    _attend_packed[(N // queries + L + 1, K)](
        q_NHC.contiguous(), k_PKSC, v_PKSC, table_LN.contiguous(), lengths_L.contiguous(), cu_seqlens.contiguous(),
        options.sinks_H, out_NHC,
        *scale_and_softcap(options, C), window or 0, width, L, N,
        H, K, C, S, queries, launch.tile_rows, launch.tile, block_c, window is not None,
        options.softcap is not None, options.sinks_H is not None, precision,
        num_warps=launch.warps, num_stages=launch.stages,
    )  # fmt: skip
    return out_NHC
