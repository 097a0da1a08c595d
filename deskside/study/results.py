"""The results of a study: DIR/results.json, and one row per trial in DIR/results.parquet.

The runner writes both files whenever a trial starts or ends, with the comparisons so far. The report and the dashboard
read results.json. Results are valid while the study runs, after Ctrl-C, and with failed trials.

    factor  a varied property, such as the size of the model; its levels are the values that it takes
    group   a set of arms with the same base configuration, budget and factors
    arm     one configuration of a group: one level of every factor
    trial   one arm with one seed: an ordinary run, in its own process and directory
"""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Final, Literal, get_args

from pydantic import TypeAdapter, ValidationError

from deskside.run.record import number
from deskside.study.metrics import Metric
from deskside.utils.errors import RunError, UsageError
from deskside.utils.format import printable
from deskside.utils.parsing import json_value

SCHEMA_VERSION = 1
PLAN, RESULTS = "study.json", "results.json"  # a directory with one of them is a study

# Statuses of a trial. "oom": out of memory. "diverged": stopped by the guard, or the final loss is not finite.
# "killed": by a signal from outside. "refused": the configuration is not possible here. "pruned": ended early by a
# search. "pending": not run yet, or stopped with the study; --resume runs it.
Status = Literal["finished", "pruned", "oom", "diverged", "failed", "killed", "refused", "running", "pending"]
STATUSES: tuple[Status, ...] = get_args(Status)
# Never written to results.json: study/liveness.py assigns it to a trial that is listed as running but is not alive.
INTERRUPTED: Final = "interrupted"
NOT_ENDED = ("pending", "running", INTERRUPTED)

Design = Literal["full", "one-at-a-time"]
Method = Literal["paired t", "one seed", "exact"]
Verdict = Literal["lower", "higher", "no difference shown", "too few seeds", "exact"]
TOO_FEW: Final = "too few seeds"
NO_DIFFERENCE: Final = "no difference shown"
EXACT: Final = "exact"
ClaimVerdict = Literal[
    "holds",
    "holds in direction",
    "not shown",
    "contradicted",
    "consistent with the model",
    "not consistent with the model",
    "needs other hardware",
    "not measured",
]
# Source of a computed answer to a claim.
AnswerSource = Literal["arithmetic", "data sheet", "modelled", "published prices"]
ClaimBasis = AnswerSource | Literal["measured", ""]  # "": not answered


def status_text(status: str) -> str:
    """Return a status as tables show it: "out of memory" for "oom"."""
    words = {"oom": "out of memory", "pending": "not run yet", "running": "still running"}
    return words.get(status, status)


@dataclass(frozen=True)
class Trial:
    """One run.

    Attributes:
        reason: Why it did not finish, in one line, or "".
        run: Its directory, relative to the study's, or "" before its first start.
        started, ended: Times in ISO format, or "".
        metrics: Values by their keys in study/metrics.py; those that were not measured are absent.
        curve: At most 200 rows of {"tokens", "seconds", "loss", "val_bpb"}, None where not measured. The seconds are
            training time, without evaluation and checkpoints.
    """

    seed: int
    status: Status | Literal["interrupted"]
    reason: str = ""
    run: str = ""
    device: str = ""
    attempts: int = 0
    started: str = ""
    ended: str = ""
    metrics: dict[str, float] = field(default_factory=dict)
    curve: list[dict[str, float | None]] = field(default_factory=list)


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds with its interval. low and high are None for a single trial."""

    mean: float
    low: float | None
    high: float | None
    n: int


@dataclass(frozen=True)
class Comparison:
    """An arm compared with its baseline in one metric, over the seeds that both have.

    Attributes:
        n: Number of seeds.
        difference: Mean of arm - baseline in the metric's stored unit; `low` to `high` is its 95 % interval.
        relative: Difference relative to the baseline (0.05 is 5 % more), with its own 95 % interval.
        method, verdict: "exact" if the seed has no effect.
    """

    metric: str
    baseline: str
    n: int
    difference: float
    low: float | None
    high: float | None
    relative: float
    relative_low: float | None
    relative_high: float | None
    method: Method
    verdict: Verdict


@dataclass(frozen=True)
class Arm:
    """One configuration of a group.

    Attributes:
        levels: Factor -> level.
        baseline: Id of the arm that this one is compared with; its own id if it is a baseline itself.
        emulated: True if a number format is emulated, so that the speed is not that of hardware with the format.
        forecast_seconds: Forecast of one trial's duration; None if unknown.
        estimates: Metric -> mean over the finished trials.
    """

    id: str
    label: str
    group: str
    levels: dict[str, str]
    baseline: str
    emulated: bool = False
    forecast_seconds: float | None = None
    trials: list[Trial] = field(default_factory=list)
    estimates: dict[str, Estimate] = field(default_factory=dict)
    comparisons: list[Comparison] = field(default_factory=list)

    @property
    def status(self) -> str:
        """Finished if a trial of the arm finished, else running if one is running, else the status of another."""
        trial_statuses = [trial.status for trial in self.trials]
        for status in ("finished", "running", INTERRUPTED, *STATUSES):
            if status in trial_statuses:
                return status
        return "pending"

    def finished(self) -> list[Trial]:
        """Return the finished trials."""
        return [trial for trial in self.trials if trial.status == "finished"]

    def estimate(self, metric: str) -> Estimate | None:
        """Return the estimate of a metric, or None if it was not measured or is not finite."""
        estimate = self.estimates.get(metric)
        return estimate if estimate is not None and number(estimate.mean) is not None else None

    def comparison(self, metric: str) -> Comparison | None:
        """Return the comparison with the baseline in a metric, or None if there is none."""
        return next((c for c in self.comparisons if c.metric == metric and c.baseline != self.id), None)


def best_first(arms: Iterable[Arm], metric: Metric) -> list[Arm]:
    """Return the arms with a mean of this metric, best mean first. Arms with equal means stay in their order."""
    sign = 1 if metric.better == "higher" else -1
    found = [(arm, estimate.mean) for arm in arms if (estimate := arm.estimate(metric.key)) is not None]
    return [arm for arm, mean in sorted(found, key=lambda pair: -sign * pair[1])]


def differing_label_parts(arm: Arm, other: Arm) -> list[str]:
    """Return the parts of an arm's label, separated by commas, that the other arm's label does not have."""
    other_parts = other.label.split(", ")
    return [part for part in arm.label.split(", ") if part not in other_parts]


@dataclass(frozen=True)
class Factor:
    """A varied factor, with its levels in display order."""

    name: str
    label: str
    levels: list[str]


@dataclass(frozen=True)
class Group:
    """A set of arms with the same base configuration, budget and factors.

    Attributes:
        base: Preset or TOML file that the configuration of every arm starts from.
        design: "full" (every combination of levels) or "one-at-a-time".
        budget: Text such as "4 minutes of training".
        within: Factors of which every level has its own baseline.
    """

    name: str
    title: str
    base: str
    design: Design
    budget: str
    factors: list[Factor]
    within: list[str]

    @property
    def heading(self) -> str:
        """The title, or the name if the group has no title."""
        return printable(self.title or self.name)


@dataclass(frozen=True)
class Interaction:
    """The interaction of two factors in one metric (study/stats/interaction.py).

    Attributes:
        first, second: Names of the factors.
        levels: Factor -> its level that differs from the baseline.
        effect: Relative change by both levels together beyond the product of their separate changes; 0.05 is 5 % more.
            `low` to `high` is its 95 % interval.
        n: Number of seeds.
        verdict: As in `Comparison`.
    """

    group: str
    metric: str
    first: str
    second: str
    levels: dict[str, str]
    effect: float
    low: float | None
    high: float | None
    n: int
    verdict: Verdict

    @property
    def is_shown(self) -> bool:
        """True if the factors are shown to depend on each other."""
        return self.verdict in ("lower", "higher") or (self.verdict == EXACT and self.effect != 0)


@dataclass(frozen=True)
class Front:
    """The Pareto front of one group in some metrics (study/stats/pareto.py).

    Attributes:
        arms: Ids of the arms that no other arm dominates.
        unclear: Ids of the other arms whose exclusion from the front is uncertain.
    """

    group: str
    metrics: list[str]
    arms: list[str]
    unclear: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class ClaimResult:
    """The verdict on one claim of facts/claims.toml.

    Attributes:
        claimed: The claimed change or value as text.
        measured: The measured or computed change or value in `unit`, with its interval or range `low` to `high`.
        n: Number of seeds; 0 if nothing was measured.
        scale: Model, budget and hardware of the measurement, as text.
        p: p-value of the decision before the correction for multiple claims.
        shared: True if the claim is about speed or power and other trials of the study ran at the same time.
    """

    id: str
    text: str
    source: str
    claimed: str
    measured: float | None
    low: float | None
    high: float | None
    unit: str
    n: int
    scale: str
    verdict: ClaimVerdict
    explanation: str
    basis: ClaimBasis = ""
    p: float | None = None
    shared: bool = False


@dataclass(frozen=True)
class Results:
    """The results of a whole study.

    Attributes:
        created, updated: Times in ISO format.
        memory_fraction: Share of the GPU memory that a trial may use.
        machine: environment.json of a trial, and the names of all `devices` that trials ran on.
        complete: True if every trial has ended.
        notes: Excluded combinations and warnings, one line each.
    """

    name: str
    question: str
    created: str
    updated: str
    seeds: list[int]
    memory_fraction: float
    machine: dict[str, Any]
    groups: list[Group]
    arms: list[Arm]
    complete: bool = False
    interactions: list[Interaction] = field(default_factory=list)
    fronts: list[Front] = field(default_factory=list)
    claims: list[ClaimResult] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def arm(self, arm_id: str) -> Arm | None:
        """Return the arm with this id, or None."""
        return next((arm for arm in self.arms if arm.id == arm_id), None)

    def arms_in(self, group: Group) -> list[Arm]:
        """Return the arms of a group."""
        return [arm for arm in self.arms if arm.group == group.name]

    def to_json(self) -> dict[str, Any]:
        """Return the content of results.json, where every arm also has its status."""
        content = asdict(self)
        for fields, arm in zip(content["arms"], self.arms, strict=True):
            fields["status"] = arm.status
        return {"schema_version": SCHEMA_VERSION, **content}


def read(folder: Path) -> Results:
    """Read the results of a study's directory. Raises UsageError if there are none, RunError if they are damaged."""
    path = folder / RESULTS
    try:
        content = json_value(path.read_bytes())
    except FileNotFoundError:
        raise UsageError(
            f"{folder}: not a study (it has no {RESULTS}); give a directory that `deskside study` created"
        ) from None
    except (OSError, ValueError) as error:
        raise RunError(f"{path}: cannot be read: {error}; run the study again with --resume") from None
    try:
        return from_json(content)
    except TypeError as error:
        raise RunError(f"{path}: is damaged ({error}); run the study again with --resume") from None


def from_json(content: Any) -> Results:
    """Parse the content of results.json, ignoring unknown keys.

    Every value is checked, because the file may be damaged or edited. Raises TypeError, which names the first invalid
    field.
    """
    version = content.get("schema_version") if isinstance(content, dict) else None
    if version != SCHEMA_VERSION:
        raise TypeError(
            f"it has schema_version {version}, and this version of deskside reads {SCHEMA_VERSION}"
        )
    try:
        # Pydantic's strict mode accepts an object for a dataclass only in JSON text, not as a dict.
        return _adapter().validate_json(json.dumps(content), strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        raise TypeError(f"{'.'.join(str(part) for part in first['loc'])}: {first['msg']}") from None
    except RecursionError:
        raise TypeError("too deeply nested") from None


@cache
def _adapter() -> TypeAdapter[Results]:
    return TypeAdapter(Results)
