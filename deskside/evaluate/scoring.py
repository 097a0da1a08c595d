"""Extract the words or code from a generated answer, and summarize the accuracy of tasks."""

import math
import re
import string
from collections.abc import Sequence

Z = 1.959963984540054  # normal quantile of a 95 % confidence interval
_FENCE = re.compile(r"```([^\n`]*)\n(.*?)(?:```|\Z)", re.DOTALL)  # language, code


def same_words(text: str, references: tuple[str, ...]) -> bool:
    """Return True if the text equals one of the references, ignoring case, articles, punctuation and extra spaces.

    This is how SQuAD and TriviaQA compare (Rajpurkar et al. 2016, arXiv:1606.05250).
    """
    return words(text) in {words(reference) for reference in references}


def words(text: str) -> str:
    """Return the text in lower case with single spaces, without articles and punctuation."""
    bare = "".join(letter for letter in text.lower() if letter not in string.punctuation)
    return " ".join(word for word in bare.split() if word not in ("a", "an", "the"))


def code_blocks(text: str) -> list[str]:
    """Return the fenced code blocks of a chat answer that are in Python or in no named language."""
    return [m[2] for m in _FENCE.finditer(text) if m[1].strip().lower() in ("", "py", "python")]


# Accuracy


def wilson(correct: float, n: int) -> tuple[float, float]:
    """Return the 95 % confidence interval of an accuracy (Wilson 1927, J. of the American Statistical Association 22).

    It lies within [0, 1], and is not empty if all items are correct or none is.
    """
    share, spread = correct / n, Z * Z / n
    middle = (share + spread / 2) / (1 + spread)
    half = Z / (1 + spread) * math.sqrt(share * (1 - share) / n + spread / (4 * n))
    # The interval ends exactly at 0 or 1 in these cases, but rounding misses it.
    return 0.0 if correct == 0 else middle - half, 1.0 if correct == n else middle + half


def centred(accuracy: float, chance: float) -> float:
    """Scale an accuracy to 0 for guessing and 1 for all correct.

    This is the centered accuracy of the CORE metric (DataComp-LM, Li et al. 2024, arXiv:2406.11794).
    """
    return (accuracy - chance) / (1 - chance)


def mean_centred(results: Sequence[tuple[float, int, float]]) -> tuple[float, float, float]:
    """Return the mean centered accuracy of tasks and its 95 % confidence interval: (mean, low, high).

    The tasks are assumed to be independent. The variance of a task is estimated with one more correct and one more
    wrong answer, so it is not zero if all answers are correct or all are wrong.

    Args:
        results: (accuracy, number of items, accuracy of guessing) of each task.
    """
    total = variance = 0.0
    for accuracy, n, chance in results:
        total += centred(accuracy, chance)
        share = (accuracy * n + 1) / (n + 2)
        variance += share * (1 - share) / n / (1 - chance) ** 2
    mean, half = total / len(results), Z * math.sqrt(variance) / len(results)
    return mean, mean - half, mean + half
