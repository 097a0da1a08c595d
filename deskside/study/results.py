"""The results of a study as data: DIR/results.json, and one row per trial in DIR/results.parquet.

The runner writes them after every trial, and the comparison adds its part. The report and the dashboard read
nothing else, except the metrics.jsonl of a trial for whole curves. Results are valid while the study runs, after
Ctrl-C, and with failed trials.

    arm    one configuration: a level of every factor of its group
    trial  one arm with one seed: an ordinary run, in its own process and directory
"""

import json
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from deskside.run.record import number
from deskside.utils.errors import RunError, UsageError
from deskside.utils.format import printable
from deskside.utils.parsing import json_value

SCHEMA_VERSION = 1

# Statuses of a trial. "oom": out of memory even with the smallest micro-batch. "diverged": stopped by the guard.
# "killed": by a signal from outside. "refused": the configuration is not possible here. "pending": not run yet, or
# stopped by Ctrl-C; --resume runs it.
STATUSES = ("finished", "oom", "diverged", "failed", "killed", "refused", "running", "pending")
# Never written to results.json: study/liveness.py assigns it to a running trial without signs of life.
INTERRUPTED = "interrupted"
OPEN = ("pending", "running", INTERRUPTED)  # not ended
# Verdicts of a comparison, beside "lower" and "higher".
TOO_FEW, NO_DIFFERENCE, EXACT = "too few seeds", "no difference shown", "exact"


def status_text(status: str) -> str:
    """Return a status in words."""
    words = {"oom": "out of memory", "pending": "not run yet", "running": "still running"}
    return words.get(status, status)


@dataclass(frozen=True)
class Trial:
    """One run. metrics: keyed as in study/stats/metrics.py, without those that were not measured.

    run: its directory, relative to the study's. curve: at most 200 rows of {"tokens", "seconds", "loss",
    "val_bpb"}, null where not measured; seconds count training only.
    """

    seed: int
    status: str
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

    difference: arm - baseline in the metric's stored unit. relative: in parts of the baseline (0.05 is 5 % more).
    verdict: "lower", "higher", "no difference shown", "too few seeds", or "exact" if the seed has no effect.
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
    method: str
    verdict: str


@dataclass(frozen=True)
class Arm:
    """One configuration. levels: factor -> level. baseline: id of the arm that it is compared with, or its own id."""

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
        """Return the status of the arm: "finished" if a trial finished, otherwise the first of the others."""
        states = [trial.status for trial in self.trials]
        return next(
            (s for s in ("finished", "running", INTERRUPTED, *STATUSES[1:]) if s in states), "pending"
        )

    def finished(self) -> list[Trial]:
        """Return the finished trials."""
        return [trial for trial in self.trials if trial.status == "finished"]

    def estimate(self, metric: str) -> Estimate | None:
        """Return the estimate of a metric, or None if it was not measured or is not finite."""
        found = self.estimates.get(metric)
        return found if found is not None and number(found.mean) is not None else None

    def comparison(self, metric: str) -> Comparison | None:
        """Return the comparison in a metric, or None if there is none or the arm is its own baseline."""
        return next((c for c in self.comparisons if c.metric == metric and c.baseline != self.id), None)


def own_parts(arm: Arm, other: Arm) -> list[str]:
    """Return the parts of an arm's label that the other arm's label lacks."""
    common = other.label.split(", ")
    return [part for part in arm.label.split(", ") if part not in common]


@dataclass(frozen=True)
class Factor:
    """A varied factor, with its levels in display order."""

    name: str
    label: str
    levels: list[str]


@dataclass(frozen=True)
class Group:
    """A sub-matrix with its own base and budget. budget: as text, such as "4 minutes of training"."""

    name: str
    title: str
    base: str
    design: str
    budget: str
    factors: list[Factor]
    within: list[str]

    @property
    def heading(self) -> str:
        """Return the title, or the name if it has none."""
        return printable(self.title or self.name)


@dataclass(frozen=True)
class Interaction:
    """The interaction of two factors: the relative difference of differences on a log scale, with its interval."""

    group: str
    metric: str
    first: str
    second: str
    levels: dict[str, str]
    effect: float
    low: float | None
    high: float | None
    n: int
    verdict: str

    @property
    def is_shown(self) -> bool:
        """Return whether the factors are shown to depend on each other."""
        return self.verdict in ("lower", "higher") or (self.verdict == EXACT and self.effect != 0)


@dataclass(frozen=True)
class Front:
    """The Pareto front of one group. metrics: the axes. arms: those that no other arm dominates."""

    group: str
    metrics: list[str]
    arms: list[str]
    unclear: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class ClaimResult:
    """The verdict on one claim of facts/claims.toml. measured, low and high are in the claim's own unit.

    basis: "measured", the source of a computed answer (study/claims/verdicts.py), or "". p: p-value of the decision
    before the correction for multiple claims. shared: whether other trials ran on the host at the same time, for a
    claim about speed or power.
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
    verdict: str
    explanation: str
    basis: str = ""
    p: float | None = None
    shared: bool = False


@dataclass(frozen=True)
class Results:
    """A whole study."""

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

    def arm(self, name: str) -> Arm | None:
        """Return the arm with this id, or None."""
        return next((arm for arm in self.arms if arm.id == name), None)

    def arms_in(self, group: Group) -> list[Arm]:
        """Return the arms of a group."""
        return [arm for arm in self.arms if arm.group == group.name]

    def to_json(self) -> dict[str, Any]:
        """Return the content of results.json; every arm includes its status."""
        whole = asdict(self)
        for plain, arm in zip(whole["arms"], self.arms, strict=True):
            plain["status"] = arm.status
        return {"schema_version": SCHEMA_VERSION, **whole}


def read(folder: Path) -> Results:
    """Read the results of a study's directory. Raises UsageError if there are none, RunError if they are damaged."""
    path = folder / "results.json"
    try:
        plain = json_value(path.read_bytes())
    except FileNotFoundError:
        raise UsageError(
            f"{folder}: not a study (it has no results.json); give a directory that `deskside study` made"
        ) from None
    except (OSError, ValueError) as error:
        raise RunError(f"{path}: cannot be read: {error}; run the study again with --resume") from None
    try:
        return from_json(plain)
    except TypeError as error:
        raise RunError(f"{path}: is damaged ({error}); run the study again with --resume") from None


def from_json(plain: Any) -> Results:
    """Parse results.json, ignoring unknown keys.

    Every value is checked, because the file may be damaged or edited. Raises TypeError naming the first invalid
    place.
    """
    version = plain.get("schema_version") if isinstance(plain, dict) else None
    if version != SCHEMA_VERSION:
        raise TypeError(f"schema_version {version}, this version reads {SCHEMA_VERSION}")
    try:
        # Strict validation of Python data would require dataclass instances.
        return _adapter().validate_json(json.dumps(plain), strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        raise TypeError(f"{'.'.join(str(part) for part in first['loc'])}: {first['msg']}") from None
    except RecursionError:
        raise TypeError("too deeply nested") from None


@cache
def _adapter() -> TypeAdapter[Results]:
    return TypeAdapter(Results)
