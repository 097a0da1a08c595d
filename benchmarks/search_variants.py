"""Other ways to search than the one of `deskside search`, which `search_simulation.py` compares with it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import optuna

from deskside.study.search.suggestions import STARTUP_TRIALS

Sampler = Callable[[int, int], Any]  # (seed of the search, of the trial) -> Optuna's sampler
SPREAD = 0.25  # of startup points near the default, as a share of the range


@dataclass(frozen=True)
class Variant:
    """A way to search. None stands for what a search does itself.

    startup: of the first `startup_trials` trials.
    """

    name: str = "tpe"
    sampler: Sampler | None = None
    pruner: Callable[[], Any] | None = None
    prune: bool = True
    startup: Sampler | None = None
    startup_trials: int = 0


class NearDefault(optuna.samplers.RandomSampler):  # type: ignore[misc]
    """Draws normally around the parameters of the first trial."""

    def sample_independent(self, study: Any, trial: Any, name: str, distribution: Any) -> Any:
        transform = optuna._transform._SearchSpaceTransform({name: distribution}, transform_0_1=True)
        default = transform.transform({name: study.get_trials(deepcopy=False)[0].params[name]})
        drawn = default + SPREAD * self._rng.rng.standard_normal(len(default))
        return transform.untransform(drawn.clip(0, 1))[name]


class FirstRung(optuna.pruners.SuccessiveHalvingPruner):  # type: ignore[misc]
    """Successive halving that decides at the first rung only."""

    def prune(self, study: Any, trial: Any) -> bool:
        return trial.last_step == 1 and bool(super().prune(study, trial))


def tpe(startup: int = STARTUP_TRIALS, **options: Any) -> Sampler:
    """Return TPE as in a search, with other options."""
    given = {"multivariate": True, "constant_liar": True} | options
    return lambda _, seed: optuna.samplers.TPESampler(n_startup_trials=startup, seed=seed, **given)


def optuna_gp(startup: int) -> Sampler:
    """Return Optuna's own Gaussian process, which counts only trials that finished, the startup included."""
    return lambda _, seed: optuna.samplers.GPSampler(
        n_startup_trials=startup, seed=seed, warn_independent_sampling=False
    )


def quasi_random(seed: int, _: int) -> Any:
    """Return Optuna's scrambled Sobol sequence."""
    return optuna.samplers.QMCSampler(seed=seed, scramble=True, warn_independent_sampling=False)


def near_default(_: int, seed: int) -> Any:
    """Return the sampler of points near the default."""
    return NearDefault(seed=seed)


def gamma(share: float) -> Callable[[int], int]:
    """Return how many trials of a number are good to TPE; its own share is 0.1."""
    return lambda trials: max(1, round(share * trials))


VARIANTS = {
    "random": Variant("random", prune=False),
    "tpe": Variant(),
    "startup-3": Variant(sampler=tpe(3)),
    "startup-5": Variant(sampler=tpe(5)),
    "startup-qmc": Variant(sampler=tpe(1), startup=quasi_random, startup_trials=STARTUP_TRIALS),
    "startup-near": Variant(sampler=tpe(1), startup=near_default, startup_trials=STARTUP_TRIALS),
    "near-4": Variant(sampler=tpe(1), startup=near_default, startup_trials=4),
    "gamma-0.2": Variant(sampler=tpe(gamma=gamma(0.2))),
    "gamma-0.3": Variant(sampler=tpe(gamma=gamma(0.3))),
    "candidates-100": Variant(sampler=tpe(n_ei_candidates=100)),
    "prune-none": Variant(prune=False),
    "prune-first": Variant(pruner=lambda: FirstRung(min_resource=1, reduction_factor=2)),
    "gp": Variant("gp"),
    "optuna-gp-none": Variant(sampler=optuna_gp(4), prune=False),
}
