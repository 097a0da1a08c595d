"""The sampler `gp`: Optuna's Gaussian process, with the trials that it would leave out.

Optuna's own counts only trials that finished. Here, a trial that was pruned counts with an estimate of its last loss,
one that was refused as impossible, and one that is running as an average one. A study in memory holds these values;
the search's own has only what was measured.
"""

import statistics
import warnings
from collections.abc import Sequence
from typing import Any

STARTUP_TRIALS = 5  # the default and random ones, before the process begins to model
FEWEST_FOR_A_LINE = 4  # trials; with fewer, a loss is assumed to decrease by as much as others on average


def make_gp_sampler(optuna: Any, trials: Sequence[Any], seed: int) -> Any:
    """Return Optuna's sampler for the next trial. trials: Optuna's, of any state; they and the seed determine it."""
    at_random = optuna.samplers.RandomSampler(seed=seed)
    finished = [one for one in trials if one.state.name == "COMPLETE"]
    if not finished or sum(one.state.is_finished() for one in trials) < STARTUP_TRIALS:
        return at_random
    space = finished[0].distributions
    study = optuna.create_study(
        sampler=optuna.samplers.GPSampler(n_startup_trials=1, seed=seed, warn_independent_sampling=False)
    )
    average = statistics.fmean(one.value for one in finished)
    refused = any(one.constraints for one in trials)
    for one in trials:
        if one.state.name == "FAIL" or one.params.keys() != space.keys():
            continue
        value = one.value if one.state.name == "COMPLETE" else estimated(one.intermediate_values, finished)
        constraints = {"possible": one.constraints.get("possible", 0.0)} if refused else None
        study.add_trial(
            optuna.trial.create_trial(
                params=one.params,
                distributions=space,
                value=average if value is None else value,
                constraints=constraints,
            )
        )
    parameters = study.ask(space).params
    if any(one.params == parameters for one in trials):  # a repeated trial teaches nothing
        return at_random
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        return optuna.samplers.PartialFixedSampler(parameters, at_random)


def estimated(reports: dict[int, float], finished: Sequence[Any]) -> float | None:
    """Return the last loss of a trial by a line through the finished ones' at its last report; None without reports."""
    if not reports:
        return None
    rung = max(reports)
    pairs = [
        (one.intermediate_values[rung], one.value) for one in finished if rung in one.intermediate_values
    ]
    if not pairs:
        return None
    then, last = zip(*pairs, strict=True)
    slope = 1.0
    if len(pairs) >= FEWEST_FOR_A_LINE and len(set(then)) > 1:
        # A line that falls is noise of a few trials.
        slope = max(0.0, statistics.linear_regression(then, last).slope) or slope
    return float(statistics.fmean(last) + slope * (reports[rung] - statistics.fmean(then)))
