"""The trials of a search as the runner takes them: suggested, checked by the planner, ended early, reported to Optuna.

Optuna's study is written before a trial starts and after the runner's journal has its end. So after a kill, a trial
that Optuna considers running has ended (`catch_up` reports it), was started (it is continued), or was only suggested
(it is started).
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deskside.config.run import RunConfig
from deskside.run.record import MetricsLog, number, read_metrics, read_new_metrics
from deskside.study.execute.journal import FINAL, TrialHistory
from deskside.study.execute.measure import Measured
from deskside.study.execute.runner import PRUNED, Runner
from deskside.study.execute.study_progress import RemainingTime
from deskside.study.execute.trial_queue import ArmAndSeed
from deskside.study.search.memory_check import MemoryCheck
from deskside.study.search.outcome import REFUSED, REPEATED, arm_id, settings_text
from deskside.study.search.search_folder import SEED, SearchPlan, SpentTime
from deskside.study.search.space import value_of
from deskside.study.search.suggestions import RUNGS, Suggestions
from deskside.study.spec.expand import PlannedArm
from deskside.utils.errors import RunError, UsageError
from deskside.utils.format import percent

GROUP = "search"
READ_SECONDS = 0.5  # between two looks at the metrics of a running trial
MAX_MISSES = 60  # suggestions in a row that are impossible or repeated
MAX_FAILED = 3  # trials that fail before one finishes
NOT_POSSIBLE = ("oom", "diverged", "refused")


def trial_number(arm: PlannedArm) -> int:
    """Return the number of an arm's trial."""
    return int(arm.id.removeprefix("trial-"))


def settings_of(plan: SearchPlan, config: RunConfig) -> dict[str, Any]:
    """Return the searched keys of a configuration with their values."""
    key_of = {"model.depth": "model.num_hidden_layers"}
    return {one.key: value_of(config, key_of.get(one.key, one.key)) for one in plan.space}


@dataclass
class _Watched:
    """A running trial: its metrics so far, and when they were read."""

    log: MetricsLog
    read: float


class _TimeLeft(RemainingTime):
    """The time left of the hours, for the progress display. The number of trials is not known in advance."""

    def __init__(self, spent: SpentTime, seconds: float):
        super().__init__({}, 1)
        self._spent, self._seconds = spent, seconds

    def estimate(self, remaining_arms: list[str]) -> float:
        return max(0.0, self._seconds - self._spent.seconds())


class SearchQueue:
    """A `TrialQueue` for the runner of the search's trials.

    Args:
        runner: Of the study in the search's folder `trials`, whose plan grows by an arm for each trial.
        check: The planner's check.
        devices: Trials that run at once.
    """

    def __init__(
        self,
        plan: SearchPlan,
        suggestions: Suggestions,
        runner: Runner,
        check: MemoryCheck,
        spent: SpentTime,
        devices: int,
    ):
        self._plan, self._suggestions, self._runner = plan, suggestions, runner
        self._check, self._spent, self._devices = check, spent, devices
        self._resumed = deque[ArmAndSeed]()
        self._over = False
        self._watched: dict[int, _Watched] = {}
        self._ending: dict[int, str] = {}
        # Measured seconds of trials apart from their training
        self._setups = [
            max(0.0, one.attributes["seconds"] - plan.trial_seconds)
            for one in suggestions.trials()
            if one.state == "complete" and one.attributes.get("seconds") is not None
        ]
        self._failures = 0  # in a row
        self.on_change: Callable[[], None] = lambda: None  # is called when a trial is given out or has ended
        runner.display.remaining_time = _TimeLeft(spent, 3600 * plan.hours)
        runner.display.trials = plan.max_trials
        runner.display.name_of = lambda arm, _: f"trial {trial_number(arm)}"
        self.catch_up()

    def catch_up(self) -> None:
        """Tell Optuna how trials ended, and continue those that did not, after a stop or a kill."""
        for trial in self._suggestions.trials():
            if trial.state != "running":
                continue
            if "ending" in trial.attributes:
                self._ending[trial.number] = trial.attributes["ending"]
            known = next((arm for arm in self._runner.plan.arms if arm.id == arm_id(trial.number)), None)
            if known is None:
                if len(trial.parameters) < len(self._plan.space):
                    self._suggestions.fail(
                        trial.number, status="killed", reason="killed while it was suggested"
                    )
                elif (arm := self._possible(trial.number, trial.parameters)) is not None:
                    self._resumed.append((arm, SEED))
                continue
            history = self._runner.journal.history(known.id, SEED)
            if history.status in FINAL:
                self.ended((known, SEED), history, self._runner.measured.get((known.id, SEED)))
            else:
                self._resumed.append((known, SEED))

    def take(self) -> ArmAndSeed | None:
        taken = self._take()
        if taken is not None:
            self.on_change()
        return taken

    def _take(self) -> ArmAndSeed | None:
        if self._resumed:
            return self._resumed.popleft()
        most = self._plan.max_trials
        if most is not None and len(self._runner.plan.arms) >= most:
            self._over = True
        trial_seconds = self._plan.trial_seconds + self.setup_seconds
        if self._over or self._spent.seconds() + trial_seconds > self.end_seconds:
            self._over = True
            return None
        for _ in range(MAX_MISSES):
            key, parameters = self._suggestions.ask()
            arm = self._possible(key, parameters)
            if arm is not None:
                return arm, SEED
        if not self._runner.plan.arms:
            told = self._suggestions.trials()[key].attributes
            raise RunError(f"{MAX_MISSES} trials in a row are not possible; the last: {told['reason']}")
        self._over = True  # everything possible in this space was tried
        return None

    def put_back(self, trial: ArmAndSeed) -> None:
        self._resumed.appendleft(trial)

    def waiting(self) -> list[ArmAndSeed]:
        return list(self._resumed)

    def is_over(self) -> bool:
        return self._over and not self._resumed

    @property
    def setup_seconds(self) -> float:
        """Seconds of a trial apart from its training: the mean of those measured, or the forecast."""
        return sum(self._setups) / len(self._setups) if self._setups else self._plan.setup_seconds

    @property
    def end_seconds(self) -> float:
        """Seconds of the search after which the confirmation must begin."""
        return self._plan.end_seconds(self._devices, self.setup_seconds)

    def reason_to_end(self, trial: ArmAndSeed, run: Path) -> str | None:
        """Return why successive halving, or the end of the time, ends a running trial."""
        key = trial_number(trial[0])
        if key in self._ending:
            return self._ending[key]
        spent = self._spent.seconds()
        watched = self._watched.get(key)
        if watched is not None and spent - watched.read < READ_SECONDS:
            return None
        log = read_metrics(run) if watched is None else read_new_metrics(run, watched.log)
        self._watched[key] = _Watched(log, spent)
        for rung, loss in losses_by_rung(log, self._plan.trial_seconds).items():
            if self._suggestions.report(key, rung, loss):
                share = percent(rung / RUNGS, 0)
                return self._end(
                    key, f"{loss:.4f} bits per byte after {share} of the time is not in the better half"
                )
        if spent > self.end_seconds + self.setup_seconds:
            return self._end(key, "the time of the search is over")
        return None

    def ended(self, trial: ArmAndSeed, history: TrialHistory, measured: Measured | None) -> None:
        key = trial_number(trial[0])
        metrics = measured.metrics if measured is not None else {}
        loss = metrics.get("val_bpb")
        told = {
            "status": history.status,
            "reason": history.reason,
            "elapsed": self._spent.seconds(),
            "seconds": history.seconds,
        }
        self._watched.pop(key, None)
        self._failures = 0 if history.status in ("finished", PRUNED) else self._failures + 1
        if history.status == "finished" and loss is not None:
            if history.seconds is not None:
                self._setups.append(max(0.0, history.seconds - self._plan.trial_seconds))
            self._suggestions.finish(key, loss, **told)
        elif history.status == PRUNED:
            self._suggestions.prune(key, **told)
        elif history.status in NOT_POSSIBLE:
            self._suggestions.refuse(key, 1.0, **told)
        else:
            self._suggestions.fail(key, **told)
        self.on_change()
        if self._failures == MAX_FAILED and not any(one.value for one in self._suggestions.trials()):
            raise RunError(f"the first {MAX_FAILED} trials did not finish; the last: {history.reason}")

    def _end(self, key: int, reason: str) -> str:
        self._suggestions.note(key, ending=reason)
        self._ending[key] = reason
        return reason

    def _possible(self, key: int, parameters: dict[str, Any]) -> PlannedArm | None:
        """Return the arm of a suggestion and add it to the study; None if it is reported as impossible or repeated."""
        now = self._spent.seconds()
        try:
            config = self._plan.trial(parameters)
        except UsageError as error:
            self._suggestions.refuse(key, 1.0, status=REFUSED, reason=str(error), elapsed=now)
            return None
        settings = settings_of(self._plan, config)
        self._suggestions.note(key, settings=settings)
        excess, reason = self._check.excess(config)
        if excess:
            self._suggestions.refuse(key, excess, status=REFUSED, reason=reason, elapsed=now)
            return None
        arms = self._runner.plan.arms
        same = next((arm for arm in arms if arm.config == config), None)
        if same is not None:
            self._repeat(key, trial_number(same), now)
            return None
        label = settings_text(settings)
        budget = f"{self._plan.trial_seconds:g} seconds of training"
        arm = PlannedArm(arm_id(key), label, GROUP, {}, arms[0].id if arms else arm_id(key), config, budget)
        arms.append(arm)
        self._runner.plan.forecasts[arm.id] = self._plan.trial_seconds + self.setup_seconds
        self._runner.folder.write(self._runner.plan)
        return arm

    def _repeat(self, key: int, first: int, now: float) -> None:
        """Tell Optuna of a trial with the configuration of an earlier one, which is not run again."""
        told = {"status": REPEATED, "reason": f"the same as trial {first}", "elapsed": now}
        earlier = next(one for one in self._suggestions.trials() if one.number == first)
        if earlier.value is not None:
            self._suggestions.finish(key, earlier.value, **told)
        elif earlier.attributes.get("status") in NOT_POSSIBLE:
            self._suggestions.refuse(key, 1.0, **told)
        else:
            self._suggestions.fail(key, **told)


def losses_by_rung(log: MetricsLog, trial_seconds: float) -> dict[int, float]:
    """Return rung -> bits per byte of the evaluations so far, from the run's own log.

    Rung n is the evaluation at n / RUNGS of the training time. An evaluation follows the step that reaches it, so
    trials are compared at the same time, within a step. The one at the end is the trial's result and no rung.
    """
    losses: dict[int, float] = {}
    for row in log.rows:
        seconds, loss = number(row.get("seconds")), number(row.get("val_bpb"))
        if seconds is not None and loss is not None:
            rung = int(RUNGS * seconds / trial_seconds + 0.01)
            if 1 <= rung < RUNGS:
                losses.setdefault(rung, loss)
    return losses
