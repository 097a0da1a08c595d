"""Building blocks of the fused kernels: the cast to FP8 with its amax, written row-wise and transposed.

The tensor cores of Hopper and Ada take FP8 operands only with the summed dimension contiguous. An activation is summed
over its columns in the forward product and over its rows (the tokens) in the weight gradient, so the kernel that
computes it writes it twice, as is and transposed. The values are then never read again in BF16.

Transposing single bytes would be slow. Instead, a kernel computes four tiles, of the rows 4i, 4i + 1, 4i + 2 and 4i +
3, and packs them into one tile of 32-bit words. Word i of a column then holds four neighbors of the transposed
tensor:

    rows      4i    a0 a1 a2 ...        word i of column 0 = [a0 b0 c0 d0]
              4i+1  b0 b1 b2 ...        word i of column 1 = [a1 b1 c1 d1]
              4i+2  c0 c1 c2 ...
              4i+3  d0 d1 d2 ...        so the transposed tile is stored as whole words

The packing is written in PTX: taking single bytes out of Triton's own pairs of FP8 values comes out wrong where the
pairs are also stored, because ptxas 12.8 miscompiles it for sm_90a (docs/log.md, 2026-11-21).

The scale is known in advance (from earlier steps, or from an amax that another kernel computed), so one pass is enough.
`AMAX` is raised in place to the largest magnitude. Most programs only read it, because one atomic per tile would
serialize them.

Only two bytes are written per value, so instructions cost as much as memory traffic. The conversion instruction
saturates by itself, and a maximum that propagates NaN is one instruction.
"""

import os

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")  # Triton's interpreter cannot run PTX
_PACK = """
{
.reg .b16 low, high;
cvt.rn.satfinite.FORMAT.f32 low, $2, $1;
cvt.rn.satfinite.FORMAT.f32 high, $4, $3;
mov.b32 $0, {low, high};
}
"""
PACK_E4M3 = tl.constexpr(_PACK.replace("FORMAT", "e4m3x2"))
PACK_E5M2 = tl.constexpr(_PACK.replace("FORMAT", "e5m2x2"))


@triton.jit
def magnitude(values):  # type: ignore[no-untyped-def]
    """Return |values| with NaN replaced by infinity, because a maximum would drop NaN."""
    return tl.where(values == values, tl.abs(values), float("inf"))


@triton.jit
def max_abs(a, b):  # type: ignore[no-untyped-def]
    """Return the elementwise maximum of the magnitudes of two tiles; NaN if either is NaN."""
    return tl.maximum(tl.abs(a), tl.abs(b), propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def max_abs_of_four(a, b, c, d):  # type: ignore[no-untyped-def]
    """Return the elementwise maximum of the magnitudes of four tiles; NaN if any is NaN."""
    return max_abs(max_abs(a, b), max_abs(c, d))


@triton.jit
def update_amax(AMAX, magnitudes):  # type: ignore[no-untyped-def]
    """Raise the float32 scalar AMAX in memory to the maximum of `magnitudes`. NaN counts as infinity."""
    current = tl.load(AMAX)  # loaded before the reduction, which hides the latency
    largest = tl.max(tl.max(magnitude(magnitudes), axis=1), axis=0)
    if largest > current:
        tl.atomic_max(AMAX, largest)


@triton.jit
def _interpreted_cast(x, TYPE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Convert to FP8 with saturation in Triton's interpreter, whose rounding differs from the GPU's."""
    LARGEST: tl.constexpr = 57344.0 if TYPE == tl.float8e5 else 448.0  # noqa: SIM300
    return tl.minimum(tl.maximum(x, -LARGEST), LARGEST).to(TYPE)


@triton.jit
def pack_words(a, b, c, d, TYPE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Pack four float32 tiles, converted to FP8 with saturation, into one int32 tile, `a` in the lowest byte."""
    if INTERPRETED:
        x = _interpreted_cast(a, TYPE).to(tl.uint8, bitcast=True).to(tl.int32)
        y = _interpreted_cast(b, TYPE).to(tl.uint8, bitcast=True).to(tl.int32)
        z = _interpreted_cast(c, TYPE).to(tl.uint8, bitcast=True).to(tl.int32)
        w = _interpreted_cast(d, TYPE).to(tl.uint8, bitcast=True).to(tl.int32)
        packed = x | (y << 8) | (z << 16) | (w << 24)
    else:
        packed = tl.inline_asm_elementwise(
            PACK_E5M2 if TYPE == tl.float8e5 else PACK_E4M3,  # noqa: SIM300
            "=r,r,r,r,r",
            [a, b, c, d],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    return packed


@triton.jit
def to_fp8(x, TYPE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Convert a float32 tile to FP8 with saturation and a single rounding.

    On compute capability 8.9, Triton's own conversion goes through float16 and rounds twice: about 0.2 % of the bytes
    would differ from those of `pack_words`.
    """
    if INTERPRETED:
        result = _interpreted_cast(x, TYPE)
    else:
        packed = tl.inline_asm_elementwise(
            PACK_E5M2 if TYPE == tl.float8e5 else PACK_E4M3,  # noqa: SIM300
            "=r,r,r,r,r",
            [x],
            dtype=tl.uint8,
            is_pure=True,
            pack=4,
        )
        result = packed.to(TYPE, bitcast=True)
    return result


@triton.jit
def load_four(ptrs, stride, mask):  # type: ignore[no-untyped-def]
    """Load four tiles as float32: at the pointers `ptrs`, and one, two and three rows of `stride` values below."""
    a = tl.load(ptrs, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(ptrs + stride, mask=mask, other=0.0).to(tl.float32)
    c = tl.load(ptrs + 2 * stride, mask=mask, other=0.0).to(tl.float32)
    d = tl.load(ptrs + 3 * stride, mask=mask, other=0.0).to(tl.float32)
    return a, b, c, d


@triton.jit
def store_fp8(  # type: ignore[no-untyped-def]
    ROWS, WORDS, a, b, c, d, scale, words, columns, mask, stride, N
):
    """Scale four tiles (words, columns), of the rows 4 words + 0 to 3, convert them to FP8, and write both layouts.

    ROWS: (N, stride). WORDS: its transpose (stride, N / 4) as int32. mask: True inside the matrix.
    """
    TYPE: tl.constexpr = ROWS.dtype.element_ty
    a *= scale
    b *= scale
    c *= scale
    d *= scale
    ptrs = ROWS + words[:, None] * (4 * stride) + columns[None, :]
    tl.store(ptrs, to_fp8(a, TYPE), mask=mask)
    tl.store(ptrs + stride, to_fp8(b, TYPE), mask=mask)
    tl.store(ptrs + 2 * stride, to_fp8(c, TYPE), mask=mask)
    tl.store(ptrs + 3 * stride, to_fp8(d, TYPE), mask=mask)
    transposed = tl.trans(pack_words(a, b, c, d, TYPE))
    ptrs = WORDS + columns.to(tl.int64)[:, None] * (N // 4) + words[None, :]
    tl.store(ptrs, transposed, mask=tl.trans(mask))
