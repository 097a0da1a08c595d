"""Optuna's study: TPE compared with random search on a known function, constraints, pruning, and resumed studies."""

import math
from pathlib import Path

import pytest

from deskside.study.search.space import Dimension
from deskside.study.search.suggestions import FILE, Suggestions
from deskside.utils.errors import RunError

SPACE = [
    Dimension("optim.lr", "log", 0.04, 0.005, 0.32),
    Dimension("schedule.decay", "linear", 0.65, 0.1, 0.9),
]


def function(parameters: dict[str, float]) -> float:
    return math.log(parameters["optim.lr"] / 0.013) ** 2 + 4 * (parameters["schedule.decay"] - 0.3) ** 2


def best_after(folder: Path, sampler: str, seed: int, trials: int) -> float:
    folder.mkdir()
    suggestions = Suggestions(folder, SPACE, sampler, False, seed, "x")
    for _ in range(trials):
        number, parameters = suggestions.ask()
        suggestions.finish(number, function(parameters))
    return min(trial.value for trial in suggestions.trials())


@pytest.mark.full
def test_tpe_finds_more_than_random_with_the_same_trials(tmp_path: Path) -> None:
    """Over 8 seeds and 30 trials, TPE's best is below random's in at least six
    pairs, and in the median less than half of it.
    """
    pairs = [
        [best_after(tmp_path / f"{name}{n}", name, n, 30) for name in ("tpe", "random")] for n in range(8)
    ]
    assert sum(tpe < random for tpe, random in pairs) >= 6
    assert sorted(tpe / random for tpe, random in pairs)[4] < 0.5


def test_the_default_comes_first_and_a_resume_suggests_the_same(tmp_path: Path) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    found = []
    for folder, halves in ((whole, (10,)), (cut, (4, 6))):
        folder.mkdir()
        found.append([])
        for trials in halves:
            suggestions = Suggestions(folder, SPACE, "tpe", True, 1, "x")
            for _ in range(trials):
                number, parameters = suggestions.ask()
                suggestions.finish(number, function(parameters))
                found[-1].append(parameters)
    assert found[0] == found[1] and found[0][0] == {"optim.lr": 0.04, "schedule.decay": 0.65}


def test_halving_keeps_the_better_half_at_each_rung(tmp_path: Path) -> None:
    suggestions = Suggestions(tmp_path, SPACE, "tpe", True, 1, "x")
    first, second, third = (suggestions.ask()[0] for _ in range(3))
    assert not suggestions.report(first, 1, 2.0)
    assert suggestions.report(second, 1, 3.0)  # the worse of two
    assert not suggestions.report(third, 1, 1.0)
    assert not suggestions.report(third, 1, 9.0)  # a rung counts once, also after a resume
    assert not suggestions.report(first, 2, 1.5) and suggestions.report(third, 2, 1.6)
    suggestions.prune(second, status="pruned")
    told = Suggestions(tmp_path, SPACE, "tpe", True, 1, "x").trials()
    assert [trial.state for trial in told] == ["running", "pruned", "running"]
    assert told[1].reports == {1: 3.0} and told[1].value is None


def test_tpe_avoids_what_was_refused(tmp_path: Path) -> None:
    """Rates above 0.04 are impossible. After the random start, most suggestions are below."""
    suggestions = Suggestions(tmp_path, SPACE, "tpe", False, 3, "x")
    rates = []
    for _ in range(18):
        number, parameters = suggestions.ask()
        rates.append(parameters["optim.lr"])
        if parameters["optim.lr"] > 0.04:
            suggestions.refuse(number, parameters["optim.lr"] - 0.04)
        else:
            suggestions.finish(number, function(parameters))
    assert sum(rate > 0.04 for rate in rates[12:]) <= 3


def test_a_damaged_storage_is_one_line(tmp_path: Path) -> None:
    (tmp_path / FILE).write_bytes(b"not a database" * 100)
    with pytest.raises(RunError, match=FILE):
        Suggestions(tmp_path, SPACE, "tpe", False, 1, "x")
