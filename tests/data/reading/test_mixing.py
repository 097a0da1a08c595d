from __future__ import annotations

from decimal import Decimal, localcontext

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deskside.data.reading.mixing import PERIOD, Mixture, assign_components, temperature_weights
from deskside.data.reading.tags import TagInfo
from deskside.utils.errors import UsageError

TAGS = [
    TagInfo(source="wiki", lang="en"),
    TagInfo(source="wiki", lang="hi"),
    TagInfo(source="books", lang="en"),
]


@given(st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=40))
@settings(max_examples=200, deadline=None)
def test_proportions_are_exact_over_each_period_and_no_row_is_skipped(weights: list[float]) -> None:
    mixture = Mixture.of(weights)
    period = len(mixture.component)
    component, count = mixture.locate(np.arange(3 * period))
    share = np.array(weights) / sum(weights) * period
    for c in range(len(weights)):
        mine = component == c
        for p in range(3):
            assert mine[p * period : (p + 1) * period].sum() == mixture.count[c]
        assert mixture.count[c] >= 1
        assert count[mine].tolist() == list(range(3 * mixture.count[c]))
    lifted = (share < 1).sum()
    assert (np.abs(mixture.count - share) <= 1 + lifted).all()


def test_many_tiny_weights_each_get_a_row() -> None:
    mixture = Mixture.of([1e9] + [1e-9] * (PERIOD - 1))
    assert (mixture.count == 1).all()


def test_rows_are_spread_evenly() -> None:
    mixture = Mixture.of([3, 1])
    component, _ = mixture.locate(np.arange(64))
    assert all((component[i : i + 4] == 1).sum() == 1 for i in range(0, 64, 4))


@given(st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=9), st.integers(0, 5000))
def test_counts_are_those_of_the_positions(weights: list[float], rows: int) -> None:
    mixture = Mixture.of(weights)
    component, _ = mixture.locate(np.arange(rows))
    assert mixture.counts(rows).tolist() == np.bincount(component, minlength=len(weights)).tolist()


@given(
    st.lists(st.integers(1, 10**13), min_size=2, max_size=50), st.one_of(st.just(1.0), st.floats(1.0, 1000.0))
)
def test_temperature_of_exact_arithmetic(sizes: list[int], temperature: float) -> None:
    """The shares equal decimal arithmetic with 50 digits, and the shares of rows
    differ by at most one row per period.
    """
    with localcontext() as context:
        context.prec = 50
        powers = [Decimal(n) ** (1 / Decimal(temperature)) for n in sizes]
        exact = [float(power / sum(powers)) for power in powers]
    weights = temperature_weights(np.array(sizes), temperature)
    assert [w / sum(weights) for w in weights] == pytest.approx(exact, rel=1e-9)
    rows = Mixture.of(weights).counts(PERIOD)
    if min(exact) * PERIOD >= 1:
        assert all(abs(count - PERIOD * share) <= 1 for count, share in zip(rows, exact, strict=True))
    if temperature == 1.0:
        assert weights == pytest.approx([n / max(sizes) for n in sizes], rel=1e-9)


@pytest.mark.parametrize("weights", [[], [0.0], [-1.0], [float("nan")], [1.0] * (PERIOD + 1)])
def test_impossible_weights(weights: list[float]) -> None:
    with pytest.raises(ValueError, match="positive"):
        Mixture.of(weights)


def test_components_by_language_source_and_both() -> None:
    assert assign_components(TAGS, [0, 1, 2], {"en": 2, "hi": 1})[2].tolist() == [0, 1, 0]
    assert assign_components(TAGS, [0, 1, 2], {"source:wiki": 2, "books": 1})[2].tolist() == [0, 0, 1]
    names, values, owner = assign_components(TAGS, [0, 1, 2], {"en": 0, "hi": 5})
    assert (names, values, owner.tolist()) == (["hi"], [5.0], [-1, 0, -1])


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({"fr": 1.0}, "weight fr: is not in the data"),
        ({"en": 1.0}, "has no weight"),
        ({"en": 1.0, "wiki": 1.0, "hi": 1.0}, "both match"),
        ({"en": -1.0, "hi": 1.0}, "0 or more"),
        ({"en": 0.0, "hi": 0.0}, "every weight is 0"),
    ],
)
def test_invalid_weights(weights: dict[str, float], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        assign_components(TAGS, [0, 1, 2], weights)


def test_name_that_is_source_and_language() -> None:
    tags = [TagInfo(source="en", lang="en"), TagInfo(source="x", lang="en")]
    with pytest.raises(UsageError, match="write source: or lang:"):
        assign_components(tags, [0, 1], {"en": 1.0})
    assert assign_components(tags, [0, 1], {"lang:en": 1.0})[2].tolist() == [0, 0]
