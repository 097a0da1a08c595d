"""Sum the partial results of a backward kernel, one row per program.

A kernel that sums over all tokens keeps partial sums in registers and writes them as one row per program. Atomics would
add them in a different order in each run. There are a thousand or so rows of a few hundred columns, so little is read
and only load latency matters: each program takes few columns and requests a thousand rows at once.
"""

import triton
import triton.language as tl


@triton.jit
def column_sums(  # type: ignore[no-untyped-def]
    X, OUT, N,
    C: tl.constexpr, FIRST: tl.constexpr, PIECES: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """X: (N, PIECES, C), float32. OUT: (1 or 2, C): sums over rows, of the first FIRST pieces and of the rest."""
    which = tl.program_id(1)
    columns = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    total = tl.zeros((BLOCK_N, BLOCK_C), tl.float32)
    for start in range(0, N, BLOCK_N):
        rows = start + tl.arange(0, BLOCK_N)
        mask = (rows < N)[:, None] & (columns < C)[None, :]
        for piece in range(which * FIRST, FIRST + which * (PIECES - FIRST)):
            place = X + rows[:, None] * (PIECES * C) + piece * C + columns[None, :]
            total += tl.load(place, mask=mask, other=0.0)
    tl.store(OUT + which * C + columns, tl.sum(total, axis=0), mask=columns < C)
