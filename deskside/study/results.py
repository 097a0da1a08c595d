"""What a study leaves behind, as data: DIR/results.json and the same rows in DIR/results.parquet.

The runner writes it after every trial, the comparison fills in its part, and the report and the dashboard read nothing
else (but the metrics.jsonl of a trial's run directory for whole curves). A reader takes what there is: a study is
valid while it runs, after Ctrl-C, and with trials that failed.

    arm    one configuration: a level of every factor of its group
    trial  one arm with one seed: an ordinary run, in a process and a directory of its own
"""

import json
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from deskside.utils.errors import RunError, UsageError
from deskside.utils.parsing import json_value

SCHEMA_VERSION = 1

# How a trial can end. "oom": out of memory even with the smallest micro-batch. "diverged": stopped by the guard.
# "killed": ended by a signal that was not ours. "refused": the configuration is not possible here. "pending": not run
# yet, or stopped by Ctrl-C, and so done by --resume.
STATUSES = ("finished", "oom", "diverged", "failed", "killed", "refused", "running", "pending")
# Never written: what study/life.py makes of a trial that is said to run and shows no life.
INTERRUPTED = "interrupted"
OPEN = ("pending", "running", INTERRUPTED)  # of trials that have not come to their end


@dataclass(frozen=True)
class Trial:
    """One run. `metrics` has the keys of study/metrics.py (a missing one was not measured).

    run: its directory, relative to the study's. curve: rows of {"tokens", "seconds", "loss", "val_bpb"} (null where
    nothing was measured), thinned to at most 200; seconds count training alone.
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
    """A mean over seeds with its interval. low and high are None where one trial cannot give any."""

    mean: float
    low: float | None
    high: float | None
    n: int


@dataclass(frozen=True)
class Comparison:
    """An arm against its baseline, in one metric, over the seeds that both have.

    difference is arm - baseline in the metric's stored unit, relative the same in parts of the baseline (0.05 is
    5 % more). verdict: "lower", "higher", "no difference shown", "too few seeds", or "exact" for what no seed changes.
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
    """One configuration. levels: factor -> level. baseline: id of the arm that it is compared with, its own for one."""

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
        """Its trials' common status; "finished" where some are, then what went wrong first."""
        states = [trial.status for trial in self.trials]
        return next(
            (s for s in ("finished", "running", INTERRUPTED, *STATUSES[1:]) if s in states), "pending"
        )

    def finished(self) -> list[Trial]:
        """The trials that came to their end."""
        return [trial for trial in self.trials if trial.status == "finished"]


@dataclass(frozen=True)
class Factor:
    """What is varied: `levels` in the order in which they are shown."""

    name: str
    label: str
    levels: list[str]


@dataclass(frozen=True)
class Group:
    """A sub-matrix with a base and a budget of its own. budget: in words, such as "4 minutes of training"."""

    name: str
    title: str
    base: str
    design: str
    budget: str
    factors: list[Factor]
    within: list[str]


@dataclass(frozen=True)
class Interaction:
    """Whether two factors act independently: the difference of differences, relative (log scale), with its interval."""

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


@dataclass(frozen=True)
class Front:
    """Pareto front of one group: the arms that no other arm beats in every metric. metrics: the axes."""

    group: str
    metrics: list[str]
    arms: list[str]
    unclear: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class ClaimResult:
    """What a study says of one claim of facts/claims.toml. measured, low and high are in the claim's own unit.

    basis: what the verdict rests on: "measured", a source of study/arithmetic.py, or "" where there is nothing.
    p: of the decision by this claim's numbers alone, before the adjustment for many claims. shared: whether other
    trials ran on the host at the same time, for a claim about speed or power.
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
    """A study, whole."""

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
        """The arm with this id."""
        return next((arm for arm in self.arms if arm.id == name), None)

    def to_json(self) -> dict[str, Any]:
        """Plain data for results.json; every arm carries its status."""
        whole = asdict(self)
        for plain, arm in zip(whole["arms"], self.arms, strict=True):
            plain["status"] = arm.status
        return {"schema_version": SCHEMA_VERSION, **whole}


def read(folder: Path) -> Results:
    """Return the results of a study's directory. Raises UsageError when there are none, RunError when damaged."""
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
    """The inverse of `Results.to_json`; keys that this version does not know are left out.

    Every value is checked, since the file may have been damaged or written by somebody else. Raises TypeError naming
    the first place that is not as it should be.
    """
    version = plain.get("schema_version") if isinstance(plain, dict) else None
    if version != SCHEMA_VERSION:
        raise TypeError(f"schema_version {version}, this version reads {SCHEMA_VERSION}")
    try:
        return _checked().validate_json(
            json.dumps(plain), strict=True
        )  # of Python, strict would mean objects
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        raise TypeError(f"{'.'.join(str(part) for part in first['loc'])}: {first['msg']}") from None
    except RecursionError:
        raise TypeError("too deeply nested") from None


@cache
def _checked() -> TypeAdapter[Results]:
    return TypeAdapter(Results)
