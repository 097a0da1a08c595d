"""Tile sizes of the fused kernels whose results do not depend on them, because these kernels compute no sums.

The tiles of norms, RoPE with QK-norm, loss and column sums are fixed in their launch functions: another tile would add
in another order, so the same run would compute other numbers on another card.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Tile:
    """The part of a tensor that one program computes, and its number of warps."""

    rows: int
    columns: int
    num_warps: int


# The first was the fastest on an H200; a trial chooses another where it is faster (`choose_tiles.py`). All keep within
# 99 KB of shared memory, which consumer cards have. Rows of a transposed copy are contiguous pieces of `rows` bytes.
CANDIDATES: dict[str, tuple[Tile, ...]] = {
    "gated": (Tile(1, 2048, 4), Tile(1, 1024, 4), Tile(4, 512, 4), Tile(1, 4096, 8)),
    "gated_backward": (Tile(1, 2048, 4), Tile(1, 1024, 4), Tile(4, 512, 4), Tile(1, 1024, 2)),
    "gated_fp8": (Tile(64, 128, 8), Tile(64, 64, 4), Tile(32, 128, 4), Tile(128, 64, 8)),
    "gated_backward_fp8": (Tile(64, 64, 8), Tile(32, 64, 4), Tile(32, 128, 8), Tile(64, 128, 8)),
    "cast_fp8": (Tile(64, 128, 4), Tile(64, 64, 4), Tile(128, 64, 4), Tile(128, 128, 8)),
    "cast_both": (Tile(64, 64, 4), Tile(64, 128, 4), Tile(128, 64, 4), Tile(128, 128, 8)),
    "row_col_amax": (Tile(64, 128, 4), Tile(32, 256, 4), Tile(128, 128, 8)),
}
_in_use: dict[str, Tile] = {}


def tile_of(kernel: str) -> Tile:
    """Return the tile that a kernel is launched with."""
    return _in_use.get(kernel) or CANDIDATES[kernel][0]


def use_tile(kernel: str, tile: Tile) -> None:
    """Launch a kernel with this tile from now on. Raises ValueError for a tile that is no candidate of the kernel."""
    if tile not in CANDIDATES[kernel]:
        raise ValueError(f"{tile} is not a tile of {kernel}")
    _in_use[kernel] = tile


@contextlib.contextmanager
def temporarily(kernel: str, tile: Tile) -> Iterator[None]:
    """Context manager that launches a kernel with this tile."""
    before = tile_of(kernel)
    use_tile(kernel, tile)
    try:
        yield
    finally:
        use_tile(kernel, before)
