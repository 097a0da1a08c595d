"""The formula of a term, written with numbers, computes its value, whatever operations created it."""

import math
import operator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deskside.budget.terms import Term, exp, explained, leaf, named

numbers = st.integers(1, 20)
terms = st.recursive(
    numbers.map(lambda n: leaf("n", n)),
    lambda inner: st.builds(
        lambda operation, left, right: operation(left, right),
        st.sampled_from([operator.add, operator.sub, operator.mul]),
        inner,
        st.one_of(inner, numbers),
    ),
    max_leaves=8,
)


def evaluate(filled: str) -> float:
    text = filled.replace(",", "").replace(" x ", " * ").replace("^", "**")
    return float(eval(text, {"__builtins__": {}}))


@given(terms)
def test_the_filled_formula_evaluates_to_the_value(term: Any) -> None:
    assert evaluate(term.filled) == pytest.approx(float(term))


def test_parentheses_follow_precedence() -> None:
    a, b, c = (leaf(name, value) for name, value in (("a", 2), ("b", 3), ("c", 5)))
    assert (a - (b - c)).formula == "a - (b - c)"  # type: ignore[attr-defined]
    assert (a / (b * c)).formula == "a / (b x c)"  # type: ignore[attr-defined]
    assert ((a + b) ** (1 / c)).formula == "(a + b) ^ (1 / c)"
    assert evaluate(exp(-a / b).filled) == pytest.approx(math.exp(-2 / 3))  # type: ignore[attr-defined]


def test_named_results_become_lines() -> None:
    shared = named("both", leaf("a", 2) + leaf("b", 3), "bytes")
    lines = explained("result", shared * shared + 1, "bytes")
    assert [(line.what, line.formula, line.value) for line in lines] == [
        ("both", "a + b", 5),
        ("result", "both x both + 1", 26),
    ]


def test_plain_numbers_stay_plain() -> None:
    assert named("x", 7.0) == 7.0 and not isinstance(named("x", 7.0), Term)
