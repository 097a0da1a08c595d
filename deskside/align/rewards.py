"""Rewards: functions of a question, the model's answer, and the reference answer.

    reward(prompt, completion, answer) -> float

    number   1 if the final number of the completion equals that of the answer exactly: 0.5 = 1/2 = 2/4
    exact    1 if the completion equals the answer, apart from surrounding white space
    format   1 if the completion marks its final answer: "#### 7", "\\boxed{7}" or "The answer is 7"
    code     1 if the completion's code passes the tests in `answer`, run in the sandbox

These are the built-in ones. `0.9*number+0.1*format` is a weighted sum of several. `my.py:reward` is a function from a
file, which is copied into the run.
"""

import importlib.util
import inspect
import math
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

from deskside.evaluate import sandbox
from deskside.evaluate.scoring import code_blocks
from deskside.utils.child_process import cpu_cores
from deskside.utils.errors import RunError, UsageError

Reward = Callable[[str, str, str], float]

_NUMBER = re.compile(r"-?(?:\d[\d,]*(?:\.\d+)?|\.\d+)(?:\s*/\s*\d+)?")
_MARKS = (
    re.compile(r"\\boxed\s*\{([^{}]*)\}"),
    re.compile(r"####\s*([^\n]+)"),
    re.compile(r"answer\s+is\s*:?\s*([^\n]+)", re.IGNORECASE),
)
_MAX_NUMBER_CHARACTERS = 200  # longer numbers are not answers, and take long to compare


def final_number(text: str) -> Fraction | None:
    """Return the number in the marked final answer, or the last number if none is marked, or None without a number."""
    text = text.replace("\u2212", "-")  # the Unicode minus sign
    for mark in _MARKS:
        marked = mark.findall(text)
        if marked:
            numbers = _NUMBER.findall(marked[-1])
            return _fraction(numbers[0]) if numbers else None
    numbers = _NUMBER.findall(text)
    return _fraction(numbers[-1]) if numbers else None


def _fraction(text: str) -> Fraction | None:
    text = re.sub(r"[,\s]", "", text)
    if len(text) > _MAX_NUMBER_CHARACTERS:
        return None
    numerator, _, denominator = text.partition("/")
    if denominator and not int(denominator):
        return None
    return Fraction(numerator) / int(denominator or 1)


def number(prompt: str, completion: str, answer: str) -> float:
    """Return 1 if the final numbers of completion and answer are equal. Raises UsageError if the answer has none."""
    expected = final_number(answer)
    if expected is None:
        raise UsageError(
            f"reward number: the answer {answer[:60]!r} has no number; use the reward exact, or your own my.py:function"
        )
    return float(final_number(completion) == expected)


def exact(prompt: str, completion: str, answer: str) -> float:
    """Return 1 if completion and answer are equal, apart from surrounding white space."""
    return float(completion.strip() == answer.strip())


def has_marked_answer(prompt: str, completion: str, answer: str) -> float:
    """Return 1 if the completion marks its final answer, right or wrong: the reward `format`."""
    return float(any(mark.search(completion) for mark in _MARKS))


def code(prompt: str, completion: str, answer: str) -> float:
    """Return 1 if the completion's code passes the tests in `answer`.

    The code is the last of `code_blocks`, or the whole completion if there is none.
    """
    blocks = code_blocks(completion)
    return float(sandbox.check(blocks[-1] if blocks else completion, answer).passed)


BUILT_IN: dict[str, Reward] = {"number": number, "exact": exact, "format": has_marked_answer, "code": code}


@dataclass(frozen=True)
class ParsedReward:
    """A parsed reward specification: weighted functions, and the file of the user's function, if any."""

    spec: str
    parts: tuple[tuple[float, Reward], ...]
    file: Path | None = None

    def __call__(self, prompt: str, completion: str, answer: str) -> float:
        """Compute the weighted sum. Raises RunError if a function fails or its value is not finite."""
        total = 0.0
        for weight, part in self.parts:
            try:
                value = float(part(prompt, completion, answer))
            except (UsageError, RunError):
                raise
            except Exception as error:
                raise RunError(
                    f"reward {self.spec}: {type(error).__name__}: {error} (for the completion {completion[:60]!r})"
                ) from error
            if not math.isfinite(value):
                raise RunError(
                    f"reward {self.spec}: must be finite, but is {value} for the completion {completion[:60]!r}"
                )
            total += weight * value
        return total

    def compute_all(self, cases: Sequence[tuple[str, str, str]]) -> list[float]:
        """Return the rewards of (prompt, completion, answer) tuples, in order. `code` runs on all CPU cores at once."""
        if not any(part is code for _, part in self.parts):
            return [self(*case) for case in cases]
        with ThreadPoolExecutor(cpu_cores()) as pool:
            return list(pool.map(lambda case: self(*case), cases))


def parse(spec: str) -> ParsedReward:
    """Parse a reward specification, as in the module docstring. Raises UsageError if it is not valid."""
    if ".py:" in spec:
        path, _, name = spec.rpartition(":")
        file = Path(path).expanduser().resolve()
        return ParsedReward(spec, ((1.0, _from_file(file, name)),), file)
    parts = []
    for term in spec.split("+"):
        weight, star, name = term.strip().rpartition("*")
        try:
            value = float(weight) if star else 1.0
            if not math.isfinite(value):
                raise ValueError
        except ValueError:
            raise UsageError(
                f"reward: {weight!r} in {spec!r} is not a number; write weights like this: 0.9*number+0.1*format"
            ) from None
        if name.strip() not in BUILT_IN:
            raise UsageError(
                f"reward: {name.strip()!r} does not exist; choose from {', '.join(BUILT_IN)}, or give my.py:function"
            )
        parts.append((value, BUILT_IN[name.strip()]))
    return ParsedReward(spec, tuple(parts))


def _from_file(file: Path, name: str) -> Reward:
    if not file.is_file():
        raise UsageError(f"reward: {file} does not exist; give an existing file as my.py:function")
    spec = importlib.util.spec_from_file_location(f"deskside_reward_{file.stem}", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise UsageError(f"reward: {file} cannot be loaded: {type(error).__name__}: {error}") from error
    function = getattr(module, name, None)
    if not callable(function):
        raise UsageError(f"reward: {file} has no function {name!r}")
    try:
        inspect.signature(function).bind("", "", "")
    except TypeError:
        raise UsageError(f"reward: {name} in {file} must take (prompt, completion, answer)") from None
    return function
