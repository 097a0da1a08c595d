"""Triton kernels that sample the next token, which takes about forty kernels in torch (`engine/sampling.draw`).

With a `top_k` of at most `width`, `_most_probable` sorts the pieces of a row and keeps the best of each, and
`_draw_from_ranked` merges them, applies the filters and draws:

    logits of a row     |-- piece 0 --|-- piece 1 --|-- piece 2 --|
    _most_probable        width keys    width keys    width keys        key: the logit above its token, as one integer
    _draw_from_ranked     width keys of the row, in descending order; top_k, top_p, min_p; the token

Without top_k and top_p, no order is needed: `_draw_from_piece` draws from each piece, given the largest logit of the
row, and `_best_draw` takes the best of the pieces.

Otherwise, `_find_threshold` first searches for the smallest logit that top_k and top_p keep, instead of sorting: one
program for each row reads it up to ten times for each of them (32-bit logits: twenty).

A row whose temperature is 0 keeps its first token only. All random numbers and their meaning are those of
engine/counter_rng.py.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from deskside.kernels import decode_step, decode_step_triton
from deskside.kernels.decode_triton import exponential
from deskside.kernels.dependent_launch import launch_options

PIECE = 4096  # logits per program that ranks
ZERO_BITS = {torch.bfloat16: 16, torch.float16: 13}  # of the type's values in float32
NOT_FINITE = tl.constexpr(decode_step.NOT_FINITE)
NO_KEY, NO_SHORT_KEY = tl.constexpr(-(2**63)), tl.constexpr(-(2**31))  # below those of all logits
FIXED_POINT_ONE = tl.constexpr(decode_step.FIXED_POINT_ONE)


@triton.jit
def _comparable(x):  # type: ignore[no-untyped-def]
    """Return logits with +inf in place of NaN, and 0.0 in place of -0.0."""
    return tl.where(x == x, x, float("inf")) + 0.0


@triton.jit
def _rising(bits, MAGNITUDE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Map sign-extended bits of floats to integers of the same order, and back. MAGNITUDE: all bits but the sign."""
    return bits ^ ((bits >> 31) & MAGNITUDE)


@triton.jit
def _key(x, token, V):  # type: ignore[no-untyped-def]
    """Return float32 logits above their tokens as int64: the larger key is more probable, see `sampling.ranked`."""
    rising = _rising(x.to(tl.int32, bitcast=True), 0x7FFFFFFF)
    return (rising.to(tl.int64) << 32) | (V - 1 - token).to(tl.int64)


@triton.jit
def _store(TOKEN, LOGPROB, row, largest, token, logprob):  # type: ignore[no-untyped-def]
    """Store what was drawn from a row, unless its largest logit is not finite."""
    finite = tl.abs(largest) < float("inf")
    tl.store(TOKEN + row, tl.where(finite, token, NOT_FINITE).to(tl.int64))
    tl.store(LOGPROB + row, tl.where(finite, logprob, float("nan")))


@triton.jit
def _most_probable(  # type: ignore[no-untyped-def]
    LOGITS, KEYS, V, row_stride, PIECE: tl.constexpr, WIDTH: tl.constexpr, PDL: tl.constexpr
):
    """KEYS: (B, pieces, WIDTH) int64, of `_key`, or NO_KEY; those of a piece in descending order. NaN counts as +inf.

    Logits of 16 bits are sorted as 32-bit integers, in half the time.
    """
    TYPE: tl.constexpr = LOGITS.dtype.element_ty
    row, piece = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    place = tl.arange(0, PIECE)
    token = piece * PIECE + place
    x = _comparable(tl.load(LOGITS + row * row_stride + token, token < V, 0.0).to(tl.float32))
    if TYPE.primitive_bitwidth == 16:
        rising = _rising(x.to(TYPE).to(tl.int16, bitcast=True).to(tl.int32), 0x7FFF)
        short = tl.topk(tl.where(token < V, (rising << 16) | (PIECE - 1 - place), NO_SHORT_KEY), WIDTH)
        x = _rising(short >> 16, 0x7FFF).to(tl.int16).to(TYPE, bitcast=True).to(tl.float32)
        token = piece * PIECE + PIECE - 1 - (short & 0xFFFF)
        best = tl.where(short == NO_SHORT_KEY, NO_KEY, _key(x, token, V))
    else:
        best = tl.topk(tl.where(token < V, _key(x, token, V), NO_KEY), WIDTH)
    tl.store(KEYS + (row * tl.num_programs(1) + piece) * WIDTH + tl.arange(0, WIDTH), best)


@triton.jit
def _draw_from_ranked(  # type: ignore[no-untyped-def]
    KEYS, FLOATS, INTEGERS, COUNT, TOKEN, LOGPROB, keys, V, count_stride,
    PURPOSE: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """KEYS: (B, keys). FLOATS, INTEGERS: of `sampling.SamplingTensors`. TOKEN: (B,) int64. LOGPROB: (B,) float32."""
    row = tl.program_id(0).to(tl.int64)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    place = tl.arange(0, BLOCK)
    key = tl.topk(tl.load(KEYS + row * keys + place, place < keys, NO_KEY), WIDTH)
    token = V - 1 - (key & 0xFFFFFFFF)
    x = _rising((key >> 32).to(tl.int32), 0x7FFFFFFF).to(tl.float32, bitcast=True)
    x = tl.where(key == NO_KEY, float("-inf"), x)
    temperature = tl.load(FLOATS + 6 * row)
    top_p = tl.load(FLOATS + 6 * row + 1).to(tl.float64)
    min_p = tl.load(FLOATS + 6 * row + 2)
    top_k = tl.where(temperature > 0, tl.load(INTEGERS + 2 * row), 1)
    largest = tl.max(x, axis=0)
    scaled = (x - largest) / tl.where(temperature > 0, temperature, 1.0)
    rank = tl.arange(0, WIDTH)
    keep = rank < top_k
    p = tl.exp(tl.where(keep, scaled, float("-inf")).to(tl.float64))
    share = (p / tl.sum(p, axis=0) * FIXED_POINT_ONE).to(tl.int64)
    keep = keep & ((tl.cumsum(share, axis=0) - share).to(tl.float64) < top_p * FIXED_POINT_ONE)
    keep = (rank == 0) | (keep & (scaled >= tl.log(min_p)))
    kept = tl.where(keep, scaled, float("-inf"))
    stream = tl.load(INTEGERS + 2 * row + 1)
    score = kept - tl.log(exponential(stream, tl.load(COUNT + row * count_stride), token, PURPOSE))
    winner = tl.min(tl.where(score == tl.max(score, axis=0), rank, WIDTH), axis=0)
    logprob = tl.sum(tl.where(rank == winner, kept, 0.0), axis=0) - tl.log(tl.sum(tl.exp(kept), axis=0))
    _store(TOKEN, LOGPROB, row, largest, tl.sum(tl.where(rank == winner, token, 0), axis=0), logprob)


@triton.jit
def _draw_from_piece(  # type: ignore[no-untyped-def]
    LOGITS, LARGEST, FIRST, THRESHOLD, TIES, FLOATS, INTEGERS, COUNT, SCORE, TOKEN, SCALED, SUM, V,
    row_stride, count_stride,
    PURPOSE: tl.constexpr, SHIFT: tl.constexpr, FILTERED: tl.constexpr, PIECE: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """LARGEST, FIRST: of `decode_step_triton.largest_of_pieces`. THRESHOLD, TIES: of `_find_threshold`, if FILTERED.
    SCORE, SCALED, SUM: (B, pieces) float32; TOKEN: int32.

    SUM: of the exponentials of the scaled logits that are kept. TOKEN: that of the largest SCORE, and SCALED its logit.
    """
    row, piece, pieces = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    other = tl.arange(0, BLOCK)
    maxima = tl.load(LARGEST + row * pieces + other, other < pieces, float("-inf"))
    largest = tl.max(maxima, axis=0)
    firsts = tl.load(FIRST + row * pieces + other, other < pieces, V)
    first = tl.min(tl.where(maxima == largest, firsts, V), axis=0)
    place = row * pieces + piece
    temperature = tl.load(FLOATS + 6 * row)
    # A greedy row: no logit reaches twice the largest probability, so only the first of the largest is kept.
    min_p = tl.where(temperature > 0, tl.load(FLOATS + 6 * row + 2), 2.0)
    token = piece * PIECE + tl.arange(0, PIECE)
    x = tl.load(LOGITS + row * row_stride + token, token < V, float("-inf")).to(tl.float32)
    scaled = (x - largest) / tl.where(temperature > 0, temperature, 1.0)
    keep = scaled >= tl.log(min_p)
    if FILTERED:
        order, threshold = _order(x, SHIFT), tl.load(THRESHOLD + row)
        number = tl.cumsum((order == threshold).to(tl.int32), axis=0)  # of a logit at the threshold, from 1
        keep = keep & ((order > threshold) | ((order == threshold) & (number <= tl.load(TIES + place))))
    kept = tl.where(keep | (token == first), scaled, float("-inf"))
    stream = tl.load(INTEGERS + 2 * row + 1)
    score = kept - tl.log(exponential(stream, tl.load(COUNT + row * count_stride), token, PURPOSE))
    best = tl.max(score, axis=0)
    winner = tl.min(tl.where(score == best, token, V), axis=0)
    tl.store(SCORE + place, best)
    tl.store(TOKEN + place, winner)
    tl.store(SCALED + place, tl.sum(tl.where(token == winner, kept, 0.0), axis=0))
    tl.store(SUM + place, tl.sum(tl.exp(kept), axis=0))


@triton.jit
def _best_draw(  # type: ignore[no-untyped-def]
    LARGEST, SCORE, TOKEN_OF_PIECE, SCALED, SUM, TOKEN, LOGPROB, pieces, V, BLOCK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """TOKEN: (B,) int64. LOGPROB: (B,) float32."""
    row = tl.program_id(0).to(tl.int64)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    piece = tl.arange(0, BLOCK)
    place, mask = row * pieces + piece, piece < pieces
    score = tl.load(SCORE + place, mask, float("-inf"))
    token = tl.load(TOKEN_OF_PIECE + place, mask, V)
    winner = tl.min(tl.where(score == tl.max(score, axis=0), token, V), axis=0)
    scaled = tl.sum(tl.where(token == winner, tl.load(SCALED + place, mask, 0.0), 0.0), axis=0)
    logprob = scaled - tl.log(tl.sum(tl.load(SUM + place, mask, 0.0), axis=0))
    largest = tl.max(tl.load(LARGEST + place, mask, float("-inf")), axis=0)
    _store(TOKEN, LOGPROB, row, largest, winner, logprob)


@triton.jit
def _order(x, SHIFT: tl.constexpr):  # type: ignore[no-untyped-def]
    """Map float32 logits to integers of the same order. SHIFT: low bits that are zero in all of them."""
    return _rising(_comparable(x).to(tl.int32, bitcast=True), 0x7FFFFFFF) >> SHIFT


@triton.jit
def _weights(  # type: ignore[no-untyped-def]
    ROW, V, start, largest, temperature, COUNTED: tl.constexpr, SHIFT: tl.constexpr, PIECE: tl.constexpr
):
    """Return `_order` of the logits of a piece, and their weights: 1 if COUNTED, else proportional to probabilities."""
    token = start + tl.arange(0, PIECE)
    x = tl.load(ROW + token, token < V, float("-inf")).to(tl.float32)
    if COUNTED:
        weight = tl.where(token < V, 1.0, 0.0)
    else:
        weight = tl.exp((x - largest) / temperature)
    return _order(x, SHIFT), weight


@triton.jit
def _above_and_at(  # type: ignore[no-untyped-def]
    ROW, V, largest, temperature, threshold, COUNTED: tl.constexpr, SHIFT: tl.constexpr, PIECE: tl.constexpr
):
    """Return the sum of the weights of the logits above a threshold, and the weight of one logit at it, or 0."""
    above = tl.zeros((PIECE,), tl.float32)
    at = tl.zeros((PIECE,), tl.float32)
    for start in range(0, V, PIECE):
        order, weight = _weights(ROW, V, start, largest, temperature, COUNTED, SHIFT, PIECE)
        above += tl.where(order > threshold, weight, 0.0)
        at = tl.maximum(at, tl.where(order == threshold, weight, 0.0))
    return tl.sum(above, axis=0), tl.max(at, axis=0)


@triton.jit
def _search(  # type: ignore[no-untyped-def]
    ROW, V, largest, temperature, low, limit, COUNTED: tl.constexpr, SHIFT: tl.constexpr, PIECE: tl.constexpr
):
    """Return the smallest integer above `low` for which the weights of the logits above it sum to less than `limit`.

    Each pass over the row leaves a quarter of the integers. It adds up the pieces by place and reduces once at its end:
    a reduction for each piece would take longer than the piece.
    """
    low = low.to(tl.int64)
    high = _order(largest, SHIFT).to(tl.int64)
    while high - low > 1:
        step = tl.maximum((high - low) // 4, 1)
        a = low + step
        b = tl.minimum(a + step, high - 1)
        c = tl.minimum(b + step, high - 1)
        weights_a = tl.zeros((PIECE,), tl.float32)
        weights_b = tl.zeros((PIECE,), tl.float32)
        weights_c = tl.zeros((PIECE,), tl.float32)
        for start in range(0, V, PIECE):
            order, weight = _weights(ROW, V, start, largest, temperature, COUNTED, SHIFT, PIECE)
            weights_a += tl.where(order > a.to(tl.int32), weight, 0.0)
            weights_b += tl.where(order > b.to(tl.int32), weight, 0.0)
            weights_c += tl.where(order > c.to(tl.int32), weight, 0.0)
        above_a = tl.sum(weights_a, axis=0)
        above_b = tl.sum(weights_b, axis=0)
        above_c = tl.sum(weights_c, axis=0)
        low = tl.where(above_c >= limit, c, tl.where(above_b >= limit, b, tl.where(above_a >= limit, a, low)))
        high = tl.where(above_a < limit, a, tl.where(above_b < limit, b, tl.where(above_c < limit, c, high)))
    return high.to(tl.int32)


@triton.jit
def _find_threshold(  # type: ignore[no-untyped-def]
    LOGITS, LARGEST, FLOATS, INTEGERS, THRESHOLD, TIES, V, pieces,
    row_stride,
    SHIFT: tl.constexpr, PIECE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Write THRESHOLD (B,) int32, `_order` of the smallest logit that is kept, and TIES (B, pieces) int32, how many of
    the logits at the threshold each piece keeps, the first ones. LARGEST: (B, pieces) of `largest_of_pieces`."""
    row = tl.program_id(0).to(tl.int64)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    piece = tl.arange(0, BLOCK)
    largest = tl.max(tl.load(LARGEST + row * pieces + piece, piece < pieces, float("-inf")), axis=0)
    temperature = tl.load(FLOATS + 6 * row)
    needs_search = (tl.abs(largest) < float("inf")) & (temperature > 0)
    top_k = tl.load(INTEGERS + 2 * row)
    top_p = tl.load(FLOATS + 6 * row + 1)
    ROW = LOGITS + row * row_stride
    threshold = _order(tl.full((), float("-inf"), tl.float32), SHIFT) - 1
    ties = V.to(tl.int64)
    if needs_search & (top_k < V):
        k = top_k.to(tl.float32)
        threshold = _search(ROW, V, largest, temperature, threshold, k, True, SHIFT, PIECE)
        above, _ = _above_and_at(ROW, V, largest, temperature, threshold, True, SHIFT, PIECE)
        ties = top_k - above.to(tl.int64)
    if needs_search & (top_p < 1):
        above, at = _above_and_at(ROW, V, largest, temperature, threshold, False, SHIFT, PIECE)
        limit = top_p * (above + ties.to(tl.float32) * at)
        of_top_k = threshold
        threshold = _search(ROW, V, largest, temperature, of_top_k - 1, limit, False, SHIFT, PIECE)
        above, at = _above_and_at(ROW, V, largest, temperature, threshold, False, SHIFT, PIECE)
        needed = tl.ceil((limit - above) / at).to(tl.int64)
        ties = tl.where(threshold == of_top_k, tl.minimum(needed, ties), needed)
    tl.store(THRESHOLD + row, threshold)
    for start in range(0, V, PIECE):
        order, one = _weights(ROW, V, start, largest, temperature, True, SHIFT, PIECE)
        tl.store(TIES + row * pieces + start // PIECE, tl.maximum(tl.minimum(ties, PIECE), 0).to(tl.int32))
        ties -= tl.sum(tl.where(order == threshold, one, 0.0), axis=0).to(tl.int64)


def draw_from_ranked(
    logits_BV: Tensor, floats_B6: Tensor, integers_B2: Tensor, count_B: Tensor, purpose: int, width: int
) -> tuple[Tensor, Tensor]:
    """Sample rows that keep at most `width` tokens, a power of two: the tokens, and `DrawnTokens.sampled_logprob_B`.

    floats_B6, integers_B2: of `sampling.SamplingTensors`, contiguous, as must be the last dimension of the logits.
    """
    (B, V), device = logits_BV.shape, logits_BV.device
    assert logits_BV.stride(1) == 1 or V == 1
    piece = max(width, min(PIECE, triton.next_power_of_2(V)))
    pieces = triton.cdiv(V, piece)
    keys = torch.empty(B, pieces, width, dtype=torch.int64, device=device)
    _most_probable[(B, pieces)](
        logits_BV, keys, V, logits_BV.stride(0), piece, width, num_warps=8, **launch_options(device, B * pieces)
    )  # fmt: skip
    token_B, logprob_B = _outputs(B, device)
    block = triton.next_power_of_2(pieces * width)
    _draw_from_ranked[(B,)](
        keys, floats_B6, integers_B2, count_B, token_B, logprob_B, pieces * width, V,
        count_B.stride(0),
        purpose, block, width, num_warps=min(16, max(1, block // 128)), **launch_options(device, B),
    )  # fmt: skip
    return token_B, logprob_B


def draw_from_pieces(
    logits_BV: Tensor, floats_B6: Tensor, integers_B2: Tensor, count_B: Tensor, purpose: int, filtered: bool
) -> tuple[Tensor, Tensor]:
    """Sample rows with any settings, or without top_k and top_p if not `filtered`. Arguments and results: as
    `draw_from_ranked`."""
    (B, V), device = logits_BV.shape, logits_BV.device
    zero_bits = ZERO_BITS.get(logits_BV.dtype, 0)
    largest, first = decode_step_triton.largest_of_pieces(logits_BV)
    pieces, piece = largest.shape[1], decode_step_triton.PIECE
    block = triton.next_power_of_2(pieces)
    threshold, ties = None, None
    if filtered:
        threshold, ties = torch.empty(B, dtype=torch.int32, device=device), torch.empty_like(first)
        _find_threshold[(B,)](
            logits_BV, largest, floats_B6, integers_B2, threshold, ties, V, pieces, logits_BV.stride(0),
            zero_bits, piece, block, num_warps=16, **launch_options(device, B),
        )  # fmt: skip
    score, scaled, total = (torch.empty_like(largest) for _ in range(3))
    token_of_piece = torch.empty_like(first)
    _draw_from_piece[(B, pieces)](
        logits_BV, largest, first, threshold, ties, floats_B6, integers_B2, count_B,
        score, token_of_piece, scaled, total, V,
        logits_BV.stride(0), count_B.stride(0),
        purpose, zero_bits, filtered, piece, block, num_warps=8, **launch_options(device, B * pieces),
    )  # fmt: skip
    token_B, logprob_B = _outputs(B, device)
    _best_draw[(B,)](
        largest, score, token_of_piece, scaled, total, token_B, logprob_B, pieces, V, block,
        num_warps=1, **launch_options(device, B),
    )  # fmt: skip
    return token_B, logprob_B


def _outputs(rows: int, device: torch.device) -> tuple[Tensor, Tensor]:
    return (
        torch.empty(rows, dtype=torch.int64, device=device),
        torch.empty(rows, dtype=torch.float32, device=device),
    )
