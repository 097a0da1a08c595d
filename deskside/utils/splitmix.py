"""The finalizer of SplitMix64 (Steele, Lea and Flood 2014, doi:10.1145/2714064.2660195).

It maps a counter to well-mixed bits, so random numbers can be a pure function of a seed and a position: no generator
state has to be stored, and the numbers do not change with a library's version.
"""

import hashlib

GOLDEN = 0x9E3779B97F4A7C15  # 2^64 / golden ratio: the increment of SplitMix64's counter
MULTIPLIER_1, MULTIPLIER_2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB  # of the finalizer
MASK = (1 << 64) - 1  # keeps 64 bits


def finalize(x: int) -> int:
    """Mix the bits of a 64-bit number."""
    x = ((x ^ (x >> 30)) * MULTIPLIER_1) & MASK
    x = ((x ^ (x >> 27)) * MULTIPLIER_2) & MASK
    return x ^ (x >> 31)


def mix(x: int) -> int:
    """Return the output of SplitMix64 for counter state `x`."""
    return finalize((x + GOLDEN) & MASK)


def derive_seed(seed: int, name: str) -> int:
    """Return a seed below 2^63 derived from a seed and a name, such as a parameter's name."""
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") % 2**63
