"""Rewards: the built-in ones, and what a user-defined function may do."""

from pathlib import Path

import pytest

from deskside.align import rewards
from deskside.align.reward_server import RewardCase
from deskside.align.rewards import ParsedReward
from deskside.config.align import GrpoConfig
from deskside.utils.errors import RunError, UsageError


def parse(spec: str, *columns: str) -> ParsedReward:
    reward = rewards.parse(GrpoConfig(reward=spec, columns=columns))
    assert isinstance(reward, ParsedReward)
    return reward


def test_built_in_rewards() -> None:
    assert parse("number")("q", "It makes 0.50", "1/2") == 1
    assert parse("number")("q", "It makes 0.51", "1/2") == 0
    assert parse("exact")("q", " Paris\n", "Paris") == 1
    assert parse("exact")("q", "paris", "Paris") == 0
    assert parse("format")("q", "#### 4", "7") == 1
    assert parse("format")("q", "4", "4") == 0
    both = parse("0.9*number + 0.1*format")
    assert both("q", "#### 4", "4") == pytest.approx(1.0)
    assert both("q", "4", "4") == pytest.approx(0.9)
    assert both("q", "#### 5", "4") == pytest.approx(0.1)


def test_code_runs_the_last_block_in_the_sandbox() -> None:
    reward, tests = parse("code"), "assert double(2) == 4"
    blocks = ("def double(x):\n    return x", "def double(x):\n    return 2 * x")
    right = "First\n" + "better\n".join(f"```python\n{block}\n```\n" for block in blocks)
    answers = (right, right + "Run:\n```bash\npython\n```\nDone", "def double(x): return 2 * x", "double")
    assert reward.compute_all([("q", answer, tests) for answer in answers]) == [1, 1, 1, 0]


def test_a_function_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def length(prompt, completion, answer):\n    return len(completion) / 10\n")
    reward = parse(f"{file}:length")
    assert reward.file == file
    assert reward.compute_all([RewardCase("", "12345", ""), RewardCase("", "", "")]) == [0.5, 0.0]


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("def other(): pass", "no function 'score'"),
        ("def score(a, b): return 1", "must take"),
        ("import nothing_like_this", "cannot be loaded: ModuleNotFoundError"),
        ("def score(", "cannot be loaded: SyntaxError"),
    ],
)
def test_a_file_without_a_reward_is_refused(text: str, error: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(text)
    with pytest.raises(UsageError, match=error):
        parse(f"{file}:score")


@pytest.mark.parametrize(
    ("spec", "error"),
    [
        ("numbr", "'numbr' does not exist; choose from number"),
        ("x*number", "'x' in 'x\\*number' is not a number"),
        ("nan*number", "'nan' in 'nan\\*number' is not a number"),
        ("nowhere.py:f", "does not exist"),
        ("number+", "'' does not exist"),
    ],
)
def test_a_reward_that_does_not_exist_is_refused(spec: str, error: str) -> None:
    with pytest.raises(UsageError, match=error):
        parse(spec)


@pytest.mark.parametrize(
    ("body", "error"),
    [
        ("return 1 / 0", "ZeroDivisionError"),
        ("return float('nan')", "must be finite, but is nan"),
        ("return 'much'", "ValueError"),
    ],
)
def test_a_function_that_fails_is_named(body: str, error: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(f"def score(prompt, completion, answer):\n    {body}\n")
    with pytest.raises(RunError, match=error):
        parse(f"{file}:score")("q", "c", "a")


def test_number_needs_a_number_to_compare_with() -> None:
    with pytest.raises(UsageError, match="has no number"):
        rewards.number("q", "7", "seven")


def test_a_function_gets_the_columns_that_it_asks_for(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def score(prompt, completion, answer, weight):\n    return weight * len(completion)\n")
    reward = parse(f"{file}:score", "weight")
    assert reward.compute_all([RewardCase("", "abc", "", {"weight": 2})]) == [6]
    for columns in ((), ("weight", "level")):
        with pytest.raises(UsageError, match="must take"):
            parse(f"{file}:score", *columns)
    with pytest.raises(UsageError, match="does not use them"):
        parse("number", "weight")
