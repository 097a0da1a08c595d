"""Formatted numbers have no exponent, use the largest fitting unit, and are at most half a percent off."""

import re
from decimal import ROUND_HALF_UP, Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deskside.utils.format import (
    GIB,
    UNKNOWN,
    bits_per_byte,
    count,
    duration,
    elapsed,
    flops,
    gib,
    gib_digits,
    gib_range,
    hours,
    number,
    percent,
    percent_digits,
    percent_range,
    plural,
    value_text,
)
from tests.sources import PACKAGE, files

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
    match = re.fullmatch(r"([\d,]+(?:\.\d+)?)([MBT]?)", count(value))
    assert match, count(value)
    digits = float(match[1].replace(",", ""))
    assert digits * UNITS[match[2]] == pytest.approx(value, rel=0.0051, abs=0.51)
    assert digits < 1000 or match[2] in ("", "T")


@given(st.floats(1, 1e20))
def test_any_number_of_flops_reads_back(value: float) -> None:
    match = re.fullmatch(r"([\d,]+(?:\.\d+)?) ([MGTPE]?)FLOP", flops(value))
    assert match, flops(value)
    digits = float(match[1].replace(",", ""))
    assert digits * PREFIXES[match[2]] == pytest.approx(value, rel=0.0051)
    assert digits < 1000 or match[2] in ("", "E")


@given(st.floats(-1e9, 1e9).filter(lambda value: value == 0 or abs(value) > 1e-9))
def test_any_number_reads_back_without_an_exponent(value: float) -> None:
    text = number(value)
    assert "e" not in text
    assert float(text.replace(",", "")) == pytest.approx(value, rel=0.0051, abs=1e-11)


@given(st.floats(0, 1e13))
def test_memory_is_below_1024_of_the_smaller_unit(size: float) -> None:
    amount, unit = gib(size).split()
    assert unit == "GiB" or float(amount) < 1024


@pytest.mark.parametrize(("value", "text"), [(0.4, "0.40"), (12.34, "12.3"), (1204.4, "1,204")])
def test_hours(value: float, text: str) -> None:
    assert hours(value) == text


@pytest.mark.parametrize(("size", "text"), [(0.42, "0.42"), (12.34, "12.3"), (99.96, "100"), (141.2, "141")])
def test_gib_digits(size: float, text: str) -> None:
    assert gib_digits(size * 2**30) == text


SECONDS = {"s": 1, "min": 60, "h": 3600, "d": 86400}


@given(st.floats(0.001, 1e8))
def test_elapsed_reads_back_to_its_smaller_unit(seconds: float) -> None:
    parts = elapsed(seconds).split()
    parsed = sum(float(amount) * SECONDS[unit] for amount, unit in zip(parts[::2], parts[1::2], strict=True))
    smallest = SECONDS[parts[-1]] if len(parts) > 2 else 0.1 if seconds >= 9.995 else 0.01 * seconds
    assert parsed == pytest.approx(seconds, abs=0.51 * smallest + 0.51 * (len(parts) > 2))


def test_unknown_values_have_one_text() -> None:
    assert count(None) == elapsed(None) == UNKNOWN


@given(st.floats(-50, 50))
def test_percentages_round_to_their_digits(share: float) -> None:
    decimals = percent_digits(share)
    parsed = float(percent(share, decimals, signed=True).removesuffix(" %").replace(",", ""))
    assert parsed == pytest.approx(100 * share, abs=0.5001 * 10**-decimals)


def test_percentages_have_signs_and_ranges() -> None:
    assert percent(0.0523, 2, signed=True) == "+5.23 %" and percent(-0.00001, 2, signed=True) == "0 %"
    assert percent_range(0.119, 0.127, 1) == "11.9 to 12.7 %"


def test_plurals() -> None:
    assert [plural(n, noun) for n, noun in ((1, "trial"), (2, "trial"), (1200, "directory"), (2, "key"))] == [
        "1 trial",
        "2 trials",
        "1,200 directories",
        "2 keys",
    ]


def test_json_values_are_short_text() -> None:
    assert value_text({"a": [1, 2.5], "b": None, "c": True}) == "a: 1, 2.5; b: none; c: true"
    assert value_text(12345) == "12,345" and value_text([]) == "(empty)" and value_text(3e-4) == "0.0003"


def test_no_other_module_scales_numbers() -> None:
    """`f"{n / 1e6:.3g}M"` writes 1.29 billion as 1.29e+03M."""
    scaled_by_hand = re.compile(r"/ ?1e(6|9|12):[^}]*g\}\s?[MBT]\b")
    found = {path.name for path in files(PACKAGE, "*.py") if scaled_by_hand.search(path.read_text("utf-8"))}
    assert found <= {"format.py"}


@given(st.floats(1e-12, 1e10))
def test_durations_have_no_exponent(seconds: float) -> None:
    assert "e-" not in duration(seconds) and "e+" not in duration(seconds)


def test_a_loss_in_a_sentence_agrees_with_the_table() -> None:
    for thousandths in range(600, 1300):
        for value in (thousandths / 1000 - 4e-4, thousandths / 1000, thousandths / 1000 + 4e-4):
            shown = Decimal(f"{value:.3f}").quantize(Decimal("0.01"), ROUND_HALF_UP)
            assert bits_per_byte(value) == str(shown)


def test_a_range_of_sizes_has_its_unit_once() -> None:
    assert gib_range(23.5 * GIB, 28.5 * GIB) == "23.5 to 28.5 GiB"
    assert gib_range(0.5 * GIB, 2 * GIB) == "512 MiB to 2.0 GiB"
