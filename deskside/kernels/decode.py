"""Attention of new tokens over a paged key-value cache, and the step before it: QK-norm, RoPE and the cache write.

While decoding, a row has one new token (or a few, which speculative decoding verifies), and attention reads all keys
and values of the row, so memory bandwidth limits the speed. On a GPU the row is cut into spans that are read in
parallel by different programs, and a second kernel combines their softmaxes (Flash-Decoding, Dao et al. 2023,
pytorch.org/blog/flash-decoding). The length of a span depends on the longest row that the cache can hold, and with one
new token also on the number of rows, so the other rows of a batch change a row's result only by rounding. All query
heads of one key-value head are one tile, so keys are read once for the group.

On a CPU, and for more new tokens than the kernel takes (texts whose likelihood is measured), the pages are first
gathered into one tensor, some rows at a time: 256 rows of 8,192 cached tokens would need 1 GiB in bfloat16 for every
key-value head of 128 channels. prefill.py has the attention of prompts.

pool: (pages, K, S, C), one layer's keys or values, S tokens per page. table_BN: int64, the pages of each row in order.
"""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import sdpa_kernel

from deskside.kernels.attention.context import PLAIN, AttentionContext
from deskside.kernels.attention.reference import decode_attention, is_plain
from deskside.kernels.attention.sdpa import ALL_BUT_CUDNN
from deskside.kernels.fused import QkvLayout
from deskside.kernels.fused.reference import qk_norm_rope

MAX_TILE_ROWS = 64  # (query heads per key-value head) x (new tokens) that the kernel takes as one tile
MAX_NEW_ROWS = 32  # the same for `attend_from_new`, whose tiles of 64 spill registers
GATHERED_BYTES = 2**28  # keys and values that are gathered at once; a single row may exceed it
MAX_HEAD_BYTES = 512  # of one head's channels: more would not fit a consumer card's shared memory
KERNEL_DTYPES = frozenset({torch.bfloat16, torch.float16, torch.float32})


def paged_attention(
    q_BTHC: Tensor,
    k_PKSC: Tensor,
    v_PKSC: Tensor,
    table_BN: Tensor,
    positions_BT: Tensor,
    bound: int,
    options: AttentionContext = PLAIN,
) -> Tensor:
    """Attend from new tokens to the cache, which already contains them. Returns (B, T, H, C).

    positions_BT: int64, non-decreasing in each row. A query sees entries 0..position of its row, or the last `window`
    of them. bound: greater than every position; entries from `bound` on need not be read. options: window, scale,
    softcap and sinks.
    """
    if kernel_supports(q_BTHC.shape[1] * q_BTHC.shape[2] // k_PKSC.shape[1], k_PKSC):
        from deskside.kernels.decode_triton import attend

        return attend(q_BTHC, k_PKSC, v_PKSC, table_BN, positions_BT, options)
    with_sdpa = q_BTHC.is_cuda and is_plain(options)
    function = partial(decode_attention, attend=attend_with_sdpa) if with_sdpa else decode_attention
    row_bytes = 2 * bound * k_PKSC.shape[1] * k_PKSC.shape[3] * k_PKSC.element_size()
    parts = []
    batch_rows = max(1, GATHERED_BYTES // row_bytes)
    for start in range(0, len(q_BTHC), batch_rows):
        part = slice(start, start + batch_rows)
        k_BLKC, v_BLKC = (gather_pages(pool, table_BN[part], bound) for pool in (k_PKSC, v_PKSC))
        # Unread entries have the weight 0, but another row may have left a NaN there, and 0 times NaN is NaN.
        unread_BL = torch.arange(bound, device=q_BTHC.device) > positions_BT[part].amax(1, keepdim=True)
        for gathered in (k_BLKC, v_BLKC):
            gathered.masked_fill_(unread_BL[..., None, None], 0)
        parts.append(function(q_BTHC[part], k_BLKC, v_BLKC, positions_BT[part], options))
        del k_BLKC, v_BLKC  # before the next ones are allocated
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def kernel_supports(tile_rows: int, k_PKSC: Tensor) -> bool:
    """Return True if the Triton kernel supports this: few queries, moderate head_dim, page size a power of two."""
    _, _, page_size, C = k_PKSC.shape
    small = tile_rows <= MAX_TILE_ROWS and C * k_PKSC.element_size() <= MAX_HEAD_BYTES
    power_of_two = page_size & (page_size - 1) == 0
    return k_PKSC.is_cuda and k_PKSC.dtype in KERNEL_DTYPES and small and power_of_two


def gather_pages(pool_PKSC: Tensor, table_BN: Tensor, bound: int) -> Tensor:
    """Return a copy of entries 0..bound - 1 of every row, (B, bound, K, C)."""
    page_size = pool_PKSC.shape[2]
    pages_BnKSC = pool_PKSC[table_BN[:, : -(-bound // page_size)]]
    return pages_BnKSC.transpose(2, 3).flatten(1, 2)[:, :bound]


def attend_with_sdpa(
    q_BTHC: Tensor, k_BLKC: Tensor, v_BLKC: Tensor, allowed_BTL: Tensor, scale: float
) -> Tensor:
    """Compute `attention.reference.attend` with SDPA.

    No fused kernel of SDPA takes both a mask and grouped heads. So the query heads of one key-value head are stacked
    along the query dimension; repeating keys and values instead would copy them.
    """
    B, T, H, C = q_BTHC.shape
    K = k_BLKC.shape[2]
    q_BKMC = q_BTHC.unflatten(2, (K, H // K)).permute(0, 2, 3, 1, 4).reshape(B, K, -1, C)
    allowed_B1ML = allowed_BTL.repeat(1, H // K, 1)[:, None]
    with sdpa_kernel(list(ALL_BUT_CUDNN)):
        o_BKMC = F.scaled_dot_product_attention(
            q_BKMC, k_BLKC.transpose(1, 2), v_BLKC.transpose(1, 2), attn_mask=allowed_B1ML, scale=scale
        )
    return o_BKMC.view(B, K, H // K, T, C).permute(0, 3, 1, 2, 4).flatten(2, 3)


def qk_norm_rope_into_cache(
    qkv_NW: Tensor,
    norms: tuple[Tensor, Tensor] | None,
    angles: tuple[Tensor, Tensor] | None,
    layout: QkvLayout,
    pools_PKSC: tuple[Tensor, Tensor],
    slots_N: tuple[Tensor, Tensor, Tensor],
) -> Tensor:
    """Apply QK-norm and RoPE to N tokens, write keys and values into their pages, and return the queries (N, H, C).

    norms: weights (C,) of the norms of q and k. angles: cos and sin, (positions, C / 2) float32. pools: those of keys
    and of values. slots: position in the row, page, and offset in the page of each token, int64 (N,) each. Of two
    tokens with the same slot, either may be stored.
    """
    if qkv_NW.is_cuda:
        from deskside.kernels.decode_triton import qk_norm_rope_into_cache as kernel

        return kernel(qkv_NW, norms, angles, layout, pools_PKSC, slots_N)
    position_N, page_N, offset_N = slots_N
    token_angles = None if angles is None else (angles[0][position_N], angles[1][position_N])
    q_weight, k_weight = norms or (None, None)
    q_NHC, k_NKC = qk_norm_rope(qkv_NW, q_weight, k_weight, token_angles, layout)
    for pool_PKSC, new_NKC in zip(pools_PKSC, (k_NKC, layout.split(qkv_NW)[2]), strict=True):
        pool_PKSC[page_N, :, offset_N] = new_NKC.to(pool_PKSC.dtype)
    return q_NHC


def attend_from_new(
    qkv_NW: Tensor,
    norms: tuple[Tensor, Tensor] | None,
    angles: tuple[Tensor, Tensor] | None,
    layout: QkvLayout,
    pools_PKSC: tuple[Tensor, Tensor],
    table_NM: Tensor,
    positions_N: Tensor,
    bound: int,
    options: AttentionContext,
) -> Tensor:
    """`qk_norm_rope_into_cache`, then `paged_attention`, of one new token in each of N rows: (N, H, C).

    norms, angles, layout: of `qk_norm_rope_into_cache`. table, positions, bound, options: of `paged_attention`. On a
    GPU, one kernel does all but the sum over spans, if it supports this many heads.
    """
    k_PKSC = pools_PKSC[0]
    group = layout.heads // layout.kv_heads
    if group <= MAX_NEW_ROWS and kernel_supports(group, k_PKSC):
        from deskside.kernels.decode_new_triton import attend_from_new as kernel

        return kernel(qkv_NW, norms, angles, layout, pools_PKSC, table_NM, positions_N, options)
    page_size = k_PKSC.shape[2]
    pages_N = table_NM.gather(1, (positions_N // page_size)[:, None])[:, 0]
    slots_N = (positions_N, pages_N, positions_N % page_size)
    q_NHC = qk_norm_rope_into_cache(qkv_NW, norms, angles, layout, pools_PKSC, slots_N)
    return paged_attention(q_NHC[:, None], *pools_PKSC, table_NM, positions_N[:, None], bound, options)[:, 0]
