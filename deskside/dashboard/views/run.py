"""Page of a run, or of several runs: drawn again every few seconds."""

from dataclasses import replace

import streamlit as st

from deskside.dashboard import file_cache, plotly_charts
from deskside.dashboard.components import REFRESH_SECONDS, chart, empty_state, expert_charts
from deskside.dashboard.runs import RunProgress, progress
from deskside.dashboard.scan import name_below
from deskside.dashboard.sidebar import Context, literal
from deskside.report import study_text
from deskside.run.record import MetricsLog, RunRecord, machine_name, series
from deskside.utils.format import elapsed

SILENT_SECONDS = 60.0  # a longer time since the last logged step is reported
# Validation metrics of the objectives: (label, key, format).
QUALITY_METRICS = (
    ("validation, bits per byte", "val_bpb", "{:.4f}"),
    ("preference accuracy, held out", "val_accuracy", "{:.1%}"),
    ("mean reward, held out", "val_reward", "{:.3f}"),
)


def show(context: Context) -> None:
    """Draw the page."""
    runs = {name_below(run.path, context.root): run.path for run in context.scan.runs}
    if not runs:
        empty_state(context)
        return
    st.title("Runs")
    chosen = st.multiselect("runs", list(runs), key="run", bind="query-params")

    @st.fragment(run_every=REFRESH_SECONDS)
    def refresh() -> None:
        for name in chosen:
            _draw_run(file_cache.brief(runs[name]), file_cache.newest_metrics(runs[name]), name)

    refresh()


def _draw_run(record: RunRecord, log: MetricsLog, title: str) -> None:
    state = progress(record, log)
    with st.container(border=True):
        st.subheader(literal(title))
        left = (
            f"{elapsed(state.seconds_left)} left" if state.seconds_left is not None else "time left unknown"
        )
        total = f" of {state.total:,}" if state.total else ""
        st.progress(state.share or 0.0, text=f"step {state.step or 0:,}{total}; {left}")
        details = [
            machine_name(record.environment),
            record.precision + (" (emulated)" if record.emulated else ""),
        ]
        if state.silent_seconds is not None and state.silent_seconds > SILENT_SECONDS:
            details.append(f"no step logged for {elapsed(state.silent_seconds)}")
        st.caption(" · ".join(literal(word) for word in [*details, *record.problems, log.problem] if word))
        _draw_numbers(state)
        _draw_charts(record, log)
        if record.plan.get("languages"):
            _draw_languages(record)


def _quality_metric(state: RunProgress) -> tuple[str, str, str]:
    """Return the (label, key, format) of the run's validation metric; bits per byte if none was logged yet."""
    return next((metric for metric in QUALITY_METRICS if metric[1] in state.values), QUALITY_METRICS[0])


def _draw_numbers(state: RunProgress) -> None:
    metrics = (
        ("loss, nats per token", "loss", "{:.4f}"),
        _quality_metric(state),
        ("speed, tokens/s", "tokens_per_second", "{:,.0f}"),
        ("memory, GiB", "memory_gib", "{:.2f}"),
        ("power, W", "watts", "{:.0f}"),
        ("temperature, °C", "celsius", "{:.0f}"),
    )
    with st.container(horizontal=True):
        for label, key, number_format in metrics:
            value = state.values.get(key)
            st.metric(
                label, study_text.NOT_MEASURED if value is None else number_format.format(value), width=150
            )


def _draw_charts(record: RunRecord, log: MetricsLog) -> None:
    columns = st.columns(2)
    for column, (key, title) in zip(
        columns, (("loss", "loss, nats per token"), ("tokens_per_second", "speed, tokens/s")), strict=True
    ):
        steps, values = series(log.rows, key, "step")
        if steps:
            figure = plotly_charts.line(steps, values, "step", title)
            with column:
                # Streamlit needs unique keys, and two runs may have the same name.
                name = f"live-{record.path.name}-{key}-{abs(hash(str(record.path)))}"
                chart(figure, name, f"{title} of {record.name}")
    expert_charts(record, log.rows, log.rows)


def _draw_languages(record: RunRecord) -> None:
    """Draw the validation bits per byte of each language: the newest in a table, all as lines."""
    curves = replace(record, metrics=file_cache.evaluations(record.path)).language_series()
    if not curves:
        return
    title = "validation bits per byte by language"
    table, lines = st.columns((1, 3))
    with table:
        rows = [{"language": name, "bits per byte": y[-1]} for name, (_, y) in curves.items()]
        st.dataframe(rows, hide_index=True, width="stretch")
    with lines:
        name = f"live-{record.path.name}-languages-{abs(hash(str(record.path)))}"
        chart(
            plotly_charts.labelled_lines(curves, "training tokens", title), name, f"{title} of {record.name}"
        )
