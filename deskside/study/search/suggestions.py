"""The trials of a search in Optuna's study: what is suggested, reported, pruned and kept.

Optuna is used because its samplers with constraints, its pruners and its storage are well maintained, and its
dashboard reads the same file. The storage is SQLite, so that a kill at any moment leaves no partial change.
"""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from deskside.study.search.gaussian_process import make_gp_sampler
from deskside.study.search.space import Dimension
from deskside.utils.errors import RunError, UsageError, first_line

Sampler = Literal["tpe", "gp", "random"]
# Sampler -> its name in texts
METHODS = {"tpe": "TPE", "gp": "a Gaussian process", "random": "random search"}
FILE = "optuna.db"
RUNGS = 4  # evaluations of a trial, the last one at its end; successive halving decides at the first and the second
REDUCTION_FACTOR = 2
STARTUP_TRIALS = 8  # random ones before TPE begins to model


@dataclass(frozen=True)
class Suggested:
    """A trial as Optuna knows it. parameters: by the name of its dimension; state: Optuna's, in lower case."""

    number: int
    parameters: dict[str, Any]
    state: str
    value: float | None
    attributes: dict[str, Any] = field(default_factory=dict)
    reports: dict[int, float] = field(default_factory=dict)


def import_optuna() -> Any:
    """Return the module optuna. Raises UsageError without it, which a search checks before it writes anything."""
    try:
        import optuna
    except ImportError:
        raise UsageError("search: needs Optuna; install it with: pip install 'deskside[search]'") from None
    return optuna


class Suggestions:
    """Optuna's study of one search. Raises RunError if the storage is damaged.

    Args:
        folder: Where the storage is, or is to be.
        space: At least one dimension.
        sampler, prune: How trials are chosen, and whether successive halving ends the worse half of them early.
        seed: Of the sampler. A trial's suggestion depends on it, on the trial's number and on the trials before it, so
            that a search that was killed continues as it would have.
        storage: An Optuna storage instead of the file in `folder`.
    """

    def __init__(
        self,
        folder: Path,
        space: Sequence[Dimension],
        sampler: Sampler,
        prune: bool,
        seed: int,
        name: str,
        storage: Any = None,
    ):
        optuna = import_optuna()
        from sqlalchemy.exc import SQLAlchemyError

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._optuna, self._space, self._sampler, self._seed = optuna, space, sampler, seed
        self._asked: dict[int, Any] = {}  # Optuna's objects of running trials
        pruner = self.make_pruner() if prune else optuna.pruners.NopPruner()
        if storage is None:
            storage = f"sqlite:///{folder / FILE}"
        try:
            self._study = optuna.create_study(
                storage=storage, study_name=name, pruner=pruner, load_if_exists=True
            )
            if not self._study.trials:
                self._study.enqueue_trial({one.name: one.default_parameter for one in space})
        except SQLAlchemyError as error:
            raise RunError(f"{folder / FILE}: cannot be used: {first_line(error)}") from None

    def ask(self) -> tuple[int, dict[str, Any]]:
        """Return the number and the parameters of a new trial. The first one has the default of every key."""
        self._study.sampler = self.make_sampler(len(self._study.get_trials(deepcopy=False)))
        trial = self._study.ask()
        self._asked[trial.number] = trial
        return trial.number, {one.name: one.suggest(trial) for one in self._space}

    def report(self, number: int, rung: int, value: float) -> bool:
        """Record the loss of a running trial at a rung, from 1. Returns True if it should be ended now."""
        if rung in self._study.get_trials(deepcopy=False)[number].intermediate_values:
            return False
        trial = self._trial(number)
        trial.report(value, rung)
        return bool(trial.should_prune())

    def note(self, number: int, **attributes: Any) -> None:
        """Record attributes of a trial that has no result yet."""
        for key, attribute in attributes.items():
            self._trial(number).set_user_attr(key, attribute)

    def finish(self, number: int, value: float, **attributes: Any) -> None:
        """Record the loss of a trial that finished."""
        self._tell(number, self._optuna.trial.TrialState.COMPLETE, value, 0.0, attributes)

    def prune(self, number: int, **attributes: Any) -> None:
        """Record the end of a trial that was ended early. Its last report counts."""
        self._tell(number, self._optuna.trial.TrialState.PRUNED, None, 0.0, attributes)

    def refuse(self, number: int, excess: float, **attributes: Any) -> None:
        """Record a trial that is not possible. excess: how far from possible, above 0; samplers learn from it."""
        self._tell(number, self._optuna.trial.TrialState.PRUNED, None, max(excess, 1e-6), attributes)

    def fail(self, number: int, **attributes: Any) -> None:
        """Record a trial that says nothing about its parameters."""
        self._tell(number, self._optuna.trial.TrialState.FAIL, None, 0.0, attributes)

    def trials(self) -> list[Suggested]:
        """Return all trials by their number."""
        return [
            Suggested(
                trial.number,
                dict(trial.params),
                trial.state.name.lower(),
                trial.value if trial.state.name == "COMPLETE" else None,
                dict(trial.user_attrs),
                dict(trial.intermediate_values),
            )
            for trial in self._study.get_trials(deepcopy=False)
        ]

    def importances(self) -> dict[str, float]:
        """Return the share of each parameter in the spread of the losses (PED-ANOVA, arXiv 2304.10255), or {}."""
        complete = [trial for trial in self.trials() if trial.state == "complete"]
        if len(complete) < STARTUP_TRIALS or len({trial.value for trial in complete}) < 2:
            return {}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            evaluator = self._optuna.importance.PedAnovaImportanceEvaluator()
            return dict(self._optuna.importance.get_param_importances(self._study, evaluator=evaluator))

    def make_pruner(self) -> Any:
        """Return Optuna's pruner of a search that ends trials early."""
        return self._optuna.pruners.SuccessiveHalvingPruner(min_resource=1, reduction_factor=REDUCTION_FACTOR)

    def make_sampler(self, number: int) -> Any:
        """Return Optuna's sampler for a trial, by its number."""
        samplers = self._optuna.samplers
        if self._sampler == "gp":
            trials = self._study.get_trials(deepcopy=False)
            return make_gp_sampler(self._optuna, trials, self._seed * 100_003 + number)
        if self._sampler == "random":
            return samplers.RandomSampler(seed=self._seed * 100_003 + number)
        return samplers.TPESampler(
            n_startup_trials=STARTUP_TRIALS,
            multivariate=True,
            constant_liar=True,
            seed=self._seed * 100_003 + number,
        )

    def _trial(self, number: int) -> Any:
        """Return Optuna's object of a running trial. After a resume it is made from the storage."""
        if number not in self._asked:
            trials = self._study.get_trials(deepcopy=False)
            self._asked[number] = self._optuna.trial.Trial(self._study, trials[number]._trial_id)
        return self._asked[number]

    def _tell(self, number: int, state: Any, value: float | None, excess: float, attributes: Any) -> None:
        self.note(number, **attributes)
        if excess:
            self._trial(number).set_constraint("possible", excess)
        self._study.tell(number, value, state=state)
        del self._asked[number]
