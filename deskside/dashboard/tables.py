"""Tables of a study: for display in the pages, and for download as CSV files.

The CSV files have the stored numbers with all digits, under the keys of study/metrics.py. Numbers that were not
measured are empty.
"""

from typing import Any

import pandas as pd

from deskside.report import study_text
from deskside.study.metrics import METRICS, PRIMARY, metric_named
from deskside.study.results import Arm, Results, status_text

ORDERED_METRICS = sorted(METRICS, key=lambda metric: metric.key not in PRIMARY)  # the primary metrics first


def trials(results: Results) -> pd.DataFrame:
    """Return one row per trial for CSV; metrics have the keys and units of results.parquet."""
    rows = [
        {
            "study": results.name,
            "group": arm.group,
            "arm": arm.id,
            **_factor_columns(results, arm),
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
    """Return one row per arm for CSV: means with intervals, and relative differences from its baseline."""
    rows: list[dict[str, Any]] = []
    for arm in results.arms:
        row: dict[str, Any] = {
            "study": results.name,
            "group": arm.group,
            "arm": arm.id,
            **_factor_columns(results, arm),
            "status": arm.status,
            "trials": len(arm.trials),
            "finished": len(arm.finished()),
            "emulated": arm.emulated,
            "baseline": arm.baseline,
        }
        for metric in METRICS:
            estimate, comparison = arm.estimate(metric.key), arm.comparison(metric.key)
            row[metric.key] = estimate.mean if estimate else None
            for end in ("low", "high"):
                row[f"{metric.key}_{end}"] = getattr(estimate, end, None)
            for part in ("relative", "relative_low", "relative_high"):
                row[f"{metric.key}_{part}"] = getattr(comparison, part, None)
            row[f"{metric.key}_verdict"] = getattr(comparison, "verdict", "")
        rows.append(row)
    return pd.DataFrame(rows)


def display_arms(results: Results) -> pd.DataFrame:
    """Return one row per arm for display, with columns for the measured metrics (in display units) and the factors."""
    labels = {factor.name: factor.label for group in results.groups for factor in group.factors}
    measured = [metric for metric in ORDERED_METRICS if study_text.measured_arms(results.arms, metric.key)]
    rows = []
    for arm in results.arms:
        row: dict[str, Any] = {"arm": arm.label}
        for metric in measured:
            estimate = arm.estimate(metric.key)
            row[metric.heading] = estimate.mean * metric.scale if estimate else None
        row |= {label: arm.levels.get(name, "") for name, label in labels.items()}
        row |= {"status": study_text.trials_text(arm), "products": "emulated" if arm.emulated else "native"}
        rows.append(row | _group_column(results, arm))
    return pd.DataFrame(rows)


def display_trials(results: Results) -> pd.DataFrame:
    """Return one row per trial for display, with a column per measured metric in display units."""
    measured = [
        metric
        for metric in ORDERED_METRICS
        if any(metric.key in t.metrics for a in results.arms for t in a.trials)
    ]
    rows = []
    for arm in results.arms:
        for trial in arm.trials:
            row: dict[str, Any] = {"arm": arm.label, "seed": trial.seed}
            for metric in measured:
                value = trial.metrics.get(metric.key)
                row[metric.heading] = None if value is None else value * metric.scale
            row |= {"status": status_text(trial.status), "why": trial.reason}
            rows.append(row | _group_column(results, arm))
    return pd.DataFrame(rows)


def _group_column(results: Results, arm: Arm) -> dict[str, str]:
    """Return the group column of an arm's row if there are several groups, else no column."""
    titles = {group.name: group.heading for group in results.groups}
    return {"group": titles.get(arm.group, arm.group)} if len(titles) > 1 else {}


def number_formats() -> dict[str, str]:
    """Return column heading -> format string for every metric."""
    return {metric.heading: f"{{:,.{metric.digits}f}}" for metric in METRICS}


def differences(results: Results, keys: tuple[str, ...]) -> pd.DataFrame:
    """Return one row per compared arm for display, with its differences from its baseline in the metrics `keys`."""
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


def _factor_columns(results: Results, arm: Arm) -> dict[str, str]:
    """Return the factor columns of an arm's row. A factor that is not varied in the arm's group is empty."""
    names = dict.fromkeys(factor.name for group in results.groups for factor in group.factors)
    return {f"factor_{name}": arm.levels.get(name, "") for name in names}


def not_measured(arms_: list[Arm], key: str) -> str:
    """Return a sentence that names up to six arms without a metric, and how they ended; empty if all have it."""
    without = [arm for arm in arms_ if arm.estimate(key) is None]
    if not without:
        return ""
    reasons = [f"{arm.label} ({study_text.trials_text(arm)})" for arm in without[:6]]
    more = f" and {len(without) - 6} more" if len(without) > 6 else ""
    return f"Not measured: {'; '.join(reasons)}{more}."
