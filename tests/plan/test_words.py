"""Quantities in words: no exponent, no thousand of a unit where the next one begins, at most half a per cent off."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deskside.plan.words import count, flops, gib, number

UNITS = {"": 1.0, "M": 1e6, "B": 1e9, "T": 1e12}
PREFIXES = {"": 1.0, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15, "E": 1e18}


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (999.6e6, "1B"),
        (999_499_999, "999M"),
        (999_999, "1M"),
        (1.5e9, "1.5B"),
        (371e6, "371M"),
        (12_345, "12,345"),
        (0, "0"),
    ],
)
def test_counts(value: float, text: str) -> None:
    assert count(value) == text


@given(st.floats(1, 1e20))
def test_any_count_reads_back(value: float) -> None:
    found = re.fullmatch(r"([\d,]+(?:\.\d+)?)([MBT]?)", count(value))
    assert found, count(value)
    digits = float(found[1].replace(",", ""))
    assert digits * UNITS[found[2]] == pytest.approx(value, rel=0.0051, abs=0.51)
    assert digits < 1000 or found[2] in ("", "T")


@given(st.floats(1, 1e20))
def test_any_number_of_flops_reads_back(value: float) -> None:
    found = re.fullmatch(r"([\d,]+(?:\.\d+)?) ([MGTPE]?)FLOP", flops(value))
    assert found, flops(value)
    digits = float(found[1].replace(",", ""))
    assert digits * PREFIXES[found[2]] == pytest.approx(value, rel=0.0051)
    assert digits < 1000 or found[2] in ("", "E")


@given(st.floats(-1e9, 1e9).filter(lambda value: value == 0 or abs(value) > 1e-9))
def test_any_number_reads_back_without_an_exponent(value: float) -> None:
    text = number(value)
    assert "e" not in text
    assert float(text.replace(",", "")) == pytest.approx(value, rel=0.0051, abs=1e-11)


@given(st.floats(0, 1e13))
def test_memory_is_below_1024_of_the_smaller_unit(size: float) -> None:
    amount, unit = gib(size).split()
    assert unit == "GiB" or float(amount) < 1024
