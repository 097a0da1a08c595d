"""The Triton kernels of the NVFP4 quantizer, which quantize.py describes and launches.

The matmul sums over dimension S of the operand (M, S). Every tile has the shape (BM, BS), with S last; whether S is N
or K of the (N, K) matrix in memory only changes addresses. A tile is reshaped to (P, A, Q, 16) = (BM / A, A, BS / 16,
16), where A x 16 values share a scale, A = 1 or 16. The Hadamard transform is a product with a constant matrix: 128 x
128, or 64 x 64 with four copies of H16 on its diagonal. Programs loop over several tiles, so that each reads this
matrix only once.

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
)
from deskside.kernels.random_triton import uniform

LARGEST_FLOAT = tl.constexpr(3.4028234663852886e38)


@triton.jit
def _tile_origin(tile, N, K, BM: tl.constexpr, BS: tl.constexpr, ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the first m and s of a tile of an (N, K) matrix. Tiles are ordered along K.

    ROWS: True if S is N, False if it is K.
    """
    across = tl.cdiv(K, BM if ROWS else BS)
    m, s = (tile % across, tile // across) if ROWS else (tile // across, tile % across)
    return m * BM, s * BS


@triton.jit
def _offset(m, s, K, ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the offset of an element, or of a block scale in the reference's layout. K: the length of a row."""
    return s.to(tl.int64) * K + m if ROWS else m.to(tl.int64) * K + s


@triton.jit
def _rotation(matrix_ptr, signs_ptr, HADAMARD: tl.constexpr, BS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return diag(signs) H, scaled by the largest power of two that is at most 1 / sqrt(HADAMARD).

    Unscaled, sums of large values would overflow. Scaling by a power of two is exact.
    """
    i = tl.arange(0, BS)
    matrix = tl.load(matrix_ptr + i[:, None] * BS + i[None, :]) * (0.25 if HADAMARD == 16 else 0.0625)
    return matrix * tl.load(signs_ptr + i % HADAMARD).to(matrix.dtype)[:, None]


@triton.jit
def _values(x_ptr, rotation, offsets, mask, HADAMARD: tl.constexpr, INTERPRETED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Load a tile as float32 and transform it.

    With HADAMARD = 16, the result is rounded to bfloat16 if x is bfloat16, as in NVIDIA's kernels.
    """
    x = tl.load(x_ptr + offsets, mask=mask, other=0.0)
    values = x.to(tl.float32)
    if HADAMARD > 0:
        BF16: tl.constexpr = x.dtype == tl.bfloat16
        values = tl.dot(x.to(rotation.dtype), rotation, input_precision="ieee")
        if HADAMARD == 128:
            values *= 1.4142135623730951  # the rotation is scaled by 1 / 16, and 1 / sqrt(128) = sqrt(2) / 16
        if HADAMARD == 16 and BF16:
            if INTERPRETED:  # the interpreter's conversion does not round to even
                values = bf16_nearest(values)
            else:
                values = values.to(tl.bfloat16).to(tl.float32)
    return values


@triton.jit
def _expert_of(row, ends_ptr, EXPERTS: tl.constexpr, BLOCK_E: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the expert of a row of a matrix whose rows are sorted by expert."""
    experts = tl.arange(0, BLOCK_E)
    ends = tl.load(ends_ptr + experts, mask=experts < EXPERTS, other=0x7FFFFFFF)
    return tl.sum((ends <= row).to(tl.int32), axis=0)


@triton.jit
def amax_kernel(  # type: ignore[no-untyped-def]
    x_ptr, matrix_ptr, signs_ptr, amax_ptr, ends_ptr, N, K, tiles,
    EXPERTS: tl.constexpr, BLOCK_E: tl.constexpr,
    HADAMARD: tl.constexpr, ROWS: tl.constexpr, BM: tl.constexpr, BS: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Find the largest magnitude of the transformed tensor, comparing bits as integers, so that NaN is the largest.

    With EXPERTS, rows are sorted by expert, a tile's rows are of one expert, and amax_ptr has one number per expert.
    """
    rotation = 0.0
    if HADAMARD > 0:
        rotation = _rotation(matrix_ptr, signs_ptr, HADAMARD, BS)
    largest = tl.zeros((BM, BS), tl.int32)
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        m0, s0 = _tile_origin(tile, N, K, BM, BS, ROWS)
        m = (m0 + tl.arange(0, BM))[:, None]
        s = (s0 + tl.arange(0, BS))[None, :]
        mask = (m < K) & (s < N) if ROWS else (m < N) & (s < K)
        x = _values(x_ptr, rotation, _offset(m, s, K, ROWS), mask, HADAMARD, INTERPRETED)
        bits = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
        if EXPERTS > 0:
            expert = _expert_of(s0 if ROWS else m0, ends_ptr, EXPERTS, BLOCK_E)
            # In one dimension: for compute capability 10.x, Triton 3.6 fails to compile a product that is reduced first
            # along one dimension and then along the other.
            tl.atomic_max(amax_ptr + expert, tl.max(tl.reshape(bits, (BM * BS,), can_reorder=True), axis=0))
        else:
            largest = tl.maximum(largest, bits)
    if EXPERTS == 0:
        tl.atomic_max(amax_ptr, tl.max(tl.max(largest, axis=1), axis=0))


@triton.jit
def _in_sequence(x, P: tl.constexpr, Q: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the sum of (P, Q, 16) over the last dimension, strictly from first to last: (P, Q, 1).

    A thread holds eight adjacent elements, so it passes its sum to the thread that adds the other eight.
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
    """Return the sum of (P, A, Q, 16) over A and 16 in the order of the reference: (P, 1, Q, 1).

    The order matters where two candidates are nearly equal. For a 16 x 16 block it is along the rows in memory first,
    whichever dimension the product sums over.
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
    """Return the sums of 16 consecutive rows of (P x 16, Q, 1), by repeatedly adding the two halves: (P, Q)."""
    x = tl.sum(tl.reshape(x, (P, 2, 8, Q)), axis=1)
    x = tl.sum(tl.reshape(x, (P, 2, 4, Q)), axis=1)
    x = tl.sum(tl.reshape(x, (P, 2, 2, Q)), axis=1)
    return tl.sum(x, axis=1)


@triton.jit
def _divide_by_1536(v, INTERPRETED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return v / 1536, correctly rounded: a product, its exact remainder, one correction (Markstein 1990).

    With four over six, 1536 = 6 x 256 is the largest FP4 value times the largest block scale.
    """
    inverse = 0.0006510416860692203  # 1 / 1536 in float32
    quotient = v * inverse
    if INTERPRETED:  # the interpreter's fma rounds twice
        quotient = tl.div_rn(v, tl.full(v.shape, 1536.0, tl.float32))
    else:
        quotient = tl.fma(tl.fma(quotient, -1536.0, v), inverse, quotient)
    return quotient


@triton.jit
def _encode_factor(block_scale, decode):  # type: ignore[no-untyped-def]
    """Return 1 / (block scale x global scale), at most the largest float32, which a block scale of zero gives."""
    product = block_scale * decode
    return tl.minimum(tl.div_rn(tl.full(product.shape, 1.0, tl.float32), product), LARGEST_FLOAT)


@triton.jit
def _candidate(  # type: ignore[no-untyped-def]
    magnitude, block_scale, decode, amax,
    P: tl.constexpr, A: tl.constexpr, Q: tl.constexpr, ROWS: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Return the magnitudes (P, A, Q, 16) rounded with these block scales, and the squared error of each block."""
    rounded = e2m1_nearest(tl.minimum(magnitude * _encode_factor(block_scale, decode), 6.0))
    error = _divide_by_1536(rounded * block_scale * amax, INTERPRETED) - magnitude
    return rounded, _block_error(error * error, P, A, Q, ROWS)


@triton.jit
def _store_packed(  # type: ignore[no-untyped-def]
    codes_ptr, block_scale_ptr, code, scale_bytes, m, s0, M, S, BM: tl.constexpr, BS: tl.constexpr
):
    """Store codes (BM, BS) in (M, S / 2) bytes, and block scales (BM, BS / 16) in (M, S / 16) bytes."""
    low, high = tl.split(tl.reshape(code, (BM, BS // 2, 2)))
    pair = (s0 // 2 + tl.arange(0, BS // 2))[None, :]
    mask = (m < M) & (pair < S // 2)
    tl.store(codes_ptr + m.to(tl.int64) * (S // 2) + pair, (low | (high << 4)).to(tl.uint8), mask=mask)
    block = (s0 // 16 + tl.arange(0, BS // 16))[None, :]
    mask = (m < M) & (block < S // 16)
    tl.store(block_scale_ptr + m.to(tl.int64) * (S // 16) + block, scale_bytes, mask=mask)


@triton.jit
def _encode_of(amax, global_scale_ptr, is_writer, RANGE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return `encode` and its inverse for a tensor of this amax, and write its global scale if `is_writer`."""
    full_range = tl.full((), RANGE, tl.float32)
    encode = tl.minimum(tl.div_rn(full_range, amax), LARGEST_FLOAT)
    encode = tl.where(encode == 0.0, 1.0, encode)  # 0 if amax is infinite
    exact = tl.div_rn(amax, full_range)
    # At least 1 / the largest float32, like `decode`. NaN stays NaN, because the comparison is false for it.
    global_scale = tl.where(exact < 2.938735877055719e-39, 2.938735877055719e-39, exact)
    tl.store(global_scale_ptr, global_scale, mask=is_writer)
    return encode, tl.div_rn(tl.full((), 1.0, tl.float32), encode)


@triton.jit(do_not_specialize=["seed"])
def quantize_kernel(  # type: ignore[no-untyped-def]
    x_ptr, matrix_ptr, signs_ptr, amax_ptr, ends_ptr, values_ptr, block_scale_ptr, global_scale_ptr, N, K, tiles, seed,
    EXPERTS: tl.constexpr, BLOCK_E: tl.constexpr,
    TOP_INVERSE: tl.constexpr, RANGE: tl.constexpr, HADAMARD: tl.constexpr, ROWS: tl.constexpr,
    A: tl.constexpr, ROUNDING: tl.constexpr, FOUR_OVER_SIX: tl.constexpr, SCALE_UP: tl.constexpr,
    PACKED: tl.constexpr, BM: tl.constexpr, BS: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Quantize x and write the operand and its global scale.

    values_ptr: the emulated operand in the layout of x or, with PACKED, the codes; block scales then go to
    block_scale_ptr. TOP_INVERSE: 1 / the value that a block's largest magnitude is scaled to. RANGE: that value
    times the largest block scale. EXPERTS: as in `amax_kernel`; there is one global scale per expert then.
    """
    P: tl.constexpr = BM // A
    Q: tl.constexpr = BS // 16
    amax = tl.load(amax_ptr)
    encode, decode = amax, amax
    if EXPERTS == 0:
        encode, decode = _encode_of(amax, global_scale_ptr, tl.program_id(0) == 0, RANGE)
    rotation = 0.0
    if HADAMARD > 0:
        rotation = _rotation(matrix_ptr, signs_ptr, HADAMARD, BS)
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        m0, s0 = _tile_origin(tile, N, K, BM, BS, ROWS)
        m = (m0 + tl.arange(0, BM))[:, None]
        s = (s0 + tl.arange(0, BS))[None, :]
        mask = (m < K) & (s < N) if ROWS else (m < N) & (s < K)
        offsets = _offset(m, s, K, ROWS)
        if EXPERTS > 0:
            expert = _expert_of(s0 if ROWS else m0, ends_ptr, EXPERTS, BLOCK_E)
            amax = tl.load(amax_ptr + expert)
            # Every tile writes the same number.
            encode, decode = _encode_of(amax, global_scale_ptr + expert, True, RANGE)
        x = tl.reshape(_values(x_ptr, rotation, offsets, mask, HADAMARD, INTERPRETED), (P, A, Q, 16))
        magnitude = tl.abs(x)
        block_amax = tl.max(magnitude, axis=3, keep_dims=True)
        if A > 1:
            block_amax = tl.max(block_amax, axis=1, keep_dims=True)
        if FOUR_OVER_SIX:
            base = tl.div_rn(block_amax, tl.full(block_amax.shape, 6.0, tl.float32)) * encode
            scale6 = e4m3_nearest(tl.minimum(base, 448.0))
            scale4 = e4m3_nearest(tl.minimum(base * 1.5, 448.0))
            rounded6, error6 = _candidate(magnitude, scale6, decode, amax, P, A, Q, ROWS, INTERPRETED)
            rounded4, error4 = _candidate(magnitude, scale4, decode, amax, P, A, Q, ROWS, INTERPRETED)
            block_scale = tl.where(error4 < error6, scale4, scale6)
            rounded = tl.where(error4 < error6, rounded4, rounded6)
        else:
            ideal = tl.minimum(block_amax * (encode * TOP_INVERSE), 448.0)
            block_scale = e4m3_up(ideal) if SCALE_UP else e4m3_nearest(ideal)
            scaled = tl.minimum(magnitude * _encode_factor(block_scale, decode), 6.0)
            if ROUNDING == "stochastic":
                rounded = e2m1_stochastic(scaled, tl.reshape(uniform(offsets, seed), (P, A, Q, 16)))
            else:
                rounded = e2m1_nearest(scaled)
            if ROUNDING == "eden":
                scaled_magnitude = tl.reshape(magnitude * encode, (BM, BS))
                product = tl.sum(scaled_magnitude * tl.reshape(rounded * block_scale, (BM, BS)), axis=1)
                square = tl.sum(scaled_magnitude * scaled_magnitude, axis=1)
                factor = tl.where(product > 0.0, tl.div_rn(square, product), 1.0)
                corrected = tl.minimum(block_scale * tl.reshape(factor, (BM, 1, 1, 1)), 448.0)
                block = (s0 // 16 + tl.arange(0, Q))[None, :]
                noise = uniform(_offset(m, block, K if ROWS else K // 16, ROWS), seed)
                block_scale = e4m3_stochastic(corrected, tl.reshape(noise, (P, 1, Q, 1)))
        if PACKED:
            code = tl.where(rounded <= 2.0, rounded * 2.0, tl.where(rounded <= 4.0, rounded + 2.0, 7.0))
            code = tl.reshape(code.to(tl.int32) | tl.where(x < 0.0, 8, 0), (BM, BS))
            scale_bytes = tl.reshape(tl.broadcast_to(e4m3_bits(block_scale), (P, A, Q, 1)), (BM, Q))
            M, S = (K, N) if ROWS else (N, K)
            _store_packed(values_ptr, block_scale_ptr, code, scale_bytes, m, s0, M, S, BM, BS)
        else:
            sign = x.to(tl.int32, bitcast=True) & -0x80000000
            values = (rounded.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True) * block_scale
            tl.store(values_ptr + offsets, tl.reshape(values, (BM, BS)).to(tl.bfloat16), mask=mask)
