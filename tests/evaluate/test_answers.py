"""Extraction of the answer from generated text."""

from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deskside.evaluate.scoring import code_blocks, number_in, same_words


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("2 + 3 = 5\n#### 5", "5"),
        ("#### 1,234,567", "1234567"),
        ("#### $18.00", "18.00"),
        ("The answer is 7. Then 9 more.", "7"),
        ("The answer is: -12", "-12"),
        ("The answer is 3. No: the final answer is 4.", "4"),
        ("so $\\boxed{42}$ of 100", "42"),
        ("16 - 3 - 4", "4"),
        ("16-3", "3"),
        ("it falls to -3 degrees", "-3"),
        ("(5)-2", "2"),
        ("he has 12 apples", "12"),
        ("costs $1,000.", "1000"),
        ("a share of .5", ".5"),
        ("the answer is \u22125", "-5"),
        ("16\u22123", "3"),
        ("#### none, or 6", "6"),
        ("12 ####", "12"),
        ("no number", None),
        ("", None),
    ],
)
def test_number_in(text: str, number: str | None) -> None:
    assert number_in(text) == (None if number is None else Decimal(number))


@given(st.integers(-(10**12), 10**12), st.booleans())
def test_numbers_survive_their_writing(value: int, separators: bool) -> None:
    text = f"so it is {value:,}" if separators else f"#### {value}"
    assert number_in(text) == value


@given(st.text())
def test_any_text_is_taken(text: str) -> None:
    number_in(text)
    code_blocks(text)


def test_same_words() -> None:
    assert same_words(" The Onion.\n", ("onion",))
    assert same_words("D-Day", ("d day", "DDay"))
    assert not same_words("onions", ("onion",))


def test_code_blocks() -> None:
    text = "Sure:\n```python\ndef f():\n    return 1\n```\nDone ```x```"
    assert code_blocks(text) == ["def f():\n    return 1\n"]
    assert code_blocks("```\nx = 1") == ["x = 1"]
    shell = "```bash\npip install x\n```\n"
    assert code_blocks(f"{shell}Then:\n```python\nx = 1\n```\n{shell}Done") == ["x = 1\n"]
    assert code_blocks("def f(): pass") == []
