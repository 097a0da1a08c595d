"""The transpose of an FP8 matrix that exists already, four rows at a time as in `triton_common`."""

import triton
import triton.language as tl


@triton.jit
def transpose(X, WORDS, N, K, stride, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):  # type: ignore[no-untyped-def]
    """X: (N, K) bytes. WORDS: (K, N / 4) int32, `stride` from row to row."""
    words = tl.program_id(0).to(tl.int64) * (BLOCK_N // 4) + tl.arange(0, BLOCK_N // 4)
    columns = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    mask = (words < N // 4)[:, None] & (columns < K)[None, :]
    place = X + words[:, None] * (4 * K) + columns[None, :]
    packed = tl.load(place, mask=mask, other=0).to(tl.int32)
    packed |= tl.load(place + K, mask=mask, other=0).to(tl.int32) << 8
    packed |= tl.load(place + 2 * K, mask=mask, other=0).to(tl.int32) << 16
    packed |= tl.load(place + 3 * K, mask=mask, other=0).to(tl.int32) << 24
    turned = WORDS + columns.to(tl.int64)[:, None] * stride + words[None, :]
    tl.store(turned, tl.trans(packed), mask=tl.trans(mask))
