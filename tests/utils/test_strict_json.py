"""Printed JSON is standard JSON: no NaN and no infinity, at any depth."""

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deskside.utils import strict_json

VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner) | st.tuples(inner, inner),
    max_leaves=20,
)


def expected(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: expected(item) for key, item in value.items()}
    return [expected(item) for item in value] if isinstance(value, list | tuple) else value


@given(VALUES)
def test_values_round_trip_and_non_finite_numbers_become_null(value: Any) -> None:
    text = strict_json.dumps(value)
    assert text.isascii()
    assert json.loads(text, parse_constant=lambda name: pytest.fail(name)) == expected(value)
