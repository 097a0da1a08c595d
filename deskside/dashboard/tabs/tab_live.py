"""Live: the runs that are going on, drawn anew every few seconds."""

import streamlit as st

from deskside.dashboard import cached, charts
from deskside.dashboard.cached import Context
from deskside.dashboard.common import COMMANDS, chart
from deskside.dashboard.literal import literal
from deskside.dashboard.progress import Progress, progress
from deskside.dashboard.reading import Brief, Rows
from deskside.report import study_words, words
from deskside.run.record import number
from deskside.study.results import OPEN

EVERY = 5  # seconds
MOST = 8  # runs that are drawn; more are counted
QUIET = 60.0  # seconds without a step after which it is said


def show(context: Context) -> None:
    """The tab."""
    root = str(context.root)

    @st.fragment(run_every=EVERY)
    def again() -> None:
        _live(root)

    again()


def _live(root: str) -> None:
    found = cached.found(root)
    live = sorted(cached.live_runs(found.runs))
    _studies(root)
    st.header(f"{study_words.several(len(live), 'run')} going on")
    if not live:
        st.info("Nothing is training below this directory. This page looks again by itself.")
        st.code(COMMANDS, language="bash")
    for path in live[:MOST]:
        _run(cached.brief(path), cached.rows(path), str(path).removeprefix(f"{root}/"))
    if len(live) > MOST:
        st.caption(f"and {len(live) - MOST} more")
    st.caption(
        f"Looks again every {EVERY} s. Measured; the time left is modelled from the pace of the last steps."
    )


def _studies(root: str) -> None:
    for path in cached.found(root).studies:
        study = cached.study(path)
        if study is None or study.results is None or study.results.complete:
            continue
        trials = [trial for arm in study.results.arms for trial in arm.trials]
        open_ = sum(trial.status in OPEN for trial in trials)
        if trials:
            st.progress(
                1 - open_ / len(trials),
                text=f"study {literal(study.results.name)}: {len(trials) - open_} of {len(trials)} trials have ended",
            )


MEASURES = (
    ("validation, bits per byte", "val_bpb", "{:.4f}"),
    ("preference accuracy, held out", "val_accuracy", "{:.1%}"),
    ("mean reward, held out", "val_reward", "{:.3f}"),
)


def _run(brief: Brief, rows: Rows, shown: str) -> None:
    now = progress(brief, rows)
    with st.container(border=True):
        st.subheader(literal(shown))
        share = now.share
        left = (
            f"{words.seconds(now.seconds_left)} left"
            if now.seconds_left is not None
            else "time left not known yet"
        )
        of = f" of {now.total:,}" if now.total else ""
        st.progress(share or 0.0, text=f"step {now.step if now.step is not None else 0:,}{of}; {left}")
        told = [f"{brief.card}", brief.precision + (" (emulated)" if brief.emulated else "")]
        if now.silent_seconds is not None and now.silent_seconds > QUIET:
            told.append(f"no step for {words.seconds(now.silent_seconds)}")
        st.caption(" · ".join(literal(word) for word in [*told, *brief.problems, rows.problem] if word))
        _numbers(now)
        _charts(brief, rows)


def _measure(now: Progress) -> tuple[str, str, str]:
    """Return label, key and format of the objective's own measure; bits per byte before the first measurement."""
    return next((measure for measure in MEASURES if measure[1] in now.values), MEASURES[0])


def _numbers(now: Progress) -> None:
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
            st.metric(label, study_words.NOT_MEASURED if value is None else form.format(value), width=150)


def _charts(brief: Brief, rows: Rows) -> None:
    columns = st.columns(2)
    for column, (key, title) in zip(
        columns, (("loss", "loss, nats per token"), ("tokens_per_second", "speed, tokens/s")), strict=True
    ):
        points = [(number(row.get("step")), number(row.get(key))) for row in rows.steps]
        known = [(x, y) for x, y in points if x is not None and y is not None]
        if known:
            figure = charts.line([x for x, _ in known], [y for _, y in known], "step", title)
            with column:
                chart(
                    figure,
                    f"live-{brief.path.name}-{key}-{abs(hash(str(brief.path)))}",
                    f"{title} of {brief.name}",
                )
