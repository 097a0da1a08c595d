"""Rewards: functions of a question, the model's answer, and the reference answer.

    reward(prompt, completion, answer) -> float

    number   1 if the final number of the completion equals the answer exactly, as a fraction: 0.5 = 1/2 = 2/4
    exact    1 if the completion equals the answer, apart from surrounding white space
    format   1 if the completion marks its final answer: "#### 7", "\\boxed{7}" or "The answer is 7"
    code     1 if the completion's code passes the tests in `answer`, run in the sandbox

A sum such as `0.9*number+0.1*format` combines several; `my.py:reward` loads a function from a file, which is copied
into the run.
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
from deskside.utils.child_process import cpu_cores
from deskside.utils.errors import RunError, UsageError

Reward = Callable[[str, str, str], float]

_NUMBER = re.compile(r"-?(?:\d[\d,]*(?:\.\d+)?|\.\d+)(?:\s*/\s*\d+)?")
_MARKS = (
    re.compile(r"\\boxed\s*\{([^{}]*)\}"),
    re.compile(r"####\s*([^\n]+)"),
    re.compile(r"answer\s+is\s*:?\s*([^\n]+)", re.IGNORECASE),
)
_BLOCK = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL)
_LONGEST = 200  # characters of a number; longer ones are no answers, and take long to compare


def final_number(text: str) -> Fraction | None:
    """Return the final number of a text: the marked answer, otherwise the last number, or None."""
    text = text.replace("\u2212", "-")
    for mark in _MARKS:
        found = mark.findall(text)
        if found:
            numbers = _NUMBER.findall(found[-1])
            return _fraction(numbers[0]) if numbers else None
    numbers = _NUMBER.findall(text)
    return _fraction(numbers[-1]) if numbers else None


def _fraction(text: str) -> Fraction | None:
    text = re.sub(r"[,\s]", "", text)
    if len(text) > _LONGEST:
        return None
    top, _, bottom = text.partition("/")
    if bottom and not int(bottom):
        return None
    return Fraction(top) / int(bottom or 1)


def number(prompt: str, completion: str, answer: str) -> float:
    """See the module. Raises UsageError if the answer is not a number."""
    wanted = final_number(answer)
    if wanted is None:
        raise UsageError(
            f"reward number: the answer {answer[:60]!r} holds no number; use exact, or a file's function"
        )
    return float(final_number(completion) == wanted)


def exact(prompt: str, completion: str, answer: str) -> float:
    """See the module."""
    return float(completion.strip() == answer.strip())


def format(prompt: str, completion: str, answer: str) -> float:
    """See the module."""
    return float(any(mark.search(completion) for mark in _MARKS))


def code(prompt: str, completion: str, answer: str) -> float:
    """See the module. Runs the last block between ```, or the whole text if there is none."""
    blocks = _BLOCK.findall(completion)
    return float(sandbox.check(blocks[-1] if blocks else completion, answer).passed)


BUILT_IN: dict[str, Reward] = {"number": number, "exact": exact, "format": format, "code": code}


@dataclass(frozen=True)
class Rewards:
    """A parsed reward: its spec, its weighted parts, and the path of the file of a part, if any."""

    spec: str
    parts: tuple[tuple[float, Reward], ...]
    file: Path | None = None

    def __call__(self, prompt: str, completion: str, answer: str) -> float:
        """Compute the reward. Raises RunError if a part fails or is not finite, UsageError as the parts do."""
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
                raise RunError(f"reward {self.spec}: gave {value} for the completion {completion[:60]!r}")
            total += weight * value
        return total

    def of(self, cases: Sequence[tuple[str, str, str]]) -> list[float]:
        """Return the rewards of (prompt, completion, answer) tuples, in order. `code` uses all processors."""
        if not any(part is code for _, part in self.parts):
            return [self(*case) for case in cases]
        with ThreadPoolExecutor(cpu_cores()) as pool:
            return list(pool.map(lambda case: self(*case), cases))


def parse(spec: str) -> Rewards:
    """Parse a reward. Raises UsageError if it does not exist, or if its file cannot be loaded."""
    if ".py:" in spec:
        path, _, name = spec.rpartition(":")
        file = Path(path).expanduser().resolve()
        return Rewards(spec, ((1.0, _from_file(file, name)),), file)
    parts = []
    for term in spec.split("+"):
        weight, star, name = term.strip().rpartition("*")
        try:
            value = float(weight) if star else 1.0
        except ValueError:
            raise UsageError(
                f"reward: {weight!r} in {spec!r} is no weight; write 0.9*number+0.1*format"
            ) from None
        if name.strip() not in BUILT_IN:
            raise UsageError(
                f"reward: there is no {name.strip()!r}; choose from {', '.join(BUILT_IN)}, or give my.py:function"
            )
        parts.append((value, BUILT_IN[name.strip()]))
    return Rewards(spec, tuple(parts))


def _from_file(file: Path, name: str) -> Reward:
    if not file.is_file():
        raise UsageError(f"reward: there is no file {file}")
    found = importlib.util.spec_from_file_location(f"deskside_reward_{file.stem}", file)
    assert found is not None and found.loader is not None
    module = importlib.util.module_from_spec(found)
    try:
        found.loader.exec_module(module)
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
