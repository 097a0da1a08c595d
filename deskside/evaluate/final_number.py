"""Find the final answer of a text, and the number in it: for the tasks that ask for a number and for rewards."""

import re
from fractions import Fraction

# Before the final answer: \boxed{, GSM8K's "####", and "The answer is".
_MARK = re.compile(r"\\boxed\s*(?P<brace>\{)|####|answer\s+is\s*:?", re.IGNORECASE)
# Commas separate groups as in 1,234,567, or as in India, 12,34,567. Others separate numbers: (3,4) are two.
_GROUPED = r"(?:\d{1,3}(?:,\d{3})+|\d{1,2}(?:,\d{2})+,\d{3})(?!\d|,\d)"
# A minus sign after a word character or a closing parenthesis, or with a space after it, is a subtraction.
_NUMBER = re.compile(rf"(?:(?<![\w)])-)?(?:\$\s?)?(?:(?:{_GROUPED}|\d+)(?:\.\d+)?|\.\d+)(?:\s*/\s*\d+)?")
# A numerator or denominator of one digit needs no braces. A whole number before the fraction makes a mixed number.
_LATEX_FRACTION = re.compile(
    r"(?:(?P<whole>\d{1,50}) ?)?\\[dt]?frac\s*(?:\{\s*(?P<top>\d{1,50})\s*\}|(?P<top_digit>\d))"
    r"\s*(?:\{\s*(?P<bottom>\d{1,50})\s*\}|(?P<bottom_digit>\d))"
)
_MAX_NUMBER_CHARACTERS = 200  # longer numbers are not answers, and take long to compare


def final_number(text: str) -> Fraction | None:
    r"""Return the first number of the marked answer, or the last number of a text without one; None without a number.

    It is exact: 0.5, 1/2 and \frac{2}{4} are equal. Thousands separators and dollar signs are ignored.
    """
    text = text.replace("\u2212", "-")  # the Unicode minus sign
    text = _LATEX_FRACTION.sub(_plain_fraction, text)
    answer = marked_answer(text)
    numbers = _NUMBER.findall(text if answer is None else answer)
    return _fraction(numbers[-1 if answer is None else 0]) if numbers else None


def marked_answer(text: str) -> str | None:
    """Return the text after the last mark up to the end of its line or braces, or None if no mark has text."""
    for mark in reversed(list(_MARK.finditer(text))):
        rest = text[mark.end() :].lstrip()
        if answer := rest.partition("}" if mark["brace"] else "\n")[0].strip():
            return answer
    return None


def _plain_fraction(match: re.Match[str]) -> str:
    """Return a fraction in LaTeX as 1/2."""
    top, bottom = match["top"] or match["top_digit"], match["bottom"] or match["bottom_digit"]
    if match["whole"]:
        top = str(int(match["whole"]) * int(bottom) + int(top))
    return f"{top}/{bottom}"


def _fraction(text: str) -> Fraction | None:
    text = re.sub(r"[$,\s]", "", text)
    if len(text) > _MAX_NUMBER_CHARACTERS:
        return None
    numerator, _, denominator = text.partition("/")
    if denominator and not int(denominator):
        return None
    return Fraction(numerator) / int(denominator or 1)
