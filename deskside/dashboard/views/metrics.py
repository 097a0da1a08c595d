"""Metrics page of a study: one metric of every arm with its differences from the baseline, and the loss curves."""

import streamlit as st

from deskside.dashboard import file_cache, study_charts
from deskside.dashboard.components import chart, expert_charts, memory_limit, metric_charts, pick_group
from deskside.dashboard.plotly_charts import unique_labels
from deskside.dashboard.sidebar import Context, StudySelection
from deskside.report import study_text
from deskside.report.chart_data import most_different
from deskside.report.curve_data import Curve, finished_curves, loss_curve, loss_key
from deskside.run.record import RunRecord, mapping, number
from deskside.study.metrics import QUALITY, metric_named
from deskside.study.results import Arm
from deskside.utils.errors import UsageError
from deskside.utils.format import plural

MAX_CURVES = 6
METRIC_KEYS = (
    "val_bpb", "tokens_per_second", "peak_memory_gib", "peak_reserved_gib", "val_bpb_equal_tokens", "train_loss",
    "perplexity", "mfu", "watts", "joules_per_token", "seconds", "micro_tokens",
)  # fmt: skip
MEMORY_KEYS = ("peak_memory_gib", "peak_reserved_gib")
MEMORY_NOTE = (
    "Where the micro-batch is fitted to the memory, a smaller model may use as much as a larger one."
)


def show(context: Context) -> None:
    """Draw the page."""
    selection = pick_group(context)
    if selection is None:
        return
    st.title("Metrics")
    arms = selection.results.arms
    metrics = [metric_named(key) for key in METRIC_KEYS if study_text.measured_arms(arms, key)]
    keys = {metric.label: metric.key for metric in metrics}
    if not keys:
        st.info("No trial has finished yet; the run table shows those that are running.")
    else:
        label = st.selectbox("metric", list(keys), key="metrics-metric", persist_state="session", width=420)
        key = keys[label]
        is_memory = key in MEMORY_KEYS
        limit = memory_limit(selection) if is_memory else None
        more = ("micro_tokens",) if is_memory else ()
        metric_charts(selection, key, limit, MEMORY_NOTE if is_memory else "", more)
    _draw_curves(selection)
    _draw_experts(selection)


def _draw_curves(selection: StudySelection) -> None:
    st.header("Curves")
    arms = selection.results.arms
    labels = unique_labels(arms)
    available = [arm.id for arm in arms if any(trial.curve for trial in arm.finished())]
    initial = {arm.id for arm in most_different([a for a in arms if a.id in available], QUALITY, MAX_CURVES)}
    note = f" (at first the baseline and those that differ most, {MAX_CURVES} in all)"
    chosen = st.multiselect(
        f"arms{note if len(available) > MAX_CURVES else ''}",
        available,
        default=[name for name in available if name in initial],
        format_func=lambda name: labels[name],
        key=f"curves {selection.folder} {' '.join(group.name for group in selection.results.groups)}",
    )
    x_axis = st.segmented_control(
        "against",
        ["time", "tokens"],
        default="time",
        required=True,
        key="curves-against",
        persist_state="session",
    )
    every = None if selection.unfiltered.complete else file_cache.REFRESH_SECONDS
    st.fragment(run_every=every)(_draw_lines)(selection, [arm for arm in arms if arm.id in chosen], x_axis)


def _draw_lines(selection: StudySelection, arms: list[Arm], x_axis: str) -> None:
    """Draw the curves of some arms, and those of all trials that are running."""
    labels = unique_labels(selection.results.arms)
    x_key = {"time": "seconds", "tokens": "tokens"}[x_axis]
    y_key = loss_key(arms, x_key)
    lines = {_curve_label(arm, labels): finished_curves(arm, y_key, x_key) for arm in arms}
    running = _running_curves(selection, labels, y_key, x_key)
    figure = study_charts.curves(lines | {name: [line] for name, line in running.items()}, x_key, y_key)
    if figure is None:
        st.info("No trial of these arms has a curve yet.")
        return
    chart(
        figure,
        "curves",
        f"{y_key} against {x_axis} of {plural(len(arms), 'arm')} and {plural(len(running), 'running trial')}",
    )
    smooth = " Training losses are running medians." if y_key == "loss" else ""
    live = " Trials that are running have lines of their own." if running else ""
    st.caption(
        f"Measured. Line: mean over the seeds; band: from the lowest to the highest seed.{live}{smooth} The high "
        "losses of the first steps are cut off; double-click on the chart to see all."
    )


def _running_curves(
    selection: StudySelection, labels: dict[str, str], y_key: str, x_key: str
) -> dict[str, Curve]:
    """Return the curves so far of the trials that are running, by what the legend calls them."""
    found = {}
    for arm in selection.results.arms:
        for trial in arm.trials:
            if trial.status == "running" and trial.run:
                rows = file_cache.metrics(selection.folder / trial.run).rows
                if points := loss_curve(rows, y_key, x_key):
                    found[f"{_curve_label(arm, labels)}, seed {trial.seed}, running"] = points
    return found


def _curve_label(arm: Arm, labels: dict[str, str]) -> str:
    return labels[arm.id] + (" (emulated)" if arm.emulated else "")


def _draw_experts(selection: StudySelection) -> None:
    """Draw the experts of one of the runs that have experts, if there is any."""
    labels = unique_labels(selection.results.arms)
    runs = {
        labels[arm.id] + (f", seed {trial.seed}" if len(arm.trials) > 1 else ""): selection.folder / trial.run
        for arm in selection.results.arms
        for trial in arm.trials
        if trial.run and _has_experts(file_cache.brief(selection.folder / trial.run))
    }
    if not runs:
        return
    st.header("Experts")
    path = runs[st.selectbox("run", list(runs), key="metrics-experts")]
    try:
        curve, _ = file_cache.curve(path)
    except UsageError:
        return  # deleted since the scan
    expert_charts(file_cache.brief(path), file_cache.newest_metrics(path).rows, curve)


def _has_experts(record: RunRecord) -> bool:
    return bool(number(mapping(record.config.get("model")).get("num_experts")))
