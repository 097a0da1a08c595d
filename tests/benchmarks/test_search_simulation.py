"""Simulated searches: the Gaussian process, the surrogate of trials, and a search on it."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.search_simulation import row, simulate, time_ratio
from benchmarks.search_surrogate import GaussianProcess, bowl, fit, interior
from benchmarks.search_variants import VARIANTS
from deskside.study.search.outcome import Outcome
from deskside.study.search.suggestions import RUNGS, Suggested
from tests.study.search.made_search import plan


def test_a_gaussian_process_predicts_a_smooth_function_and_its_leave_one_out_is_that_of_refits() -> None:
    random = np.random.default_rng(0)
    x = random.uniform(size=(25, 2))
    y = np.sin(3 * x[:, 0]) + x[:, 1]
    model = GaussianProcess(x, y)
    assert model(np.array([0.5, 0.5])) == pytest.approx(math.sin(1.5) + 0.5, abs=0.02)
    # Brute force with the same scales, mean and deviation
    covariance = model._covariance(model._theta)
    for left in (0, 7):
        rest = np.arange(25) != left
        weights = np.linalg.solve(covariance[rest][:, rest], model._y[rest])
        predicted = model._mean + model._deviation * covariance[left, rest] @ weights
        assert model.leave_one_out()[left] == pytest.approx(predicted)


def made_trials(number: int) -> list[Suggested]:
    """Return trials whose loss depends on the rate only. Every third one was pruned at the first rung."""
    random, trials = np.random.default_rng(1), []
    for n in range(number):
        rate = 0.04 * 8 ** random.uniform(-1, 1)
        last = 1.3 + 0.05 * math.log(rate / 0.03) ** 2
        pruned = n % 3 == 2
        reports = {rung: last + 0.1 * (RUNGS - rung) for rung in range(1, 2 if pruned else RUNGS)}
        parameters = {"optim.lr": rate, "model.depth": int(random.integers(2, 9))}
        trials.append(
            Suggested(
                n, parameters, "pruned" if pruned else "complete", None if pruned else last, {}, reports
            )
        )
    return trials


def test_a_surrogate_repeats_the_trials_that_it_was_fitted_to() -> None:
    space = plan(Path("data"), "optim.lr,model.depth").space
    surrogate, errors = fit(space, made_trials(24), [60.0 + 10] * 24, 60.0)
    assert errors.startswith("24 trials, 16 finished")
    at_best = np.array([space[0].position(0.03), 0.3])
    losses = np.exp(surrogate.losses(at_best))
    assert losses == pytest.approx([1.6, 1.5, 1.4, 1.3], abs=0.02)
    moved = interior(surrogate, space)
    assert moved.losses(np.array([0.5, 0.8])) == pytest.approx(surrogate.losses(np.array([0.5, 0.0])))


@pytest.mark.parametrize("name", ["random", "tpe", "near-4", "prune-first"])
def test_a_simulated_search_ends_before_its_confirmation_and_finds_something(name: str) -> None:
    made = plan(Path("data"), "optim.lr,model.depth", hours=0.5, setup_seconds=14.0)
    outcome = simulate(VARIANTS[name], bowl(1, 2), made, 1)
    assert outcome.trials[0].settings == {"optim.lr": 0.04, "model.depth": 4}
    spent = outcome.trials[-1].elapsed
    # Six trials of the confirmation and their margin remain, and not one more trial.
    assert 1800 - 1.15 * 6 * 80 - 80 < spent < 1800 - 6 * 72
    assert outcome.best_so_far[-1][1] <= outcome.trials[0].loss
    assert {one.status for one in outcome.trials} <= {"finished", "pruned"}
    assert outcome == simulate(VARIANTS[name], bowl(1, 2), made, 1)


def test_the_ratio_of_times_is_infinite_if_the_best_of_random_is_never_found() -> None:
    def outcome(*best: tuple[float, float]) -> Outcome:
        return Outcome("made", "tpe", True, 1.0, 1, "", [], list(best))

    random = outcome((60.0, 1.5), (400.0, 1.3))
    assert time_ratio(outcome((60.0, 1.5), (100.0, 1.2)), random) == 0.25
    assert time_ratio(outcome((60.0, 1.5)), random) == math.inf


def test_a_row_has_medians_and_differences_seed_by_seed() -> None:
    made = plan(Path("data"), "optim.lr", hours=0.5, setup_seconds=14.0)
    randoms = [simulate(VARIANTS["random"], bowl(seed, 1), made, seed) for seed in range(2)]
    worse = [replace(one, best_so_far=[(at, loss + 0.1) for at, loss in one.best_so_far]) for one in randoms]
    cells = row("worse", worse, randoms, randoms).replace("+-", "").split()
    assert cells[0] == "worse"
    assert float(cells[4]) == pytest.approx(np.median([one.best_so_far[-1][1] for one in worse]), abs=1e-4)
    assert [float(cell) for cell in cells[5:9]] == [0.1, 0.0, 0.1, 0.0]  # at half of the time and at its end
    assert [float(cell) for cell in cells[9:14]] == [2.0, 0.0, 0.0, 0.0, 1.0]  # it never has random's best
