"""Attention of new tokens over a paged key-value cache, and what prepares a token for it.

While decoding, a row has one new token (a few when they are verified), and its keys and values are read once for them:
the memory's bandwidth decides the speed. On a GPU the row is cut into spans that different programs read at the same
time, and a second kernel joins their softmaxes (Flash-Decoding, Dao et al. 2023, pytorch.org/blog/flash-decoding).
How long a span is follows from the longest row that the cache can hold, so what a row gets does not depend on the rows
beside it. All query heads of one key-value head are one tile, so that keys are read once for the group.

Elsewhere, and for prompts that continue what is in the cache, pages are gathered into one tensor first, some rows at a
time: 256 rows that go on from 8,192 tokens each would need 2 GiB for every key-value head of 128 channels.

pool: (pages, K, S, C), one layer's keys or values, S tokens a page. table_BN: int64, pages of each row in order.
"""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import sdpa_kernel

from deskside.kernels.attention.reference import decode_attention
from deskside.kernels.attention.sdpa import UNPLANNED
from deskside.kernels.fused import QkvLayout
from deskside.kernels.fused.reference import qk_norm_rope

TILE_ROWS = 64  # query heads of one key-value head times new tokens that the kernel takes as one tile
GATHERED_BYTES = 2**28  # of keys and values that are copied at once, at least those of one row
HEAD_BYTES = 512  # of one head's channels: more would not fit a consumer card's shared memory
KERNEL_DTYPES = frozenset({torch.bfloat16, torch.float16, torch.float32})


def paged_attention(
    q_BTHC: Tensor,
    k_PKSC: Tensor,
    v_PKSC: Tensor,
    table_BN: Tensor,
    positions_BT: Tensor,
    bound: int,
    window: int | None = None,
    scale: float | None = None,
) -> Tensor:
    """New tokens at positions_BT (int64, rising in each row) over a cache that holds them. Returns (B, T, H, C).

    A query sees its row's entries 0..position, the last `window` of them. bound: above every position; what lies
    beyond may be left unread.
    """
    scale = q_BTHC.shape[-1] ** -0.5 if scale is None else scale
    if in_kernel(q_BTHC.shape[1] * q_BTHC.shape[2] // k_PKSC.shape[1], k_PKSC):
        from deskside.kernels.decode_triton import attend

        return attend(q_BTHC, k_PKSC, v_PKSC, table_BN, positions_BT, window, scale)
    function = partial(decode_attention, attend=_sdpa) if q_BTHC.is_cuda else decode_attention
    each = 2 * bound * k_PKSC.shape[1] * k_PKSC.shape[3] * k_PKSC.element_size()
    parts = []
    rows = max(1, GATHERED_BYTES // each)
    for first in range(0, len(q_BTHC), rows):
        part = slice(first, first + rows)
        k_BLKC, v_BLKC = (gather(pool, table_BN[part], bound) for pool in (k_PKSC, v_PKSC))
        # A NaN that another row has left there would come through: its weight of 0 times NaN is NaN.
        unread_BL = torch.arange(bound, device=q_BTHC.device) > positions_BT[part].amax(1, keepdim=True)
        for gathered in (k_BLKC, v_BLKC):
            gathered.masked_fill_(unread_BL[..., None, None], 0)
        parts.append(function(q_BTHC[part], k_BLKC, v_BLKC, positions_BT[part], window, scale))
        del k_BLKC, v_BLKC  # before the next ones are made
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def in_kernel(tile_rows: int, k_PKSC: Tensor) -> bool:
    """Return whether the Triton kernel supports this: few queries, moderate head_dim, page size a power of two."""
    _, _, size, C = k_PKSC.shape
    narrow = tile_rows <= TILE_ROWS and C * k_PKSC.element_size() <= HEAD_BYTES
    fits = narrow and size & (size - 1) == 0
    return k_PKSC.is_cuda and k_PKSC.dtype in KERNEL_DTYPES and fits


def gather(pool_PKSC: Tensor, table_BN: Tensor, bound: int) -> Tensor:
    """Entries 0..bound of every row, copied into one tensor (B, bound, K, C)."""
    size = pool_PKSC.shape[2]
    pages_BnKSC = pool_PKSC[table_BN[:, : -(-bound // size)]]
    return pages_BnKSC.transpose(2, 3).flatten(1, 2)[:, :bound]


def _sdpa(q_BTHC: Tensor, k_BLKC: Tensor, v_BLKC: Tensor, allowed_BTL: Tensor, scale: float) -> Tensor:
    """`attention.reference.attend` by SDPA. No fused kernel takes a mask and groups, so the query heads of one
    key-value head are put below each other, as more queries of it: repeating keys and values would copy them."""
    B, T, H, C = q_BTHC.shape
    K = k_BLKC.shape[2]
    q_BKMC = q_BTHC.unflatten(2, (K, H // K)).permute(0, 2, 3, 1, 4).reshape(B, K, -1, C)
    allowed_B1ML = allowed_BTL.repeat(1, H // K, 1)[:, None]
    with sdpa_kernel(list(UNPLANNED)):
        o_BKMC = F.scaled_dot_product_attention(
            q_BKMC, k_BLKC.transpose(1, 2), v_BLKC.transpose(1, 2), attn_mask=allowed_B1ML, scale=scale
        )
    return o_BKMC.view(B, K, H // K, T, C).permute(0, 3, 1, 2, 4).flatten(2, 3)


def into_cache(
    qkv_NW: Tensor,
    norms: tuple[Tensor, Tensor] | None,
    angles: tuple[Tensor, Tensor] | None,
    layout: QkvLayout,
    pools_PKSC: tuple[Tensor, Tensor],
    where_N: tuple[Tensor, Tensor, Tensor],
) -> Tensor:
    """QK-norm and RoPE of N tokens; keys and values go into their pages, queries (N, H, C) are returned.

    norms: weights (C,) of the norms of q and k. angles: cos and sin, (positions, C / 2) float32. pools: of keys and of
    values. where: each token's position in its row, page and place in the page, int64. Two tokens at one place leave
    either of them there.
    """
    if qkv_NW.is_cuda:
        from deskside.kernels.decode_triton import into_cache as kernel

        return kernel(qkv_NW, norms, angles, layout, pools_PKSC, where_N)
    position_N, page_N, place_N = where_N
    turned = None if angles is None else (angles[0][position_N], angles[1][position_N])
    q_weight, k_weight = norms or (None, None)
    q_NHC, k_NKC = qk_norm_rope(qkv_NW, q_weight, k_weight, turned, layout)
    for pool_PKSC, new_NKC in zip(pools_PKSC, (k_NKC, layout.split(qkv_NW)[2]), strict=True):
        pool_PKSC[page_N, :, place_N] = new_NKC.to(pool_PKSC.dtype)
    return q_NHC
