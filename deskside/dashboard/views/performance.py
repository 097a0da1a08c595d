"""Performance page: speed and quality of every arm, and the loss curves."""

from pathlib import Path

import streamlit as st

from deskside.dashboard import file_cache, plotly_charts
from deskside.dashboard.components import chart, expert_charts, metric_charts, pick_group
from deskside.dashboard.sidebar import Context, StudySelection, literal
from deskside.report import study_text
from deskside.run.record import RunRecord, mapping, number
from deskside.study.results import Arm, Trial
from deskside.study.stats.metrics import metric_named
from deskside.utils.errors import UsageError

MAX_CURVES = 6
METRIC_KEYS = (
    "tokens_per_second", "val_bpb", "val_bpb_equal_tokens", "train_loss", "perplexity", "mfu", "watts",
    "joules_per_token", "seconds",
)  # fmt: skip


def show(context: Context) -> None:
    """Draw the page."""
    selection = pick_group(context)
    if selection is None:
        return
    results = selection.results
    st.header("Speed and quality")
    metrics = [metric_named(key) for key in METRIC_KEYS if study_text.measured_arms(results.arms, key)]
    keys = {metric.label: metric.key for metric in metrics}
    if not keys:
        st.info("No trial has finished yet; the Live tab shows those that are running.")
    else:
        label = st.selectbox("what is shown", list(keys), key="performance-metric")
        metric_charts(selection, keys[label])
    _draw_curves(selection)
    _draw_experts(selection)


def _draw_curves(selection: StudySelection) -> None:
    st.header("Curves")
    labels = plotly_charts.unique_labels(selection.results.arms)
    available = [
        arm.id
        for arm in selection.results.arms
        if selection.folder is None or any(t.curve for t in arm.trials)
    ]
    chosen = st.multiselect(
        f"arms (initially the first {MAX_CURVES})",
        available,
        default=available[:MAX_CURVES],
        format_func=lambda name: labels[name],
        key=f"curves {selection.folder} {' '.join(group.name for group in selection.results.groups)}",
    )
    first, second = st.columns(2)
    kind = first.radio("of", _loss_kinds(selection), horizontal=True, key="curves-of")
    x_axis = second.radio("against", ["time", "tokens"], horizontal=True, key="curves-against")
    arms = [arm for arm in selection.results.arms if arm.id in chosen]
    figure = plotly_charts.curves(
        {labels[arm.id]: [_curve_rows(selection, arm, trial) for trial in arm.trials] for arm in arms},
        {"time": "seconds", "tokens": "tokens"}[x_axis],
        {"validation loss": "val_bpb", "training loss": "loss"}[kind],
        frozenset(labels[arm.id] for arm in arms if arm.emulated),
    )
    if figure is None:
        st.info(f"No {kind} was logged for these.")
    else:
        chart(figure, "curves", f"{kind} against {x_axis} of {len(arms)} arms")
        st.caption(
            "All values are measured. One line per trial; the trials of an arm share dashes, marker and color."
        )


def _draw_experts(selection: StudySelection) -> None:
    """Draw the experts of one of the runs that have experts, if there is any."""
    labels = plotly_charts.unique_labels(selection.results.arms)
    runs = {
        labels[arm.id] + (f", seed {trial.seed}" if len(arm.trials) > 1 else ""): Path(trial.run)
        for arm in selection.results.arms
        for trial in arm.trials
        if trial.run and _has_experts(file_cache.brief(Path(trial.run)))
    }
    if not runs:
        return
    st.header("Experts")
    path = runs[st.selectbox("run", list(runs), key="performance-experts")]
    try:
        curve, _ = file_cache.curve(path)
    except UsageError:
        return  # deleted since the scan
    expert_charts(file_cache.brief(path), file_cache.newest_metrics(path).rows, curve)


def _has_experts(record: RunRecord) -> bool:
    return bool(number(mapping(record.config.get("model")).get("num_experts")))


def _loss_kinds(selection: StudySelection) -> list[str]:
    """Return the kinds of loss to choose from: only training loss for a study without validation during training."""
    trials = [trial for arm in selection.results.arms for trial in arm.trials]
    validated = any(number(row.get("val_bpb")) is not None for trial in trials for row in trial.curve[:-1])
    both = validated or selection.folder is None
    return ["validation loss", "training loss"] if both else ["training loss"]


def _curve_rows(selection: StudySelection, arm: Arm, trial: Trial) -> list[dict[str, float | None]]:
    """Return the rows of a trial's curve. The curve of a run outside of studies is read from its directory."""
    if selection.folder is not None or trial.curve:
        return trial.curve
    try:
        rows, missing = file_cache.curve(Path(trial.run))
    except UsageError:
        return []  # deleted since the scan
    for sentence_ in missing:
        st.caption(literal(f"{arm.label}: {sentence_}"))
    return rows
