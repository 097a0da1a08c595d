"""Attention of packed prompts over a paged key-value cache.

Packed: the new tokens of all rows are stored one after the other, without padding between rows. Row l has the tokens
cu_seqlens[l] to cu_seqlens[l + 1], as in FlashAttention's variable-length interface. The cache already contains their
keys and values, after lengths_L[l] older tokens of the row. So a prompt, a part of a prompt and a prompt that continues
a shared prefix are one case.

On a GPU this is one kernel, which needs no values on the host, so it can be part of a CUDA graph. Elsewhere, and for
heads that the kernel does not support, the pages of each row are gathered, one row after the other.

pool: (pages, K, S, C), one layer's keys or values, S tokens per page. table_LN: int64, the pages of each row in order.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from deskside.kernels.attention.context import PLAIN, AttentionContext
from deskside.kernels.attention.reference import attend, decode_attention, is_plain
from deskside.kernels.decode import attend_with_sdpa, gather_pages, kernel_supports

MAX_GROUP = 64  # query heads per key-value head in one tile of the kernel


def packed_attention(
    q_NHC: Tensor,
    k_PKSC: Tensor,
    v_PKSC: Tensor,
    table_LN: Tensor,
    lengths_L: Tensor,
    cu_seqlens: Tensor,
    options: AttentionContext = PLAIN,
) -> Tensor:
    """Attend from each new token to the tokens of its row up to itself, or the last `window` of them: (N, H, C).

    lengths_L: int64, older tokens of each row in the cache. cu_seqlens: int64 (L + 1,), rising from 0; the output of
    tokens from cu_seqlens[L] on is 0. options: window, scale, softcap and sinks.
    """
    if packed_kernel_supports(q_NHC.shape[1], k_PKSC):
        from deskside.kernels.prefill_triton import attend_packed

        return attend_packed(q_NHC, k_PKSC, v_PKSC, table_LN, lengths_L, cu_seqlens, options)
    out_NHC, window = torch.zeros_like(q_NHC), options.window
    starts, lengths = cu_seqlens.tolist(), lengths_L.tolist()
    for row, (begin, end, length) in enumerate(zip(starts, starts[1:], lengths, strict=False)):
        if begin == end:
            continue
        newest = length + end - begin
        # Pages before the first query's window are not read.
        first_page = 0 if window is None else max(0, length - window + 1) // k_PKSC.shape[2]
        first = first_page * k_PKSC.shape[2]
        q_1THC = q_NHC[begin:end][None]
        k_1LKC, v_1LKC = (
            gather_pages(pool, table_LN[row : row + 1, first_page:], newest - first)
            for pool in (k_PKSC, v_PKSC)
        )
        if length == 0 and window is None and is_plain(options) and not q_NHC.is_cuda:
            q_1HTC, k_1KLC, v_1KLC = (x.transpose(1, 2) for x in (q_1THC, k_1LKC, v_1LKC))
            o_1HTC = F.scaled_dot_product_attention(
                q_1HTC, k_1KLC, v_1KLC, is_causal=True, scale=options.scale, enable_gqa=True
            )
            out_NHC[begin:end] = o_1HTC[0].transpose(0, 1)
        else:
            positions_1T = torch.arange(length - first, newest - first, device=q_NHC.device)[None]
            function = attend_with_sdpa if is_plain(options) else attend
            o_1THC = decode_attention(q_1THC, k_1LKC, v_1LKC, positions_1T, options, function)
            out_NHC[begin:end] = o_1THC[0]
    return out_NHC


def packed_kernel_supports(heads: int, k_PKSC: Tensor) -> bool:
    """Return True if the Triton kernel supports this pool with this many query heads."""
    return heads // k_PKSC.shape[1] <= MAX_GROUP and kernel_supports(1, k_PKSC)
