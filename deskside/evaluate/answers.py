"""What a written answer says: its number, its words, its code."""

import re
import string
from decimal import Decimal

# A minus after a number or a bracket, or apart from its number, is a subtraction.
_NUMBER = re.compile(r"(?:(?<![\w)])-)?(?:\$\s?)?(?:\d[\d,]*(?:\.\d+)?|\.\d+)")
_MARKED = re.compile(r"####|the (?:final )?answer is:?|\\boxed\{", re.IGNORECASE)
_FENCE = re.compile(r"```(?:python|py)?[ \t]*\r?\n(.*?)(?:```|\Z)", re.DOTALL | re.IGNORECASE)


def number_in(text: str) -> Decimal | None:
    """The number that an answer gives: the first one after its last mark ("####", "The answer is"), else its last.

    Thousands separators and dollar signs are no part of it. None where there is none.
    """
    marks = list(_MARKED.finditer(text))
    if marks:
        found = _NUMBER.search(text, marks[-1].end())
        if found is not None:
            return _decimal(found[0])
    numbers = _NUMBER.findall(text)
    return _decimal(numbers[-1]) if numbers else None


def same_words(text: str, references: tuple[str, ...]) -> bool:
    """Whether a text is one of the references, apart from case, articles, punctuation and spaces (as SQuAD and
    TriviaQA compare, Rajpurkar et al. 2016, arXiv:1606.05250)."""
    return words(text) in {words(reference) for reference in references}


def words(text: str) -> str:
    """Lower case, without articles and punctuation, single spaces."""
    bare = "".join(letter for letter in text.lower() if letter not in string.punctuation)
    return " ".join(word for word in bare.split() if word not in ("a", "an", "the"))


def code_in(text: str) -> str | None:
    """The first fenced block of an answer in a chat; None where there is none."""
    found = _FENCE.search(text)
    return found[1] if found is not None else None


def _decimal(text: str) -> Decimal:
    return Decimal(re.sub(r"[$,\s]", "", text))
