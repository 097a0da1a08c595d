"""Live tab: the runs that are training now, drawn again every few seconds."""

import streamlit as st

from deskside.dashboard import file_cache, plotly_charts
from deskside.dashboard.components import COMMANDS, chart
from deskside.dashboard.runs import RunProgress, progress
from deskside.dashboard.sidebar import Context, literal
from deskside.report import study_text
from deskside.run.record import MetricsLog, RunRecord, machine_name, series
from deskside.study.results import NOT_ENDED
from deskside.utils.format import elapsed, plural

REFRESH_SECONDS = 5
MAX_RUNS = 8  # more are only counted
SILENT_SECONDS = 60.0  # a longer pause between two steps is shown


def show(context: Context) -> None:
    """Draw the tab."""
    root = str(context.root)

    @st.fragment(run_every=REFRESH_SECONDS)
    def again() -> None:
        _live(root)

    again()


def _live(root: str) -> None:
    found = file_cache.found(root)
    live = sorted(file_cache.live_runs(found.runs))
    _studies(root)
    st.header(f"{plural(len(live), 'run')} training now")
    if not live:
        st.info("No run is training below this directory. This page refreshes by itself.")
        st.code(COMMANDS, language="bash")
    for path in live[:MAX_RUNS]:
        _run(file_cache.brief(path), file_cache.newest_metrics(path), str(path).removeprefix(f"{root}/"))
    if len(live) > MAX_RUNS:
        st.caption(f"and {len(live) - MAX_RUNS} more")
    st.caption(
        f"Refreshed every {REFRESH_SECONDS} s. Measured; the time left is modelled from the pace of the last steps."
    )


def _studies(root: str) -> None:
    for results in file_cache.readable(file_cache.found(root)).values():
        trials = [trial for arm in results.arms for trial in arm.trials]
        open_ = sum(trial.status in NOT_ENDED for trial in trials)
        if trials and not results.complete:
            st.progress(
                1 - open_ / len(trials),
                text=f"study {literal(results.name)}: {len(trials) - open_} of {len(trials)} trials have ended",
            )


MEASURES = (
    ("validation, bits per byte", "val_bpb", "{:.4f}"),
    ("preference accuracy, held out", "val_accuracy", "{:.1%}"),
    ("mean reward, held out", "val_reward", "{:.3f}"),
)


def _run(record: RunRecord, log: MetricsLog, shown: str) -> None:
    now = progress(record, log)
    with st.container(border=True):
        st.subheader(literal(shown))
        share = now.share
        left = f"{elapsed(now.seconds_left)} left" if now.seconds_left is not None else "time left unknown"
        of = f" of {now.total:,}" if now.total else ""
        st.progress(share or 0.0, text=f"step {now.step if now.step is not None else 0:,}{of}; {left}")
        told = [
            machine_name(record.environment),
            record.precision + (" (emulated)" if record.emulated else ""),
        ]
        if now.silent_seconds is not None and now.silent_seconds > SILENT_SECONDS:
            told.append(f"no step for {elapsed(now.silent_seconds)}")
        st.caption(" · ".join(literal(word) for word in [*told, *record.problems, log.problem] if word))
        _numbers(now)
        _charts(record, log)


def _measure(now: RunProgress) -> tuple[str, str, str]:
    """Return label, key and format of the objective's own measure; bits per byte before the first measurement."""
    return next((measure for measure in MEASURES if measure[1] in now.values), MEASURES[0])


def _numbers(now: RunProgress) -> None:
    shown = (
        ("loss, nats per token", "loss", "{:.4f}"),
        _measure(now),
        ("speed, tokens/s", "tokens_per_second", "{:,.0f}"),
        ("memory, GiB", "memory_gib", "{:.2f}"),
        ("power, W", "watts", "{:.0f}"),
        ("temperature, °C", "celsius", "{:.0f}"),
    )
    with st.container(horizontal=True):
        for label, key, form in shown:
            value = now.values.get(key)
            st.metric(label, study_text.NOT_MEASURED if value is None else form.format(value), width=150)


def _charts(record: RunRecord, log: MetricsLog) -> None:
    columns = st.columns(2)
    for column, (key, title) in zip(
        columns, (("loss", "loss, nats per token"), ("tokens_per_second", "speed, tokens/s")), strict=True
    ):
        steps, values = series(log.rows, key, "step")
        if steps:
            figure = plotly_charts.line(steps, values, "step", title)
            with column:
                name = f"live-{record.path.name}-{key}-{abs(hash(str(record.path)))}"
                chart(figure, name, f"{title} of {record.name}")
