"""The number in an answer, for evaluation tasks and rewards."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deskside.evaluate.final_number import final_number, marked_answer


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("7", "7"),
        (".25", "1/4"),
        ("temperature \u22124", "-4"),
        ("none at all", None),
        ("2 + 3 = 5\n#### 5", "5"),
        ("3 apples\n#### 1,234", "1234"),
        ("The answer is 0.5, not 3", "1/2"),
        ("#### 1,234,567", "1234567"),
        ("#### $18.00", "18.00"),
        ("#### $18\nor was it 20?", "18"),
        ("The answer is 7. Then 9 more.", "7"),
        ("The answer is: -12", "-12"),
        ("the Answer is: 17/10", "17/10"),
        ("The answer is 3. No: the final answer is 4.", "4"),
        ("The answer is unknown, maybe 4? \n 9", "4"),
        ("The answer is unknown.\n 9", None),
        ("so $\\boxed{42}$ of 100", "42"),
        (r"\boxed{\text{7 apples}}", "7"),
        (r"so \boxed{-5} and not 6", "-5"),
        (r"\boxed{x} and not 6", None),
        (r"\boxed{\frac{1}{2}} and not 2", "1/2"),
        (r"\boxed{\frac12}", "1/2"),
        (r"\boxed{2\frac{1}{3}}", "7/3"),
        (r"it is $-\dfrac{3}{12}$", "-1/4"),
        (r"#### \frac{4}{0}", None),
        ("####\n7", "7"),
        ("12 ####", "12"),
        ("The answer is 7 ####", "7"),
        ("#### none, or 6", "6"),
        ("It is 3 + 4 = 7.", "7"),
        ("16 - 3 - 4", "4"),
        ("16-3", "3"),
        ("(5)-2", "2"),
        ("4 - 5 is -1", "-1"),
        ("it falls to -3 degrees", "-3"),
        ("a loss of -$5", "-5"),
        ("he has 12 apples", "12"),
        ("costs $1,000.", "1000"),
        ("about 12,34,567 people", "1234567"),
        ("1,00,000", "100000"),
        ("the point (3,4)", "4"),
        ("1, 2, 3", "3"),
        ("10,20,30", "30"),
        ("1,234.50", "1234.50"),
        ("a share of .5", "1/2"),
        ("2 / 4", "1/2"),
        ("1/0", None),
        ("the answer is \u22125", "-5"),
        ("16\u22123", "3"),
        ("9" * 5000, None),
        ("no number", None),
        ("", None),
    ],
)
def test_final_number(text: str, number: str | None) -> None:
    assert final_number(text) == (None if number is None else Fraction(number))


@given(st.fractions(max_denominator=10**6), st.text(alphabet="abc ,.\n", max_size=20))
def test_a_marked_fraction_is_found_exactly(value: Fraction, noise: str) -> None:
    text = f"{noise} 12 {noise}\n#### {value.numerator}/{value.denominator}\n{noise}"
    assert final_number(text) == value


@given(st.integers(-(10**12), 10**12), st.booleans())
def test_numbers_survive_their_writing(value: int, separators: bool) -> None:
    text = f"so it is {value:,}" if separators else f"#### {value}"
    assert final_number(text) == value


@given(st.text() | st.text(alphabet="\\boxedfrac{}#$-/,. \n0123456789answeri"))
def test_any_text_is_taken(text: str) -> None:
    final_number(text)


def test_only_a_mark_with_text_marks_an_answer() -> None:
    assert marked_answer("The answer is Paris.\nIndeed.") == "Paris."
    assert marked_answer(r"\boxed{}") is None
    assert marked_answer("####") is None
