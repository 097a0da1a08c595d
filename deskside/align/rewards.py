"""Rewards: functions of a question, the model's answer, and the reference answer.

    reward(prompt, completion, answer) -> float

    number   1 if the final number of the completion equals that of the answer exactly: 0.5 = 1/2 = \\frac{2}{4}
    exact    1 if the completion equals the answer, apart from surrounding white space
    format   1 if the completion marks its final answer: "#### 7", "\\boxed{7}" or "The answer is 7"
    code     1 if the completion's code passes the tests in `answer`, run in the sandbox

These are the built-in ones. `0.9*number+0.1*format` is a weighted sum of several. `my.py:reward` is a function from a
file, which is copied into the run. It also gets the record's fields that align.columns names, by name. `http://...` is
a server (reward_server.py).
"""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from deskside.align.reward_server import DEFAULT_TIMEOUT, NO_COLUMNS, RewardCase, RewardServer
from deskside.align.user_functions import functions_from_file
from deskside.config.align import GrpoConfig
from deskside.evaluate import sandbox
from deskside.evaluate.final_number import final_number, marked_answer
from deskside.evaluate.scoring import code_blocks
from deskside.utils.child_process import cpu_cores
from deskside.utils.errors import RunError, UsageError

Reward = Callable[..., float]


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
    return float(marked_answer(completion) is not None)


def code(prompt: str, completion: str, answer: str) -> float:
    """Return 1 if the completion's code passes the tests in `answer`.

    The code is the last of `code_blocks`, or the whole completion if there is none.
    """
    blocks = code_blocks(completion)
    return float(sandbox.check(blocks[-1] if blocks else completion, answer).passed)


BUILT_IN: dict[str, Reward] = {"number": number, "exact": exact, "format": has_marked_answer, "code": code}


class RewardSource(Protocol):
    """Computes rewards. file: of the user's function, if there is one."""

    @property
    def file(self) -> Path | None: ...
    def check(self) -> None:
        """Raise UsageError if the rewards cannot be computed now."""

    def check_answers(self, answers: Sequence[str], split: str) -> None:
        """Raise UsageError if the reference answers of a split include some that the rewards cannot use."""

    def compute_all(self, cases: Sequence[RewardCase]) -> list[float]: ...


@dataclass(frozen=True)
class ParsedReward:
    """A parsed reward specification: weighted functions, and the file of the user's function, if any."""

    spec: str
    parts: tuple[tuple[float, Reward], ...]
    file: Path | None = None

    def check(self) -> None:
        """Do nothing: `parse` has checked the functions."""

    def check_answers(self, answers: Sequence[str], split: str) -> None:
        """Raise UsageError for answers without a number if the reward needs one."""
        if not any(part is number for _, part in self.parts):
            return
        if unusable := [answer for answer in answers if final_number(answer) is None]:
            raise UsageError(
                f"reward number: {len(unusable):,} of {len(answers):,} answers of the {split} split have no number, "
                f"such as {unusable[0][:60]!r}; take them out, or use the reward exact, or your own my.py:function"
            )

    def __call__(
        self, prompt: str, completion: str, answer: str, columns: Mapping[str, Any] = NO_COLUMNS
    ) -> float:
        """Compute the weighted sum. Raises RunError if a function fails or its value is not finite."""
        total = 0.0
        for weight, part in self.parts:
            try:
                value = float(part(prompt, completion, answer, **columns))
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

    def compute_all(self, cases: Sequence[RewardCase]) -> list[float]:
        """Return the rewards in order. `code` runs on all CPU cores at once."""
        if not any(part is code for _, part in self.parts):
            return [self(*case) for case in cases]
        with ThreadPoolExecutor(cpu_cores()) as pool:
            return list(pool.map(lambda case: self(*case), cases))


def parse(options: GrpoConfig) -> RewardSource:
    """Return the reward of the options, as in the module docstring. Raises UsageError if it is not valid."""
    spec, columns = options.reward, options.columns
    if options.reward_is_server:
        return RewardServer(spec, options.reward_timeout or DEFAULT_TIMEOUT)
    if ".py:" in spec:
        path, _, name = spec.rpartition(":")
        file = Path(path).resolve()
        return ParsedReward(spec, ((1.0, _from_file(file, name, columns)),), file)
    if columns:
        raise UsageError(
            f"align.columns: the reward {spec} does not use them; remove them, or give my.py:function"
        )
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


def _from_file(file: Path, name: str, columns: Sequence[str]) -> Reward:
    function = functions_from_file("reward", file, [name])[0]
    try:
        inspect.signature(function).bind("", "", "", **dict.fromkeys(columns))
    except TypeError:
        parameters = ", ".join(("prompt", "completion", "answer", *columns))
        raise UsageError(f"reward: {name} in {file} must take ({parameters})") from None
    return function
