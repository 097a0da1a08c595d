"""What the fused kernels share: the cast to FP8 with its largest value, written in rows and in columns.

A tensor core of Hopper and Ada takes FP8 operands only with the summed dimension contiguous. The same tensor is summed
over its columns in one product and over its rows (the tokens) in the weight gradient, so it is written twice: as it
is, and transposed. Both leave the kernel that made the values, which are then never read again in BF16.

The scale is known before (it comes from earlier steps, or from an amax taken by the producer), so one pass is enough.
`AMAX` collects the largest magnitude in place; most programs only read it, because an atomic per tile would queue.
"""

import triton
import triton.language as tl


@triton.jit
def note_amax(AMAX, values):  # type: ignore[no-untyped-def]
    """AMAX = max(AMAX, largest magnitude of `values`), a float32 scalar in memory. NaN counts as infinity."""
    magnitude = tl.where(values == values, tl.abs(values), float("inf"))
    largest = tl.max(tl.max(magnitude, axis=1), axis=0)
    if largest > tl.load(AMAX):
        tl.atomic_max(AMAX, largest)


@triton.jit
def store_fp8(  # type: ignore[no-untyped-def]
    ROWS, COLUMNS, values, scale, rows, columns, here, there, stride, N, LARGEST: tl.constexpr
):
    """values (rows, columns), float32, times scale, saturated, into ROWS (N, stride) and COLUMNS (stride, N).

    here, there: which rows and columns exist.
    """
    scaled = tl.minimum(tl.maximum(values * scale, -LARGEST), LARGEST)
    place = ROWS + rows[:, None] * stride + columns[None, :]
    tl.store(place, scaled.to(ROWS.dtype.element_ty), mask=here[:, None] & there[None, :])
    # Turned in float32: Triton 3.6 was seen to turn a tile of FP8 wrongly on an H200.
    turned = tl.trans(scaled).to(COLUMNS.dtype.element_ty)
    place = COLUMNS + columns.to(tl.int64)[:, None] * N + rows[None, :]
    tl.store(place, turned, mask=there[:, None] & here[None, :])
