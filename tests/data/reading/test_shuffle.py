from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deskside.data.reading.shuffle import combine_keys, mix, permute


@given(st.integers(1, 3000), st.integers(0, 2**64 - 1))
@settings(max_examples=100, deadline=None)
def test_permute_is_a_permutation_with_random_access(n: int, key: int) -> None:
    whole = permute(np.arange(n), n, key)
    assert np.array_equal(np.sort(whole), np.arange(n))
    some = np.array([n - 1, 0, n // 2])
    assert np.array_equal(permute(some, n, key), whole[some])


def test_mix_equals_published_splitmix64() -> None:
    # The first outputs of SplitMix64 from state 0, as published with the generator (prng.di.unimi.it).
    assert mix(0) == 0xE220A8397B1DCDAF
    assert mix(0x9E3779B97F4A7C15) == 0x6E789E6AA1B965F4


def test_order_never_changes() -> None:
    """A run resumed with a later version must get the same rows, so these values must never change."""
    assert permute(np.arange(10), 10, 1).tolist() == [7, 6, 2, 5, 3, 9, 0, 1, 8, 4]
    assert combine_keys(1, 2) != combine_keys(2, 1)


def test_looks_random() -> None:
    n = 100_000
    order = permute(np.arange(n), n, combine_keys(3, 0, 2048, 0))
    assert abs(np.corrcoef(np.arange(n), order)[0, 1]) < 0.02
    assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 0.02
    assert not np.array_equal(order, permute(np.arange(n), n, combine_keys(3, 1, 2048, 0)))
    # the first tenth contains rows from everywhere
    where = np.bincount(order[: n // 10] * 10 // n, minlength=10)
    chi2 = ((where - n / 100) ** 2 / (n / 100)).sum()
    assert chi2 < 28  # 99.9 % of random draws are below this with 9 degrees of freedom


def test_positions_outside_are_refused() -> None:
    with pytest.raises(ValueError, match=r"0\.\.4"):
        permute(np.array([5]), 5, 0)


def test_large_domains() -> None:
    n = 10**12
    some = permute(np.arange(1000), n, 9)
    assert len(set(some.tolist())) == 1000 and some.min() >= 0 and some.max() < n
