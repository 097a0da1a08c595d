"""What is printed as JSON is JSON for every reader: no NaN, no infinity, wherever they stand."""

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
def test_every_value_comes_back_and_what_is_not_finite_is_null(value: Any) -> None:
    text = strict_json.dumps(value)
    assert text.isascii()
    assert json.loads(text, parse_constant=lambda name: pytest.fail(name)) == expected(value)
