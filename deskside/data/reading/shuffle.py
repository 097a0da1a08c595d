"""Random-access shuffling: a keyed permutation computed per position, without a table or a random stream.

A Feistel network turns any mixing function into a permutation of 2^(2h) numbers. Results outside 0..n-1 are mapped
again until they are inside ("cycle walking"; Black and Rogaway 2002), which gives a permutation of n. The mixing
function is written out in 64-bit integers, so the order never changes with a library's version.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from deskside.utils.splitmix import GOLDEN, MASK, mix

_ROUNDS = 8


def key_of(*parts: int) -> int:
    """Combine several integers to one 64-bit key; their order matters."""
    key = 0
    for part in parts:
        key = mix(key ^ mix(part & MASK))
    return key


def permute(position: NDArray[np.int64], n: int, key: int) -> NDArray[np.int64]:
    """Return the image of each position (0 <= position < n) under the permutation of n that `key` selects; int64.

    Raises ValueError for a position outside 0..n-1.
    """
    position = np.asarray(position, dtype=np.int64)
    if position.size and (int(position.min()) < 0 or int(position.max()) >= n):
        raise ValueError(f"positions must lie in 0..{n - 1}")
    half = max(1, ((n - 1).bit_length() + 1) // 2)
    keys = [np.uint64(mix(key + i)) for i in range(_ROUNDS)]
    out = _feistel(position.astype(np.uint64).ravel(), half, keys)
    outside = np.flatnonzero(out >= n)
    while len(outside):
        again = _feistel(out[outside], half, keys)
        out[outside] = again
        outside = outside[again >= n]
    return out.astype(np.int64).reshape(position.shape)


def _feistel(x: NDArray[np.uint64], half: int, keys: list[np.uint64]) -> NDArray[np.uint64]:
    bits, low = np.uint64(half), np.uint64((1 << half) - 1)
    left, right = x >> bits, x & low
    for key in keys:
        left, right = right, left ^ (_mix_array(right ^ key) & low)
    return (left << bits) | right


def _mix_array(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """`mix` on an array; unsigned array arithmetic wraps."""
    x = x + np.uint64(GOLDEN)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    out: NDArray[np.uint64] = x ^ (x >> np.uint64(31))
    return out


def endless(positions: NDArray[np.int64], count: int, seed: int, *key: int) -> NDArray[np.int64]:
    """Return the items at these positions of an endless order of `count` items, reshuffled in every epoch.

    key: such as the length of the rows; each key has an order of its own.
    """
    epoch, inside = np.divmod(np.asarray(positions, np.int64), count)
    found = np.empty_like(inside)
    for e in np.unique(epoch).tolist():
        mine = epoch == e
        found[mine] = permute(inside[mine], count, key_of(seed, e, *key))
    return found
