"""Duration: accepted and refused forms, and the round trip of its canonical string."""

import json
from typing import Annotated

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, TypeAdapter, ValidationError

from deskside.config.duration import HOURS, Duration


@pytest.mark.parametrize(
    ("text", "value", "unit", "canonical"),
    [
        ("24h", 86400.0, "seconds", "24h"),
        ("90m", 5400.0, "seconds", "1h30m"),
        ("10 min", 600.0, "seconds", "10m"),
        ("300s", 300.0, "seconds", "5m"),
        ("1h30m", 5400.0, "seconds", "1h30m"),
        ("1 h 30 m 5 s", 5405.0, "seconds", "1h30m5s"),
        ("1.5 hours", 5400.0, "seconds", "1h30m"),
        ("0.25s", 0.25, "seconds", "0.25s"),
        ("2 days", 172800.0, "seconds", "48h"),
        ("1.5B tokens", 1_500_000_000, "tokens", "1.5B tokens"),
        ("200M tokens", 200_000_000, "tokens", "200M tokens"),
        ("200m tokens", 200_000_000, "tokens", "200M tokens"),
        ("524,288 tokens", 524288, "tokens", "524288 tokens"),
        ("1e9 tokens", 10**9, "tokens", "1B tokens"),
        ("2000 steps", 2000, "steps", "2000 steps"),
        ("2k steps", 2000, "steps", "2000 steps"),
        ("1 step", 1, "steps", "1 step"),
        ("2000", 2000, "steps", "2000 steps"),
        (2000, 2000, "steps", "2000 steps"),
        ("3 epochs", 3.0, "epochs", "3 epochs"),
        ("0.5 epochs", 0.5, "epochs", "0.5 epochs"),
    ],
)
def test_accepted_forms(text: str | int, value: float, unit: str, canonical: str) -> None:
    duration = Duration.parse(text)
    assert (duration.value, duration.unit) == (value, unit)
    assert str(duration) == canonical


@pytest.mark.parametrize(
    "text",
    ["", " ", "-5h", "0", "0s", 0, -1, "0 tokens", "nan", "nan h", "inf s", float("nan"), float("inf"), 2.5,
     "2.5", "5 parsecs", "h", "1.5 steps", "1.2345 tokens", "10 min 1h", "1h1h", "1h 30",
     "h30", True, None, [1], "1..5h",
     "1e999999 tokens", "5 B", "tokens", "1h; 3 steps"],
)  # fmt: skip
def test_errors_list_the_accepted_forms(text: object) -> None:
    with pytest.raises(ValueError, match=r"24h.*tokens.*steps.*epochs"):
        Duration.parse(text)  # type: ignore[arg-type]


def test_equal_durations_have_equal_hashes() -> None:
    assert {Duration.parse("24h"): 1}[Duration.parse("1440m")] == 1
    assert Duration.parse("24h") != Duration(86400, "steps")


durations = st.one_of(
    st.builds(Duration, st.floats(min_value=1e-9, max_value=1e15, exclude_min=True), st.just("seconds")),
    st.builds(Duration, st.integers(1, 10**7), st.just("seconds")),
    st.builds(Duration, st.floats(min_value=1e-9, max_value=1e6), st.just("epochs")),
    st.builds(Duration, st.integers(1, 10**15), st.sampled_from(["tokens", "steps"])),
)


@given(durations)
def test_canonical_string_parses_back_to_the_same(duration: Duration) -> None:
    again = Duration.parse(str(duration))
    assert again == duration
    assert str(again) == str(duration)
    assert hash(again) == hash(duration)


class Holder(BaseModel):
    every: Duration
    other: Duration | None = None


@given(durations)
def test_json_round_trip_through_pydantic(duration: Duration) -> None:
    text = Holder(every=duration).model_dump_json()
    assert json.loads(text) == {"every": str(duration), "other": None}
    assert Holder.model_validate_json(text).every == duration


def test_pydantic_errors_name_the_field_and_the_accepted_forms() -> None:
    assert Holder(every=5, other="2h").other == Duration(7200, "seconds")  # type: ignore[arg-type]
    with pytest.raises(ValidationError, match=r"(?s)every.*'soon' is not a duration; write it as 24h"):
        Holder.model_validate({"every": "soon"})
    assert Holder.model_json_schema()["properties"]["every"]["type"] == "string"


def test_hours_of_an_option_may_have_units() -> None:
    adapter = TypeAdapter(Annotated[float | None, HOURS])
    given = {"2h": 2.0, "90m": 1.5, "1h30m": 1.5, "0.05": 0.05}
    assert {text: adapter.validate_python(text) for text in given} == given
    for wrong in ("two", "500 steps", "10M tokens"):
        with pytest.raises(ValidationError, match="number of hours"):
            adapter.validate_python(wrong)
