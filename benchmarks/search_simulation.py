"""Simulate searches on a model of measured trials, to compare samplers and pruners without a GPU.

    python -m benchmarks.search_simulation searches/tpe searches/random --pairs 100 --only tpe,gp

The searches must have the same space and trial length. A surrogate (`search_surrogate.py`) is fitted to their trials.
A simulated search asks deskside's own `Suggestions`, with Optuna's storage in memory, until the time at which the real
one begins its confirmation. Every variant is compared with random search without pruning, seed by seed. Nothing that
this prints was measured, apart from the errors of leave-one-out. The table has medians over the seeds, and means with
their standard errors; that of the median ratio is from a bootstrap.

`--surrogate` chooses what is searched: `fitted`; `interior`, the same with the best depth inside of its range;
`bowl`, made-up quadratic functions, another one for each seed; or `rough`, the same with waves and a cliff.
"""

import argparse
import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.search_by_time import best_at, time_to
from benchmarks.search_surrogate import Surrogate, bowl, fit, interior, rough, unit_point
from benchmarks.search_variants import VARIANTS, Variant
from deskside.study.search.outcome import Outcome, SearchTrial, best_so_far
from deskside.study.search.search_folder import SearchFolder, SearchPlan
from deskside.study.search.suggestions import RUNGS, Suggested, Suggestions, import_optuna

QUARTERS = (0.25, 0.5, 0.75, 1.0)
BOOTSTRAPS = 1000
MADE_UP = {"bowl": bowl, "rough": rough}
NEVER = 2.0  # stands for the ratio of a search that never has random's best
HEADING = (
    f"{'':20} {'median best at this share of the time':27} difference to the first, mean     time / random's\n"
    f"{'variant':20} 25 %   50 %   75 %   100 %   at 50 %             at 100 %           median         <= 0.5"
    f"         never  trials"
)


class VariantSuggestions(Suggestions):
    """The suggestions of a simulated search, in memory."""

    def __init__(self, variant: Variant, plan: SearchPlan, seed: int):
        self._variant, self._search_seed = variant, seed
        storage = import_optuna().storages.InMemoryStorage()
        super().__init__(Path(), plan.space, variant.name, variant.prune, seed, plan.name, storage)

    def make_sampler(self, number: int) -> Any:
        variant, seed = self._variant, self._search_seed * 100_003 + number
        startup = variant.startup if number < variant.startup_trials else None
        sampler = startup or variant.sampler
        return super().make_sampler(number) if sampler is None else sampler(self._search_seed, seed)

    def make_pruner(self) -> Any:
        return super().make_pruner() if self._variant.pruner is None else self._variant.pruner()


def simulate(variant: Variant, surrogate: Surrogate, plan: SearchPlan, seed: int) -> Outcome:
    """Return the outcome of one simulated search on one device."""
    suggestions, random = VariantSuggestions(variant, plan, seed), np.random.default_rng(seed)
    spent, setups, trials = 0.0, list[float](), list[SearchTrial]()
    while True:
        setup = sum(setups) / len(setups) if setups else plan.setup_seconds
        if spent + plan.trial_seconds + setup > plan.end_seconds(1, setup):
            return Outcome(
                plan.name, variant.name, variant.prune, plan.hours, 1, "", trials, best_so_far(trials)
            )
        number, parameters = suggestions.ask()
        losses, seconds = surrogate.trial(unit_point(plan.space, parameters), random)
        rungs = range(1, RUNGS)
        pruned = next(
            (rung for rung in rungs if suggestions.report(number, rung, float(losses[rung - 1]))), None
        )
        spent += seconds + plan.trial_seconds * (RUNGS if pruned is None else pruned) / RUNGS
        if pruned is None:
            suggestions.finish(number, float(losses[-1]))
            setups.append(seconds)
        else:
            suggestions.prune(number)
        loss = float(losses[-1]) if pruned is None else None
        trials.append(SearchTrial(number, "finished" if loss else "pruned", parameters, loss, spent, "", ""))


def time_ratio(search: Outcome, random: Outcome) -> float:
    """Return the time until a search has the final best of random search, by random's own; infinity for never."""
    goal, needed = random.best_so_far[-1]
    reached = time_to(search, needed)
    return np.inf if reached is None else reached / goal


def with_error(values: Sequence[float]) -> str:
    """Return the mean with its standard error."""
    return f"{np.mean(values):7.4f} +- {np.std(values) / len(values) ** 0.5:.4f}"


def row(name: str, searches: Sequence[Outcome], randoms: Sequence[Outcome], others: Sequence[Outcome]) -> str:
    """Return a line of the table. others: of the variant that this one is compared with, seed by seed."""
    end = max(one.trials[-1].elapsed or 0.0 for one in randoms)
    best, other = (
        np.array([[best_at(one, share * end) for share in QUARTERS] for one in outcomes])
        for outcomes in (searches, others)
    )
    ratios = np.array([time_ratio(*pair) for pair in zip(searches, randoms, strict=True)])
    draws = np.random.default_rng(0).integers(len(ratios), size=(BOOTSTRAPS, len(ratios)))
    medians = np.minimum(np.median(ratios[draws], axis=1), NEVER)
    half = ratios <= 0.5
    cells = [
        f"{name:20}",
        *(f"{value:.4f}" for value in np.median(best, axis=0)),
        *(f" {with_error(best[:, column] - other[:, column])}" for column in (1, 3)),
        f"  {min(np.median(ratios), NEVER):.2f} +- {medians.std():.2f}",
        f"  {half.mean():.2f} +- {half.std() / len(half) ** 0.5:.2f}  {np.isinf(ratios).mean():.2f}",
        f"{np.mean([len(one.trials) for one in searches]):7.1f}",
    ]
    return " ".join(cells)


@cache
def measured(paths: tuple[Path, ...]) -> tuple[SearchPlan, Surrogate, str]:
    """Return the plan of the first search, and the surrogate of the trials of all with its errors."""
    plans, trials, seconds = [SearchFolder(path).read() for path in paths], list[Suggested](), list[float]()
    for path, plan in zip(paths, plans, strict=True):
        if (plan.space, plan.trial_seconds) != (plans[0].space, plans[0].trial_seconds):
            raise SystemExit(f"{path}: differs in its space or the length of its trials")
        told = Suggestions(path, plan.space, plan.sampler, plan.prune, plan.seed, plan.name).trials()
        ran = [one for one in told if one.reports and one.attributes.get("elapsed") is not None]
        trials += ran
        seconds += np.diff([one.attributes["elapsed"] for one in ran], prepend=0.0).tolist()
    return plans[0], *fit(plans[0].space, trials, seconds, plans[0].trial_seconds)


def search(paths: tuple[Path, ...], surrogate: str, name: str, seed: int) -> Outcome:
    """Return the outcome of a variant with one seed."""
    plan, fitted, _ = measured(paths)
    if surrogate in MADE_UP:
        searched = MADE_UP[surrogate](seed, len(plan.space))
    else:
        searched = interior(fitted, plan.space) if surrogate == "interior" else fitted
    return simulate(VARIANTS[name], searched, plan, seed)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("searches", type=Path, nargs="+")
    parser.add_argument("--pairs", type=int, default=100)
    parser.add_argument("--surrogate", choices=["fitted", "interior", *MADE_UP], default="fitted")
    parser.add_argument("--only", default=",".join(VARIANTS), help="variants, separated by commas")
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    given = parser.parse_args()
    names = ["random", *(name for name in given.only.split(",") if name != "random")]
    if unknown := set(names) - VARIANTS.keys():
        parser.error(f"--only: {', '.join(sorted(unknown))}: choose from {', '.join(VARIANTS)}")
    print(measured(tuple(given.searches))[2])
    print(HEADING)
    with ProcessPoolExecutor(given.processes) as pool:
        randoms, others = list[Outcome](), list[Outcome]()
        for name in names:
            work = partial(search, tuple(given.searches), given.surrogate, name)
            outcomes = list(pool.map(work, range(given.pairs)))
            if name == names[0]:
                randoms = outcomes
            else:
                others = others or outcomes
                print(row(name, outcomes, randoms, others), flush=True)


if __name__ == "__main__":
    main()
