"""What the programs of a backward have left, one row of sums each, added up in one small kernel.

A kernel that adds up over all tokens keeps its sums in registers and leaves them as a row, because atomics would add
them in another order at each run. There are some thousand rows of a few hundred columns: little to read, so that
nothing but the time from one load to the next counts. A program takes few columns and asks for a thousand rows at once.
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
