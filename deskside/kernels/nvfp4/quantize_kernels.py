"""The kernels of the NVFP4 quantiser; quantize.py launches them and tells what they are for.

Every tile is taken as (M, S) with the summed dimension S last, whichever way the matrix lies in memory: only the
addresses differ. It is then seen as (M / A, A, S / 16, 16) with A x 16 values sharing a scale, A = 1 or 16, and all
work is elementwise or a reduction over those. The Hadamard transform is a product with a constant matrix: 128 x 128,
or 64 x 64 with four copies of H16 on its diagonal. Programs walk over several tiles, so that each reads it once.

Steps, names and the order of operations are those of the torch reference, precision/nvfp4.py.
"""

import triton
import triton.language as tl

from deskside.kernels.nvfp4.rounding import (
    bf16_nearest,
    e2m1_nearest,
    e2m1_stochastic,
    e4m3_bits,
    e4m3_nearest,
    e4m3_stochastic,
    e4m3_up,
    uniform,
)

LARGEST_FLOAT = tl.constexpr(3.4028234663852886e38)


@triton.jit
def _corner(tile, N, K, BM: tl.constexpr, BS: tl.constexpr, ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    """First m and s of a tile of an (N, K) matrix; ROWS: the summed dimension S is N, else K. K runs fastest."""
    across = tl.cdiv(K, BM if ROWS else BS)
    m, s = (tile % across, tile // across) if ROWS else (tile // across, tile % across)
    return m * BM, s * BS


@triton.jit
def _at(m, s, K, ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Where an element, or a block scale of the reference's layout, lies in memory; K: the length of its row."""
    return s.to(tl.int64) * K + m if ROWS else m.to(tl.int64) * K + s


@triton.jit
def _rotation(matrix_ptr, signs_ptr, HADAMARD: tl.constexpr, BS: tl.constexpr):  # type: ignore[no-untyped-def]
    """diag(signs) H, scaled by the power of two at or below 1 / sqrt(HADAMARD).

    Sums of unscaled values would overflow from 2e37 on, and a power of two changes no bit of them.
    """
    i = tl.arange(0, BS)
    matrix = tl.load(matrix_ptr + i[:, None] * BS + i[None, :]) * (0.25 if HADAMARD == 16 else 0.0625)
    return matrix * tl.load(signs_ptr + i % HADAMARD).to(matrix.dtype)[:, None]


@triton.jit
def _values(x_ptr, rotation, at, mask, HADAMARD: tl.constexpr, INTERPRETED: tl.constexpr):  # type: ignore[no-untyped-def]
    """A tile in float32, transformed. A transform of 16 rounds to x's dtype, as NVIDIA's kernels do."""
    x = tl.load(x_ptr + at, mask=mask, other=0.0)
    values = x.to(tl.float32)
    if HADAMARD > 0:
        BF16: tl.constexpr = x.dtype == tl.bfloat16
        values = tl.dot(x.to(rotation.dtype), rotation, input_precision="ieee")
        if HADAMARD == 128:
            values *= 1.4142135623730951  # 1 / sqrt(128), of which the rotation has 1 / 16
        if HADAMARD == 16 and BF16:
            if INTERPRETED:  # whose own conversion does not round to even
                values = bf16_nearest(values)
            else:
                values = values.to(tl.bfloat16).to(tl.float32)
    return values


@triton.jit
def amax_kernel(  # type: ignore[no-untyped-def]
    x_ptr, matrix_ptr, signs_ptr, amax_ptr, N, K, tiles,
    HADAMARD: tl.constexpr, ROWS: tl.constexpr, BM: tl.constexpr, BS: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Largest magnitude of the transformed tensor. As integers: the bits of NaN are above those of every number."""
    rotation = 0.0
    if HADAMARD > 0:
        rotation = _rotation(matrix_ptr, signs_ptr, HADAMARD, BS)
    largest = tl.zeros((BM, BS), tl.int32)
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        m0, s0 = _corner(tile, N, K, BM, BS, ROWS)
        m = (m0 + tl.arange(0, BM))[:, None]
        s = (s0 + tl.arange(0, BS))[None, :]
        mask = (m < K) & (s < N) if ROWS else (m < N) & (s < K)
        x = _values(x_ptr, rotation, _at(m, s, K, ROWS), mask, HADAMARD, INTERPRETED)
        largest = tl.maximum(largest, x.to(tl.int32, bitcast=True) & 0x7FFFFFFF)
    tl.atomic_max(amax_ptr, tl.max(tl.max(largest, axis=1), axis=0))


@triton.jit
def _in_sequence(x, P: tl.constexpr, Q: tl.constexpr):  # type: ignore[no-untyped-def]
    """Sum of (P, Q, 16) over the last dimension, strictly from the first to the last: (P, Q, 1).

    Eight neighbours lie in one thread, so the first half is summed, handed over, and the second half added to it.
    """
    even, odd = tl.split(tl.reshape(x, (P, Q, 2, 2, 2, 2)))
    x04, x26 = tl.split(even)
    x15, x37 = tl.split(odd)
    x0, x4 = tl.split(x04)
    x2, x6 = tl.split(x26)
    x1, x5 = tl.split(x15)
    x3, x7 = tl.split(x37)
    half = tl.arange(0, 2)[None, None, :]
    first = ((((((x0 + x1) + x2) + x3) + x4) + x5) + x6) + x7
    start = tl.sum(tl.where(half == 0, first, 0.0), axis=2, keep_dims=True)
    both = (((((((start + x0) + x1) + x2) + x3) + x4) + x5) + x6) + x7
    return tl.sum(tl.where(half == 1, both, 0.0), axis=2, keep_dims=True)


@triton.jit
def _block_error(squares, P: tl.constexpr, A: tl.constexpr, Q: tl.constexpr, ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Sum of (P, A, Q, 16) over A and 16, in the reference's order, for it decides near-ties: (P, 1, Q, 1).

    That order is along the memory's rows first for a 16 x 16 tile, whichever dimension is summed.
    """
    if A == 1:
        total = _in_sequence(tl.reshape(squares, (P, Q, 16)), P, Q)
    elif ROWS:
        squares = tl.reshape(tl.permute(squares, (2, 3, 0, 1)), (Q * 16, P, 16))
        total = tl.trans(_in_halves(_in_sequence(squares, Q * 16, P), Q, P))
    else:
        total = _in_halves(_in_sequence(tl.reshape(squares, (P * 16, Q, 16)), P * 16, Q), P, Q)
    return tl.reshape(total, (P, 1, Q, 1))


@triton.jit
def _in_halves(x, P: tl.constexpr, Q: tl.constexpr):  # type: ignore[no-untyped-def]
    """Sum of each 16 of (P x 16, Q, 1), the first half plus the second, again and again: (P, Q)."""
    x = tl.sum(tl.reshape(x, (P, 2, 8, Q)), axis=1)
    x = tl.sum(tl.reshape(x, (P, 2, 4, Q)), axis=1)
    x = tl.sum(tl.reshape(x, (P, 2, 2, Q)), axis=1)
    return tl.sum(x, axis=1)


@triton.jit
def _over_1536(v, INTERPRETED: tl.constexpr):  # type: ignore[no-untyped-def]
    """v / 1536, correctly rounded: a product, its exact remainder, one correction (Markstein 1990)."""
    inverse = 0.0006510416860692203  # 1 / 1536 in float32
    quotient = v * inverse
    if INTERPRETED:  # whose fma rounds twice
        quotient = tl.div_rn(v, tl.full(v.shape, 1536.0, tl.float32))
    else:
        quotient = tl.fma(tl.fma(quotient, -1536.0, v), inverse, quotient)
    return quotient


@triton.jit
def _encode(block_scale, decode):  # type: ignore[no-untyped-def]
    """1 / (block scale x global scale); a block scale of zero gives the largest float32."""
    product = block_scale * decode
    return tl.minimum(tl.div_rn(tl.full(product.shape, 1.0, tl.float32), product), LARGEST_FLOAT)


@triton.jit
def _candidate(  # type: ignore[no-untyped-def]
    size, block_scale, decode, amax,
    P: tl.constexpr, A: tl.constexpr, Q: tl.constexpr, ROWS: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Magnitudes (P, A, Q, 16) rounded with these block scales, and each block's squared error."""
    rounded = e2m1_nearest(tl.minimum(size * _encode(block_scale, decode), 6.0))
    away = _over_1536(rounded * block_scale * amax, INTERPRETED) - size
    return rounded, _block_error(away * away, P, A, Q, ROWS)


@triton.jit
def _store_packed(codes_ptr, block_scale_ptr, code, byte, m, s0, M, S, BM: tl.constexpr, BS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Codes (BM, BS) as (M, S / 2) bytes, block scales (BM, BS / 16) as (M, S / 16)."""
    low, high = tl.split(tl.reshape(code, (BM, BS // 2, 2)))
    pair = (s0 // 2 + tl.arange(0, BS // 2))[None, :]
    mask = (m < M) & (pair < S // 2)
    tl.store(codes_ptr + m.to(tl.int64) * (S // 2) + pair, (low | (high << 4)).to(tl.uint8), mask=mask)
    block = (s0 // 16 + tl.arange(0, BS // 16))[None, :]
    mask = (m < M) & (block < S // 16)
    tl.store(block_scale_ptr + m.to(tl.int64) * (S // 16) + block, byte, mask=mask)


@triton.jit(do_not_specialize=["seed"])
def quantize_kernel(  # type: ignore[no-untyped-def]
    x_ptr, matrix_ptr, signs_ptr, amax_ptr, values_ptr, block_scale_ptr, global_scale_ptr, N, K, tiles, seed,
    TOP_INVERSE: tl.constexpr, RANGE: tl.constexpr, HADAMARD: tl.constexpr, ROWS: tl.constexpr,
    A: tl.constexpr, ROUNDING: tl.constexpr, FOUR_OVER_SIX: tl.constexpr, SCALE_UP: tl.constexpr,
    PACKED: tl.constexpr, BM: tl.constexpr, BS: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Write an operand, emulated or packed, and its global scale.

    values_ptr: the emulated operand, laid out as x, or the packed codes, whose block scales go to block_scale_ptr.
    """
    P: tl.constexpr = BM // A
    Q: tl.constexpr = BS // 16
    amax = tl.load(amax_ptr)
    whole_range = tl.full((), RANGE, tl.float32)
    encode = tl.minimum(tl.div_rn(whole_range, amax), LARGEST_FLOAT)
    encode = tl.where(encode == 0.0, 1.0, encode)  # amax is infinite
    decode = tl.div_rn(tl.full((), 1.0, tl.float32), encode)
    if tl.program_id(0) == 0:
        exact = tl.div_rn(amax, whole_range)
        # Written so that NaN stays: the comparison is false for it.
        tl.store(global_scale_ptr, tl.where(exact < 2.938735877055719e-39, 2.938735877055719e-39, exact))
    rotation = 0.0
    if HADAMARD > 0:
        rotation = _rotation(matrix_ptr, signs_ptr, HADAMARD, BS)
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        m0, s0 = _corner(tile, N, K, BM, BS, ROWS)
        m = (m0 + tl.arange(0, BM))[:, None]
        s = (s0 + tl.arange(0, BS))[None, :]
        mask = (m < K) & (s < N) if ROWS else (m < N) & (s < K)
        at = _at(m, s, K, ROWS)
        x = tl.reshape(_values(x_ptr, rotation, at, mask, HADAMARD, INTERPRETED), (P, A, Q, 16))
        size = tl.abs(x)
        block_amax = tl.max(size, axis=3, keep_dims=True)
        if A > 1:
            block_amax = tl.max(block_amax, axis=1, keep_dims=True)
        if FOUR_OVER_SIX:
            base = tl.div_rn(block_amax, tl.full(block_amax.shape, 6.0, tl.float32)) * encode
            scale6 = e4m3_nearest(tl.minimum(base, 448.0))
            scale4 = e4m3_nearest(tl.minimum(base * 1.5, 448.0))
            rounded6, error6 = _candidate(size, scale6, decode, amax, P, A, Q, ROWS, INTERPRETED)
            rounded4, error4 = _candidate(size, scale4, decode, amax, P, A, Q, ROWS, INTERPRETED)
            block_scale = tl.where(error4 < error6, scale4, scale6)
            rounded = tl.where(error4 < error6, rounded4, rounded6)
        else:
            ideal = tl.minimum(block_amax * (encode * TOP_INVERSE), 448.0)
            block_scale = e4m3_up(ideal) if SCALE_UP else e4m3_nearest(ideal)
            scaled = tl.minimum(size * _encode(block_scale, decode), 6.0)
            if ROUNDING == "stochastic":
                rounded = e2m1_stochastic(scaled, tl.reshape(uniform(at, seed), (P, A, Q, 16)))
            else:
                rounded = e2m1_nearest(scaled)
            if ROUNDING == "eden":
                ours = tl.reshape(size * encode, (BM, BS))
                product = tl.sum(ours * tl.reshape(rounded * block_scale, (BM, BS)), axis=1)
                square = tl.sum(ours * ours, axis=1)
                factor = tl.where(product > 0.0, tl.div_rn(square, product), 1.0)
                corrected = tl.minimum(block_scale * tl.reshape(factor, (BM, 1, 1, 1)), 448.0)
                block = (s0 // 16 + tl.arange(0, Q))[None, :]
                noise = uniform(_at(m, block, K if ROWS else K // 16, ROWS), seed)
                block_scale = e4m3_stochastic(corrected, tl.reshape(noise, (P, 1, Q, 1)))
        if PACKED:
            code = tl.where(rounded <= 2.0, rounded * 2.0, tl.where(rounded <= 4.0, rounded + 2.0, 7.0))
            code = tl.reshape(code.to(tl.int32) | tl.where(x < 0.0, 8, 0), (BM, BS))
            byte = tl.reshape(tl.broadcast_to(e4m3_bits(block_scale), (P, A, Q, 1)), (BM, Q))
            M, S = (K, N) if ROWS else (N, K)
            _store_packed(values_ptr, block_scale_ptr, code, byte, m, s0, M, S, BM, BS)
        else:
            sign = x.to(tl.int32, bitcast=True) & -0x80000000
            values = (rounded.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True) * block_scale
            tl.store(values_ptr + at, tl.reshape(values, (BM, BS)).to(tl.bfloat16), mask=mask)
