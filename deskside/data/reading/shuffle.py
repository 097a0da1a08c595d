"""Shuffling with random access: a keyed permutation of 0..n-1 that is computed for each position separately.

It needs neither a table of n entries nor the state of a random generator. A Feistel network of rounds
(L, R) -> (R, L ^ f(R)), where L and R are the halves of a number of 2h bits, permutes these numbers for any function f,
because each round can be inverted. With 2^(2h) >= n, results outside 0..n-1 are passed through the network again until
they are inside ("cycle walking"; Black and Rogaway 2002). This gives a permutation of 0..n-1. Since 2^(2h) < 4n for
n > 1, it takes fewer than four passes on average. f is 64-bit integer arithmetic, so that the order does not depend on
the version of a library.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from deskside.utils.splitmix import GOLDEN, MASK, MULTIPLIER_1, MULTIPLIER_2, mix

_ROUNDS = 8  # twice the four that suffice for a random f (Luby and Rackoff 1988)


def combine_keys(*parts: int) -> int:
    """Combine several integers into one 64-bit key. Their order matters."""
    key = 0
    for part in parts:
        key = mix(key ^ mix(part & MASK))
    return key


def permute(position: NDArray[np.int64], n: int, key: int) -> NDArray[np.int64]:
    """Apply the permutation of 0..n-1 that `key` selects to each position. Returns int64 of the same shape.

    Raises ValueError for a position outside 0..n-1.
    """
    position = np.asarray(position, dtype=np.int64)
    if position.size and (int(position.min()) < 0 or int(position.max()) >= n):
        raise ValueError(f"positions must lie in 0..{n - 1}")
    half_bits = max(1, ((n - 1).bit_length() + 1) // 2)
    keys = [np.uint64(mix(key + i)) for i in range(_ROUNDS)]
    out = _feistel(position.astype(np.uint64).ravel(), half_bits, keys)
    outside = np.flatnonzero(out >= n)
    while len(outside):
        walked = _feistel(out[outside], half_bits, keys)
        out[outside] = walked
        outside = outside[walked >= n]
    return out.astype(np.int64).reshape(position.shape)


def _feistel(x: NDArray[np.uint64], half_bits: int, keys: list[np.uint64]) -> NDArray[np.uint64]:
    """Permute the numbers of 2 * half_bits bits, with one round per key."""
    bits, low = np.uint64(half_bits), np.uint64((1 << half_bits) - 1)
    left, right = x >> bits, x & low
    for key in keys:
        left, right = right, left ^ (_mix_array(right ^ key) & low)
    return (left << bits) | right


def _mix_array(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Apply `splitmix.mix` to each element. Arithmetic of uint64 arrays wraps at 2^64, as the finalizer requires."""
    x = x + np.uint64(GOLDEN)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(MULTIPLIER_1)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(MULTIPLIER_2)
    out: NDArray[np.uint64] = x ^ (x >> np.uint64(31))
    return out


def endless_shuffle(positions: NDArray[np.int64], count: int, seed: int, *key: int) -> NDArray[np.int64]:
    """Return the items, 0..count-1, at these positions of an endless order that is reshuffled in every epoch.

    The order depends on the seed and on the further integers in `key`.
    """
    epoch, inside = np.divmod(np.asarray(positions, np.int64), count)
    items = np.empty_like(inside)
    for e in np.unique(epoch).tolist():
        selected = epoch == e
        items[selected] = permute(inside[selected], count, combine_keys(seed, e, *key))
    return items
