"""Tables of a study: those of the Results tab, and its CSV files.

The CSV files have the stored numbers with all digits, under the keys of study/stats/metrics.py. A number that was not
measured is empty.
"""

from typing import Any

import pandas as pd

from deskside.report import study_text
from deskside.study.results import Arm, Results, status_text
from deskside.study.stats.metrics import METRICS, PRIMARY, metric_named

ORDER = sorted(METRICS, key=lambda metric: metric.key not in PRIMARY)  # the primary metrics first


def trials(results: Results) -> pd.DataFrame:
    """Return one row per trial; metrics have the keys and units of results.parquet."""
    rows = [
        {
            "study": results.name,
            "group": arm.group,
            "arm": arm.id,
            **_factors(results, arm),
            "seed": trial.seed,
            "status": trial.status,
            "reason": trial.reason,
            "emulated": arm.emulated,
            "device": trial.device,
            "run": trial.run,
            **{metric.key: trial.metrics.get(metric.key) for metric in METRICS},
        }
        for arm in results.arms
        for trial in arm.trials
    ]
    return pd.DataFrame(rows)


def arms(results: Results) -> pd.DataFrame:
    """Return one row per arm: means with their intervals, and relative differences from its baseline."""
    rows: list[dict[str, Any]] = []
    for arm in results.arms:
        row: dict[str, Any] = {
            "study": results.name,
            "group": arm.group,
            "arm": arm.id,
            **_factors(results, arm),
            "status": arm.status,
            "trials": len(arm.trials),
            "finished": len(arm.finished()),
            "emulated": arm.emulated,
            "baseline": arm.baseline,
        }
        for metric in METRICS:
            found, against = arm.estimate(metric.key), arm.comparison(metric.key)
            row[metric.key] = found and found.mean
            for end in ("low", "high"):
                row[f"{metric.key}_{end}"] = getattr(found, end, None)
            for part in ("relative", "relative_low", "relative_high"):
                row[f"{metric.key}_{part}"] = getattr(against, part, None)
            row[f"{metric.key}_verdict"] = getattr(against, "verdict", "")
        rows.append(row)
    return pd.DataFrame(rows)


def shown_arms(results: Results) -> pd.DataFrame:
    """Return the arms for display: one column per measured metric in its shown unit, and one per factor."""
    labels = {factor.name: factor.label for group in results.groups for factor in group.factors}
    measured = [metric for metric in ORDER if study_text.measured_arms(results.arms, metric.key)]
    rows = []
    for arm in results.arms:
        row: dict[str, Any] = {
            **_group(results, arm),
            "arm": arm.label,
            "status": study_text.trials_text(arm),
        }
        for metric in measured:
            found = arm.estimate(metric.key)
            row[metric.heading] = found.mean * metric.scale if found else None
        row |= {label: arm.levels.get(name, "") for name, label in labels.items()}
        row["products"] = "emulated" if arm.emulated else "native"
        rows.append(row)
    return pd.DataFrame(rows)


def shown_trials(results: Results) -> pd.DataFrame:
    """Return the trials for display."""
    measured = [
        metric for metric in ORDER if any(metric.key in t.metrics for a in results.arms for t in a.trials)
    ]
    rows = []
    for arm in results.arms:
        for trial in arm.trials:
            row: dict[str, Any] = {
                **_group(results, arm),
                "arm": arm.label,
                "seed": trial.seed,
                "status": status_text(trial.status),
            }
            for metric in measured:
                value = trial.metrics.get(metric.key)
                row[metric.heading] = None if value is None else value * metric.scale
            row["why"] = trial.reason
            rows.append(row)
    return pd.DataFrame(rows)


def _group(results: Results, arm: Arm) -> dict[str, str]:
    """Return the group column, if there are several groups."""
    titles = {group.name: group.heading for group in results.groups}
    return {"group": titles.get(arm.group, arm.group)} if len(titles) > 1 else {}


def formats() -> dict[str, str]:
    """Return the number format of each column."""
    return {metric.heading: f"{{:,.{metric.digits}f}}" for metric in METRICS}


def differences(results: Results, keys: tuple[str, ...]) -> pd.DataFrame:
    """Return the differences of arms from their baselines in a few metrics; empty if nothing was compared."""
    rows = []
    for arm in results.arms:
        if any(arm.comparison(key) for key in keys):
            base = results.arm(arm.baseline)
            rows.append(
                {
                    "arm": arm.label,
                    "against": base.label if base else arm.baseline,
                    **{metric_named(key).label: study_text.difference_text(arm, key) for key in keys},
                    "products": "emulated" if arm.emulated else "native",
                }
            )
    return pd.DataFrame(rows)


def _factors(results: Results, arm: Arm) -> dict[str, str]:
    """Return the factor columns of an arm's row; a factor that its group does not vary is empty."""
    names = dict.fromkeys(factor.name for group in results.groups for factor in group.factors)
    return {f"factor_{name}": arm.levels.get(name, "") for name in names}


def not_measured(arms_: list[Arm], key: str) -> str:
    """Return a sentence on the arms that lack a metric, and why; empty if all have it."""
    without = [arm for arm in arms_ if arm.estimate(key) is None]
    if not without:
        return ""
    named = [f"{arm.label} ({study_text.trials_text(arm)})" for arm in without[:6]]
    more = f" and {len(without) - 6} more" if len(without) > 6 else ""
    return f"Not measured: {'; '.join(named)}{more}."
