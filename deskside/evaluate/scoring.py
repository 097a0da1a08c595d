"""Scoring: read the number, words or code of a written answer, and summarize the accuracy of tasks."""

import math
import re
import string
from collections.abc import Sequence
from decimal import Decimal

Z = 1.959963984540054  # of a 95 % confidence interval
# A minus after a number or a bracket, or apart from its number, is a subtraction.
_NUMBER = re.compile(r"(?:(?<![\w)])-)?(?:\$\s?)?(?:\d[\d,]*(?:\.\d+)?|\.\d+)")
_MARKED = re.compile(r"####|the (?:final )?answer is:?|\\boxed\{", re.IGNORECASE)
_FENCE = re.compile(r"```(?:python|py)?[ \t]*\r?\n(.*?)(?:```|\Z)", re.DOTALL | re.IGNORECASE)


def number_in(text: str) -> Decimal | None:
    """Return the number in an answer: the first after the last mark ("####", "The answer is"), else the last one.

    Thousands separators and dollar signs are not part of it. None if there is no number.
    """
    marks = list(_MARKED.finditer(text))
    if marks:
        found = _NUMBER.search(text, marks[-1].end())
        if found is not None:
            return _decimal(found[0])
    numbers = _NUMBER.findall(text)
    return _decimal(numbers[-1]) if numbers else None


def same_words(text: str, references: tuple[str, ...]) -> bool:
    """Return whether a text equals a reference, ignoring case, articles, punctuation and spaces (as SQuAD and
    TriviaQA compare, Rajpurkar et al. 2016, arXiv:1606.05250)."""
    return words(text) in {words(reference) for reference in references}


def words(text: str) -> str:
    """Return a text in lower case, without articles and punctuation, with single spaces."""
    bare = "".join(letter for letter in text.lower() if letter not in string.punctuation)
    return " ".join(word for word in bare.split() if word not in ("a", "an", "the"))


def code_in(text: str) -> str | None:
    """Return the first fenced code block of a chat answer, or None."""
    found = _FENCE.search(text)
    return found[1] if found is not None else None


def _decimal(text: str) -> Decimal:
    return Decimal(re.sub(r"[$,\s]", "", text))


# Accuracy


def wilson(right: int, n: int) -> tuple[float, float]:
    """Return the 95 % confidence interval of a share (Wilson 1927, Journal of the American Statistical Association 22).

    It stays inside of 0..1 and has a width also where all items are right or all are wrong.
    """
    share, spread = right / n, Z * Z / n
    middle = (share + spread / 2) / (1 + spread)
    half = Z / (1 + spread) * math.sqrt(share * (1 - share) / n + spread / (4 * n))
    # Exactly 0 and 1 at the ends, which rounding misses.
    return 0.0 if right == 0 else middle - half, 1.0 if right == n else middle + half


def centred(accuracy: float, chance: float) -> float:
    """Scale an accuracy to 0 for guessing and 1 for all correct.

    This is the centered accuracy of the CORE metric (DataComp-LM, Li et al. 2024, arXiv:2406.11794).
    """
    return (accuracy - chance) / (1 - chance)


def mean_centred(results: Sequence[tuple[float, int, float]]) -> tuple[float, float, float]:
    """Return the mean centered accuracy of (accuracy, items, chance), and its 95 % interval.

    The interval is that of independent tasks. A task's variance is taken between right and wrong answers with one more
    of each, so that tasks that are all right or all wrong have some.
    """
    total = variance = 0.0
    for accuracy, n, chance in results:
        total += centred(accuracy, chance)
        share = (accuracy * n + 1) / (n + 2)
        variance += share * (1 - share) / n / (1 - chance) ** 2
    mean, half = total / len(results), Z * math.sqrt(variance) / len(results)
    return mean, mean - half, mean + half
