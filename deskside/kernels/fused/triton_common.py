"""What the fused kernels share: the cast to FP8 with its largest value, written in rows and in columns.

A tensor core of Hopper and Ada takes FP8 operands only with the summed dimension contiguous. The same tensor is summed
over its columns in one product and over its rows (the tokens) in the weight gradient, so it is written twice: as it
is, and transposed. Both leave the kernel that made the values, which are then never read again in BF16.

Bytes are not turned one by one. A kernel computes four tiles, of the rows 4i, 4i + 1, 4i + 2 and 4i + 3, and packs the
bytes into one tile of 32-bit words; the word i of a column is then four neighbours of the transposed tensor. (A tile of
single bytes that Triton 3.6 turned through shared memory came out wrong on an H200, and slow.)

The scale is known before (it comes from earlier steps, or from an amax taken by the producer), so one pass is enough.
`AMAX` collects the largest magnitude in place; most programs only read it, because an atomic per tile would queue.
"""

import triton
import triton.language as tl


@triton.jit
def magnitude(values):  # type: ignore[no-untyped-def]
    """|values|, where NaN counts as infinity: a maximum would drop it."""
    return tl.where(values == values, tl.abs(values), float("inf"))


@triton.jit
def note_amax(AMAX, magnitudes):  # type: ignore[no-untyped-def]
    """AMAX = max(AMAX, largest of `magnitudes`), a float32 scalar in memory."""
    largest = tl.max(tl.max(magnitudes, axis=1), axis=0)
    if largest > tl.load(AMAX):
        tl.atomic_max(AMAX, largest)


@triton.jit
def store_rows(ROWS, values, scale, place, mask, LARGEST: tl.constexpr):  # type: ignore[no-untyped-def]
    """Write values times scale, saturated, in FP8 at ROWS + place. Returns their bytes as int32."""
    scaled = tl.minimum(tl.maximum(values * scale, -LARGEST), LARGEST).to(ROWS.dtype.element_ty)
    tl.store(ROWS + place, scaled, mask=mask)
    return scaled.to(tl.uint8, bitcast=True).to(tl.int32)


@triton.jit
def store_columns(WORDS, packed, words, columns, limit, N):  # type: ignore[no-untyped-def]
    """packed (words, columns) into WORDS, the transposed tensor (columns, N / 4) as int32."""
    place = WORDS + columns.to(tl.int64)[:, None] * (N // 4) + words[None, :]
    tl.store(place, tl.trans(packed), mask=(columns < limit)[:, None] & (words < N // 4)[None, :])
