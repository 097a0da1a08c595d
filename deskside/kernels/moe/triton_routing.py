"""Routing: softmax, top-k, and a counting sort of the choices by expert; and the gradient of the router's logits.

The sort takes three kernels, and its result is that of a stable sort, whatever order the programs run in:

    choose   each program: the choices of its tokens, and how many of them chose each expert
    offsets  one program: where the choices of each expert, and among them those of each program, begin
    place    each program: the rank of each choice among those of its expert, and so its sorted row

All arithmetic is in float32. An expert's sum of probabilities is added up per program and then over the programs in
order, so that it is deterministic, too.
"""

import triton
import triton.language as tl


@triton.jit
def _probabilities(  # type: ignore[no-untyped-def]
    LOGITS, rows, N, E: tl.constexpr, BLOCK_E: tl.constexpr
):
    """Return the softmax of the rows' logits (rows, BLOCK_E); 0 for columns from E on, and for rows from N on."""
    experts = tl.arange(0, BLOCK_E)
    mask = (rows < N)[:, None] & (experts < E)[None, :]
    logits = tl.load(LOGITS + rows[:, None] * E + experts[None, :], mask=mask, other=0.0).to(tl.float32)
    logits = tl.where((experts < E)[None, :], logits, float("-inf"))
    numerators = tl.exp(logits - tl.max(logits, axis=1)[:, None])
    return tl.where(mask, numerators / tl.sum(numerators, axis=1)[:, None], 0.0)


@triton.jit
def choose(  # type: ignore[no-untyped-def]
    LOGITS, EXPERTS, WEIGHTS, COUNTS, SUMS, N,
    E: tl.constexpr, K: tl.constexpr, NORMALISE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """Write EXPERTS and WEIGHTS (N, K), and of each program COUNTS and SUMS (programs, E).

    Of equal probabilities, the first expert is chosen.
    """
    rows = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    experts = tl.arange(0, BLOCK_E)
    probabilities = _probabilities(LOGITS, rows, N, E, BLOCK_E)
    left = tl.where((experts < E)[None, :], probabilities, -1.0)
    chosen = tl.zeros((BLOCK_N, BLOCK_E), tl.int32)
    total = tl.zeros((BLOCK_N,), tl.float32)
    for _ in tl.static_range(K):
        best = tl.argmax(left, axis=1, tie_break_left=True)
        is_best = best[:, None] == experts[None, :]
        total += tl.max(left, axis=1)
        chosen += is_best.to(tl.int32)
        left = tl.where(is_best, -1.0, left)
    # Found again in the same order, now that the sum is known.
    left = tl.where((experts < E)[None, :], probabilities, -1.0)
    for j in tl.static_range(K):
        best = tl.argmax(left, axis=1, tie_break_left=True)
        weight = tl.max(left, axis=1)
        if NORMALISE:
            weight = weight / total
        tl.store(EXPERTS + rows * K + j, best, mask=rows < N)
        tl.store(WEIGHTS + rows * K + j, weight, mask=rows < N)
        left = tl.where(best[:, None] == experts[None, :], -1.0, left)
    counts = tl.sum(tl.where((rows < N)[:, None], chosen, 0), axis=0)
    place = tl.program_id(0) * E + experts
    tl.store(COUNTS + place, counts, mask=experts < E)
    tl.store(SUMS + place, tl.sum(probabilities, axis=0), mask=experts < E)


@triton.jit
def offsets(  # type: ignore[no-untyped-def]
    COUNTS, SUMS, STARTS, ENDS, STATISTICS, programs, S,
    E: tl.constexpr, ALIGN: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """Write STARTS (programs, E), the first sorted row of each program's choices of each expert, ENDS (E,) and
    STATISTICS (2, E), from COUNTS and SUMS (programs, E). With ALIGN > 1, experts are padded as by
    `reference.route`."""
    experts = tl.arange(0, BLOCK_E)
    counts = tl.zeros((BLOCK_E,), tl.int32)
    sums = tl.zeros((BLOCK_E,), tl.float32)
    for first in range(0, programs, BLOCK_P):
        rows = first + tl.arange(0, BLOCK_P)
        mask = (rows < programs)[:, None] & (experts < E)[None, :]
        ptrs = rows[:, None] * E + experts[None, :]
        counts += tl.sum(tl.load(COUNTS + ptrs, mask=mask, other=0), axis=0)
        sums += tl.sum(tl.load(SUMS + ptrs, mask=mask, other=0.0), axis=0)
    padded = counts
    if ALIGN > 1:
        padded = tl.maximum((counts + (ALIGN - 1)) // ALIGN, 1) * ALIGN
    ends = tl.cumsum(padded, axis=0)
    tl.store(ENDS + experts, tl.where(experts == E - 1, S, ends), mask=experts < E)
    tl.store(STATISTICS + experts, counts.to(tl.float32), mask=experts < E)
    tl.store(STATISTICS + E + experts, sums, mask=experts < E)
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
def route_backward(  # type: ignore[no-untyped-def]
    GRAD_WEIGHTS, GRAD_STATISTICS, LOGITS, EXPERTS, SLOTS, OUT, N,
    E: tl.constexpr, K: tl.constexpr, NORMALISE: tl.constexpr, HAS_STATISTICS: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """Write OUT (N, E), the gradient of LOGITS, from GRAD_WEIGHTS (N K,), by sorted row, and GRAD_STATISTICS (2, E)."""
    rows = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    experts = tl.arange(0, BLOCK_E)
    probabilities = _probabilities(LOGITS, rows, N, E, BLOCK_E)
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
        total = tl.sum(chosen * probabilities, axis=1)
        total = tl.where(rows < N, total, 1.0)
        mean = tl.sum(grad * probabilities, axis=1) / total
        grad = chosen * (grad - mean[:, None]) / total[:, None]
    if HAS_STATISTICS:
        grad += tl.load(GRAD_STATISTICS + E + experts, mask=experts < E, other=0.0)[None, :]
    grad = probabilities * (grad - tl.sum(grad * probabilities, axis=1)[:, None])
    mask = (rows < N)[:, None] & (experts < E)[None, :]
    ptrs = OUT + rows[:, None] * E + experts[None, :]
    tl.store(ptrs, grad.to(OUT.dtype.element_ty), mask=mask)
