"""Counts as they are written on the command line."""

from typing import Any

import pytest

from deskside.plan.question import count
from deskside.utils.errors import UsageError


@pytest.mark.parametrize(
    ("text", "value"),
    [("3B", 3e9), ("1.5b", 1.5e9), ("350M", 3.5e8), ("2e9", 2e9), ("1,000", 1000), ("7k", 7000), (5, 5.0)],
)
def test_counts_are_read(text: Any, value: float) -> None:
    assert count("--tokens", text) == value


@pytest.mark.parametrize("text", ["", "B", "three", "-3", "0", "nan", "inf", "1.5", "1e40", "3Q"])
def test_counts_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match=r"^--tokens: .*") as error:
        count("--tokens", text)
    assert "\n" not in str(error.value)
