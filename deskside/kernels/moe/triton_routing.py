"""Routing: scores, top-k, and a counting sort of the choices by expert; and the gradient of the router's logits.

The sort takes three kernels, and its result is that of a stable sort, whatever order the programs run in:

    choose   each program: the choices of its tokens, and how many of them chose each expert
    offsets  one program: where the choices of each expert, and among them those of each program, begin
    place    each program: the rank of each choice among those of its expert, and so its sorted row

Few tokens need one program, which does all three (`route_at_once`).

All arithmetic is in float32. An expert's sum of probabilities is added up per program and then over the programs in
order, so that it is deterministic, too.
"""

import triton
import triton.language as tl


@triton.jit
def _scores(  # type: ignore[no-untyped-def]
    LOGITS, rows, N, E: tl.constexpr, SIGMOID: tl.constexpr, BLOCK_E: tl.constexpr
):
    """Return scores (rows, BLOCK_E), softmax (rows, BLOCK_E) and log-sum-exp (rows,) of the logits of some rows.

    Columns from E on and rows from N on are 0.
    """
    experts = tl.arange(0, BLOCK_E)
    mask = (rows < N)[:, None] & (experts < E)[None, :]
    logits = tl.load(LOGITS + rows[:, None] * E + experts[None, :], mask=mask, other=0.0).to(tl.float32)
    logits = tl.where((experts < E)[None, :], logits, float("-inf"))
    largest = tl.max(logits, axis=1)
    numerators = tl.exp(logits - largest[:, None])
    total = tl.sum(numerators, axis=1)
    softmax = tl.where(mask, numerators / total[:, None], 0.0)
    scores = softmax
    if SIGMOID:
        scores = tl.where(mask, 1.0 / (1.0 + tl.exp(-logits)), 0.0)
    return scores, softmax, tl.where(rows < N, largest + tl.log(total), 0.0)


@triton.jit
def choose(  # type: ignore[no-untyped-def]
    LOGITS, BIAS, EXPERTS, WEIGHTS, COUNTS, SUMS, TOKEN_SUMS, N,
    E: tl.constexpr, K: tl.constexpr, NORMALISE: tl.constexpr, SIGMOID: tl.constexpr, HAS_BIAS: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """Write EXPERTS and WEIGHTS (N, K), and the sums of each program over its tokens.

    These are COUNTS and SUMS (programs, E), choices and probabilities, and TOKEN_SUMS (programs, 2), entropy and
    squared log-sum-exp. BIAS (E,) is added to the scores for choosing only. Of equal scores, the first is chosen.
    """
    rows = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    experts = tl.arange(0, BLOCK_E)
    scores, softmax, lse = _scores(LOGITS, rows, N, E, SIGMOID, BLOCK_E)
    probabilities = softmax
    if SIGMOID:
        probabilities = scores / (tl.sum(scores, axis=1)[:, None] + 1e-20)
    biased = scores
    if HAS_BIAS:
        biased += tl.load(BIAS + experts, mask=experts < E, other=0.0)[None, :]
    # `argmax` compares, so it would take a column of padding for a row with NaN. As in torch, NaN is the largest score.
    biased = tl.where(biased == biased, biased, float("inf"))
    left = tl.where((experts < E)[None, :], biased, float("-inf"))
    chosen = tl.zeros((BLOCK_N, BLOCK_E), tl.int32)
    for _ in tl.static_range(K):
        best = tl.argmax(left, axis=1, tie_break_left=True)
        is_best = best[:, None] == experts[None, :]
        chosen += is_best.to(tl.int32)
        left = tl.where(is_best, float("-inf"), left)
    total = tl.sum(chosen.to(tl.float32) * scores, axis=1)
    if SIGMOID:
        total += 1e-20
    # Found again in the same order, now that the sum is known.
    left = tl.where((experts < E)[None, :], biased, float("-inf"))
    for j in tl.static_range(K):
        best = tl.argmax(left, axis=1, tie_break_left=True)
        is_best = best[:, None] == experts[None, :]
        weight = tl.sum(tl.where(is_best, scores, 0.0), axis=1)
        if NORMALISE:
            weight = weight / total
        tl.store(EXPERTS + rows * K + j, best, mask=rows < N)
        tl.store(WEIGHTS + rows * K + j, weight, mask=rows < N)
        left = tl.where(is_best, float("-inf"), left)
    counts = tl.sum(tl.where((rows < N)[:, None], chosen, 0), axis=0)
    place = tl.program_id(0) * E + experts
    tl.store(COUNTS + place, counts, mask=experts < E)
    tl.store(SUMS + place, tl.sum(probabilities, axis=0), mask=experts < E)
    entropy = -probabilities * tl.log(tl.where(probabilities > 0, probabilities, 1.0))
    tl.store(TOKEN_SUMS + tl.program_id(0) * 2, tl.sum(tl.sum(entropy, axis=1), axis=0))
    tl.store(TOKEN_SUMS + tl.program_id(0) * 2 + 1, tl.sum(lse * lse, axis=0))


@triton.jit
def offsets(  # type: ignore[no-untyped-def]
    COUNTS, SUMS, TOKEN_SUMS, STARTS, ENDS, STATISTICS, programs, S,
    E: tl.constexpr, ALIGN: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """Write STARTS (programs, E), the first sorted row of each program's choices of each expert, ENDS (E,) and
    STATISTICS (2 E + 2,), from COUNTS and SUMS (programs, E) and TOKEN_SUMS (programs, 2). With ALIGN > 1, experts are
    padded as by `reference.route`."""
    experts, pair = tl.arange(0, BLOCK_E), tl.arange(0, 2)
    counts = tl.zeros((BLOCK_E,), tl.int32)
    sums = tl.zeros((BLOCK_E,), tl.float32)
    token_sums = tl.zeros((2,), tl.float32)
    for first in range(0, programs, BLOCK_P):
        rows = first + tl.arange(0, BLOCK_P)
        mask = (rows < programs)[:, None] & (experts < E)[None, :]
        ptrs = rows[:, None] * E + experts[None, :]
        counts += tl.sum(tl.load(COUNTS + ptrs, mask=mask, other=0), axis=0)
        sums += tl.sum(tl.load(SUMS + ptrs, mask=mask, other=0.0), axis=0)
        ptrs = TOKEN_SUMS + rows[:, None] * 2 + pair[None, :]
        token_sums += tl.sum(tl.load(ptrs, mask=(rows < programs)[:, None], other=0.0), axis=0)
    padded = counts
    if ALIGN > 1:
        padded = tl.maximum((counts + (ALIGN - 1)) // ALIGN, 1) * ALIGN
    ends = tl.cumsum(padded, axis=0)
    tl.store(ENDS + experts, tl.where(experts == E - 1, S, ends), mask=experts < E)
    tl.store(STATISTICS + experts, counts.to(tl.float32), mask=experts < E)
    tl.store(STATISTICS + E + experts, sums, mask=experts < E)
    tl.store(STATISTICS + 2 * E + pair, token_sums)
    start = ends - padded
    for first in range(0, programs, BLOCK_P):
        rows = first + tl.arange(0, BLOCK_P)
        mask = (rows < programs)[:, None] & (experts < E)[None, :]
        ptrs = rows[:, None] * E + experts[None, :]
        of_programs = tl.load(COUNTS + ptrs, mask=mask, other=0)
        before = tl.cumsum(of_programs, axis=0) - of_programs
        tl.store(STARTS + ptrs, start[None, :] + before, mask=mask)
        start += tl.sum(of_programs, axis=0)


@triton.jit
def place(  # type: ignore[no-untyped-def]
    EXPERTS, WEIGHTS, STARTS, SLOTS, TOKENS, SORTED_WEIGHTS, N,
    E: tl.constexpr, K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """Write SLOTS (N, K), and by sorted row TOKENS and SORTED_WEIGHTS (N K,).

    A token chooses an expert at most once, so the choices of an expert are ordered by token.
    """
    rows = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    experts = tl.arange(0, BLOCK_E)
    start = tl.load(STARTS + tl.program_id(0) * E + experts, mask=experts < E, other=0)
    chosen = tl.zeros((BLOCK_N, BLOCK_E), tl.int32)
    for j in tl.static_range(K):
        expert = tl.load(EXPERTS + rows * K + j, mask=rows < N, other=-1)
        chosen += (expert[:, None] == experts[None, :]).to(tl.int32)
    slots = start[None, :] + tl.cumsum(chosen, axis=0) - chosen
    for j in tl.static_range(K):
        expert = tl.load(EXPERTS + rows * K + j, mask=rows < N, other=-1)
        slot = tl.sum(tl.where(expert[:, None] == experts[None, :], slots, 0), axis=1)
        weight = tl.load(WEIGHTS + rows * K + j, mask=rows < N, other=0.0)
        tl.store(SLOTS + rows * K + j, slot, mask=rows < N)
        tl.store(TOKENS + slot, rows.to(tl.int32), mask=rows < N)
        tl.store(SORTED_WEIGHTS + slot, weight, mask=rows < N)


@triton.jit
def route_at_once(  # type: ignore[no-untyped-def]
    LOGITS, BIAS, EXPERTS, WEIGHTS, COUNTS, SUMS, TOKEN_SUMS, STARTS, ENDS, STATISTICS, SLOTS, TOKENS,
    SORTED_WEIGHTS, N, S,
    E: tl.constexpr, K: tl.constexpr, NORMALISE: tl.constexpr, SIGMOID: tl.constexpr, HAS_BIAS: tl.constexpr,
    ALIGN: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """`choose`, `offsets` and `place` in one program, for up to BLOCK_N tokens."""
    choose(
        LOGITS, BIAS, EXPERTS, WEIGHTS, COUNTS, SUMS, TOKEN_SUMS, N,
        E, K, NORMALISE, SIGMOID, HAS_BIAS, BLOCK_N, BLOCK_E,
    )  # fmt: skip
    tl.debug_barrier()  # after it, each thread sees what the others have written
    offsets(COUNTS, SUMS, TOKEN_SUMS, STARTS, ENDS, STATISTICS, 1, S, E, ALIGN, BLOCK_N, BLOCK_E)
    tl.debug_barrier()
    place(EXPERTS, WEIGHTS, STARTS, SLOTS, TOKENS, SORTED_WEIGHTS, N, E, K, BLOCK_N, BLOCK_E)


@triton.jit
def route_backward(  # type: ignore[no-untyped-def]
    GRAD_WEIGHTS, GRAD_STATISTICS, LOGITS, EXPERTS, SLOTS, OUT, N,
    E: tl.constexpr, K: tl.constexpr, NORMALISE: tl.constexpr, SIGMOID: tl.constexpr, HAS_STATISTICS: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """Write OUT (N, E), the gradient of LOGITS, from GRAD_WEIGHTS (S,), by sorted row, and GRAD_STATISTICS
    (2 E + 2,)."""
    rows = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    experts = tl.arange(0, BLOCK_E)
    scores, softmax, lse = _scores(LOGITS, rows, N, E, SIGMOID, BLOCK_E)
    grad = tl.zeros((BLOCK_N, BLOCK_E), tl.float32)
    chosen = tl.zeros((BLOCK_N, BLOCK_E), tl.float32)
    for j in tl.static_range(K):
        expert = tl.load(EXPERTS + rows * K + j, mask=rows < N, other=-1)
        slot = tl.load(SLOTS + rows * K + j, mask=rows < N, other=0)
        grad_weight = tl.load(GRAD_WEIGHTS + slot, mask=rows < N, other=0.0)
        is_expert = (expert[:, None] == experts[None, :]).to(tl.float32)
        grad += grad_weight[:, None] * is_expert
        chosen += is_expert
    if NORMALISE:
        total = tl.sum(chosen * scores, axis=1)
        if SIGMOID:
            total += 1e-20
        total = tl.where(rows < N, total, 1.0)
        mean = tl.sum(grad * scores, axis=1) / total
        grad = chosen * (grad - mean[:, None]) / total[:, None]
    if HAS_STATISTICS:
        of_sums = tl.load(GRAD_STATISTICS + E + experts, mask=experts < E, other=0.0)[None, :]
        if SIGMOID:
            total = tl.sum(scores, axis=1) + 1e-20
            mean = tl.sum(of_sums * scores, axis=1) / total
            of_sums = (of_sums - mean[:, None]) / total[:, None]
        grad += of_sums
    if SIGMOID:
        grad = grad * scores * (1.0 - scores)
    else:
        grad = softmax * (grad - tl.sum(grad * softmax, axis=1)[:, None])
    if HAS_STATISTICS:
        grad += 2.0 * tl.load(GRAD_STATISTICS + 2 * E + 1) * lse[:, None] * softmax
    mask = (rows < N)[:, None] & (experts < E)[None, :]
    ptrs = OUT + rows[:, None] * E + experts[None, :]
    tl.store(ptrs, grad.to(OUT.dtype.element_ty), mask=mask)
