"""Collection and comparison of a study's trials; writes results.json and results.parquet.

Both files are rebuilt every time from study.json, the journal and the run directories, so no result is lost when a
study is killed.
"""

from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from deskside.study.claims import claim_results
from deskside.study.execute.journal import FINAL, Key, TrialHistory
from deskside.study.execute.measure import Measured
from deskside.study.execute.study_folder import StudyPlan
from deskside.study.metrics import METRICS
from deskside.study.results import RESULTS, Arm, Results, Trial
from deskside.study.stats import compare
from deskside.utils import strict_json
from deskside.utils.errors import RunError
from deskside.utils.files import replace_atomically, write_atomically

PARQUET = "results.parquet"


def make_trial(arm: str, seed: int, history: TrialHistory, measured: Measured | None) -> Trial:
    """Return a trial as results.json stores it. arm: the arm's id."""
    metrics = dict(measured.metrics) if measured is not None else {}
    if history.status in FINAL and history.seconds is not None:
        metrics["total_seconds"] = history.seconds
    return Trial(
        seed,
        status=history.status,
        reason=history.reason,
        run=f"runs/{arm}-s{seed}" if history.attempts else "",
        device=history.device,
        attempts=history.attempts,
        started=history.started,
        ended=history.ended,
        metrics=metrics,
        curve=measured.curve if measured is not None else [],
    )


def collect(
    plan: StudyPlan, histories: Mapping[Key, TrialHistory], measured: Mapping[Key, Measured]
) -> Results:
    """Return the results of all trials so far, with the comparisons of arms and the verdicts on claims."""
    arms = []
    for arm in plan.arms:
        keys = [(arm.id, plan.first_seed + number) for number in range(plan.seeds[arm.group])]
        arms.append(
            Arm(
                id=arm.id,
                label=arm.label,
                group=arm.group,
                levels=arm.levels,
                baseline=arm.baseline,
                emulated=any(measured[key].emulated for key in keys if key in measured),
                forecast_seconds=plan.forecasts.get(arm.id),
                trials=[
                    make_trial(*key, histories.get(key, TrialHistory()), measured.get(key)) for key in keys
                ],
            )
        )
    results = Results(
        name=plan.name,
        question=plan.question,
        created=plan.created,
        updated=datetime.now(UTC).isoformat(timespec="seconds"),
        seeds=[plan.first_seed + number for number in range(max(plan.seeds.values(), default=0))],
        memory_fraction=plan.memory_fraction,
        machine=_machine(histories, measured),
        groups=plan.groups,
        arms=arms,
        complete=all(trial.status in FINAL for arm in arms for trial in arm.trials),
        notes=[*(f"excluded: {line}" for line in plan.excluded), *_machine_warnings(measured)],
    )
    results = compare.compare(results)
    return claim_results.judge(results, plan.claims) if plan.claims else results


def write(results: Results, folder: Path) -> None:
    """Write both files atomically. Raises RunError if they cannot be written."""
    write_atomically(folder / RESULTS, strict_json.dumps(results.to_json(), indent=1) + "\n")
    write_parquet(results, folder / PARQUET)


def write_parquet(results: Results, path: Path) -> None:
    """Write one row per trial, with a column level_FACTOR per factor and one per metric (null if not measured)."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    arm_columns, trial_columns = ("group", "label", "baseline"), ("status", "reason", "device", "run")
    names = ("study", "group", "arm", "label", "baseline", *trial_columns)
    levels = list(dict.fromkeys(f"level_{factor}" for arm in results.arms for factor in arm.levels))
    columns = [(name, pa.string()) for name in (*names, *levels)]
    columns += [("seed", pa.int64()), ("attempts", pa.int64()), ("emulated", pa.bool_())]
    columns += [(metric.key, pa.float64()) for metric in METRICS]
    rows = [
        {
            "study": results.name,
            "arm": arm.id,
            "emulated": arm.emulated,
            **{key: getattr(arm, key) for key in arm_columns},
            **{key: getattr(trial, key) for key in (*trial_columns, "seed", "attempts")},
            **{f"level_{factor}": level for factor, level in arm.levels.items()},
            **trial.metrics,
        }
        for arm in results.arms
        for trial in arm.trials
    ]
    try:
        table = pa.Table.from_pylist(rows, schema=pa.schema(columns))
    except (pa.ArrowException, OverflowError) as error:  # an integer from a damaged file may exceed int64
        raise RunError(f"{path}: cannot be written: {error}") from None
    with replace_atomically(path) as temporary:
        pq.write_table(table, temporary)


def _machine(histories: Mapping[Key, TrialHistory], measured: Mapping[Key, Measured]) -> dict[str, Any]:
    """Return environment.json of the last trial that has one, and the names of all devices that trials ran on."""
    machine: dict[str, Any] = {}
    for trial in measured.values():
        if trial.machine:
            machine = dict(trial.machine)
    devices = sorted({history.device for history in histories.values() if history.device})
    if devices:
        machine["devices"] = devices
    return machine


def _machine_warnings(measured: Mapping[Key, Measured]) -> list[str]:
    """Return a warning if trials ran on different machines, because the study was resumed on another one."""
    names = {
        str((trial.machine.get("gpu") or {}).get("name") or trial.machine.get("cpu"))
        for trial in measured.values()
        if trial.machine
    }
    return [f"trials ran on different machines: {', '.join(sorted(names))}"] if len(names) > 1 else []
