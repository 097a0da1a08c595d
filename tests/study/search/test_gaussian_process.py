"""The sampler `gp`: estimates of pruned trials, refused trials, resumed studies, repeated suggestions."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from deskside.study.search.gaussian_process import STARTUP_TRIALS, estimated
from deskside.study.search.space import Dimension
from deskside.study.search.suggestions import Suggestions
from tests.study.search.test_suggestions import SPACE, function


def trial(first: float, last: float) -> SimpleNamespace:
    return SimpleNamespace(intermediate_values={1: first}, value=last)


def test_the_last_loss_of_a_pruned_trial_is_estimated_by_a_line() -> None:
    finished = [trial(2 * last - 1, last) for last in (1.0, 1.2, 1.3, 1.7)]
    assert estimated({1: 3.0}, finished) == pytest.approx(2.0)
    assert estimated({1: 3.0}, finished[:2]) == pytest.approx(3.0 - 0.1)  # too few for a line
    assert estimated({}, finished) is None and estimated({2: 3.0}, finished) is None


def test_it_finds_the_best_of_a_known_function_in_few_trials_and_a_resume_suggests_the_same(
    tmp_path: Path,
) -> None:
    found = []
    for name, halves in (("whole", (10,)), ("cut", (7, 3))):
        (tmp_path / name).mkdir()
        found.append([])
        for trials in halves:
            suggestions = Suggestions(tmp_path / name, SPACE, "gp", True, 1, "x")
            for _ in range(trials):
                number, parameters = suggestions.ask()
                found[-1].append(parameters)
                value = function(parameters)
                if suggestions.report(number, 1, value + 1):
                    suggestions.prune(number)
                else:
                    suggestions.finish(number, value)
    assert found[0] == found[1] and found[0][0] == {"optim.lr": 0.04, "schedule.decay": 0.65}
    assert min(map(function, found[0])) < 0.02


def test_it_avoids_what_was_refused(tmp_path: Path) -> None:
    """Rates below 0.02, where the best would be, are impossible."""
    suggestions = Suggestions(tmp_path, SPACE, "gp", False, 3, "x")
    rates = []
    for _ in range(14):
        number, parameters = suggestions.ask()
        rates.append(parameters["optim.lr"])
        if rates[-1] < 0.02:
            suggestions.refuse(number, 0.02 - rates[-1])
        else:
            suggestions.finish(number, function(parameters))
    assert sum(rate < 0.02 for rate in rates[STARTUP_TRIALS + 3 :]) <= 2


def test_in_a_small_space_it_does_not_suggest_the_same_again_and_again(tmp_path: Path) -> None:
    space = [Dimension("model.depth", "layers", 4, 2, 9)]
    suggestions = Suggestions(tmp_path, space, "gp", False, 1, "x")
    seen = set()
    for _ in range(12):
        number, parameters = suggestions.ask()
        seen.add(parameters["model.depth"])
        suggestions.finish(number, (parameters["model.depth"] - 3) ** 2)
    assert len(seen) >= 6


def test_trials_that_run_at_once_differ(tmp_path: Path) -> None:
    suggestions = Suggestions(tmp_path, SPACE, "gp", False, 1, "x")
    for _ in range(STARTUP_TRIALS + 1):
        number, parameters = suggestions.ask()
        suggestions.finish(number, function(parameters))
    rates = {suggestions.ask()[1]["optim.lr"] for _ in range(4)}
    assert len(rates) == 4
