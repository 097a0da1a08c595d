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

The scale is known in advance (from earlier steps, or from an amax that the producer computed), so one pass is enough.
`AMAX` accumulates the largest magnitude in place. Most programs only read it, because one atomic per tile would
serialize.

Only two bytes are written per value, so the number of instructions matters as much as the bytes. The conversion
instruction saturates by itself, and a maximum that propagates NaN is one instruction.
"""

import os

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")  # Triton's interpreter knows no PTX
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
    """|values|, where NaN counts as infinity: a maximum would drop it."""
    return tl.where(values == values, tl.abs(values), float("inf"))


@triton.jit
def larger(a, b):  # type: ignore[no-untyped-def]
    """Element by element, the larger magnitude of two tiles; NaN if either is NaN."""
    return tl.maximum(tl.abs(a), tl.abs(b), propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def largest_of(a, b, c, d):  # type: ignore[no-untyped-def]
    """Element by element, the largest magnitude of four tiles; NaN if any is NaN."""
    return larger(larger(a, b), larger(c, d))


@triton.jit
def note_amax(AMAX, magnitudes):  # type: ignore[no-untyped-def]
    """AMAX = max(AMAX, largest of `magnitudes`), a float32 scalar in memory. NaN counts as infinity."""
    noted = tl.load(AMAX)  # before the reduction, which hides the time that it takes
    largest = tl.max(tl.max(magnitude(magnitudes), axis=1), axis=0)
    if largest > noted:
        tl.atomic_max(AMAX, largest)


@triton.jit
def _interpreted(x, TYPE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Emulate the conversion of the GPU, except for its rounding, in Triton's interpreter."""
    LARGEST: tl.constexpr = 57344.0 if TYPE == tl.float8e5 else 448.0  # noqa: SIM300
    return tl.minimum(tl.maximum(x, -LARGEST), LARGEST).to(TYPE)


@triton.jit
def pack_words(a, b, c, d, TYPE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Four float32 tiles, saturated, as one int32 tile of their FP8 bytes, `a` in the lowest."""
    if INTERPRETED:
        x = _interpreted(a, TYPE).to(tl.uint8, bitcast=True).to(tl.int32)
        y = _interpreted(b, TYPE).to(tl.uint8, bitcast=True).to(tl.int32)
        z = _interpreted(c, TYPE).to(tl.uint8, bitcast=True).to(tl.int32)
        w = _interpreted(d, TYPE).to(tl.uint8, bitcast=True).to(tl.int32)
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
def rounded_once(x, TYPE: tl.constexpr):  # type: ignore[no-untyped-def]
    """A float32 tile in FP8, saturated. Triton's own conversion goes by way of float16 for 8.9, which rounds twice:
    about 0.2 % of the bytes would differ from those that `pack_words` writes."""
    if INTERPRETED:
        made = _interpreted(x, TYPE)
    else:
        packed = tl.inline_asm_elementwise(
            PACK_E5M2 if TYPE == tl.float8e5 else PACK_E4M3,  # noqa: SIM300
            "=r,r,r,r,r",
            [x],
            dtype=tl.uint8,
            is_pure=True,
            pack=4,
        )
        made = packed.to(TYPE, bitcast=True)
    return made


@triton.jit
def load_four(place, stride, mask):  # type: ignore[no-untyped-def]
    """Four tiles in float32: at the pointers `place` and one, two and three rows of `stride` values below them."""
    a = tl.load(place, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(place + stride, mask=mask, other=0.0).to(tl.float32)
    c = tl.load(place + 2 * stride, mask=mask, other=0.0).to(tl.float32)
    d = tl.load(place + 3 * stride, mask=mask, other=0.0).to(tl.float32)
    return a, b, c, d


@triton.jit
def store_fp8(  # type: ignore[no-untyped-def]
    ROWS, WORDS, a, b, c, d, scale, words, columns, mask, stride, N
):
    """Four tiles (words, columns), of the rows 4 words + 0 to 3, times scale and saturated, in FP8.

    ROWS: (N, stride); WORDS: its transpose (stride, N / 4) as int32. mask: what exists.
    """
    TYPE: tl.constexpr = ROWS.dtype.element_ty
    a *= scale
    b *= scale
    c *= scale
    d *= scale
    place = ROWS + words[:, None] * (4 * stride) + columns[None, :]
    tl.store(place, rounded_once(a, TYPE), mask=mask)
    tl.store(place + stride, rounded_once(b, TYPE), mask=mask)
    tl.store(place + 2 * stride, rounded_once(c, TYPE), mask=mask)
    tl.store(place + 3 * stride, rounded_once(d, TYPE), mask=mask)
    turned = tl.trans(pack_words(a, b, c, d, TYPE))
    place = WORDS + columns.to(tl.int64)[:, None] * (N // 4) + words[None, :]
    tl.store(place, turned, mask=tl.trans(mask))
