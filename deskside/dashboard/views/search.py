"""Page of a search: the answer, the best so far, what mattered, and every trial. It is live while the search runs."""

import shlex
from pathlib import Path
from typing import Any

import pandas as pd
import streamlit as st

from deskside.dashboard import file_cache, search_charts
from deskside.dashboard.components import chart
from deskside.dashboard.live import rerun_when_changed
from deskside.dashboard.notes import empty_state
from deskside.dashboard.runs import progress
from deskside.dashboard.scan import name_below
from deskside.dashboard.searches import Search
from deskside.dashboard.sidebar import Context, literal
from deskside.report.search_chart_data import (
    ABOUT_IMPORTANCE,
    X_KEYS,
    best_so_far,
    importances,
    slices,
    time_unit,
)
from deskside.study.results import INTERRUPTED, PLAN, RESULTS
from deskside.study.search.outcome import Outcome, SearchTrial, trial_status_text
from deskside.study.search.suggestions import METHODS
from deskside.utils.format import elapsed, plural, value_text

EMPTY = "No search was found below `{root}`. This command searches a learning rate, batch and size for six minutes:"
COMMAND = "deskside search demo --hours 0.1"


def show(context: Context) -> None:
    """Draw the page. The name of the search is in its address."""
    rerun_when_changed(lambda: file_cache.scan_result(str(context.root)).searches)
    st.title("Search")
    found = {name_below(path, context.root): path for path in context.scan.searches}
    if not found:
        if not (context.scan.runs or context.scan.studies):
            empty_state(context)
            return
        st.info(EMPTY.format(root=context.root))
        st.code(COMMAND, language=None, wrap_lines=True)
        return
    newest = sorted(found, key=lambda name: file_cache.search(found[name]).created, reverse=True)
    name = st.selectbox("search", newest, key="search", bind="query-params", persist_state="session")
    search = file_cache.search(found[name])
    if search.outcome is None:
        st.error(literal(f"{name}: {search.problem}"))
        return
    rerun_when_changed(lambda: file_cache.search(search.path).status)
    every = file_cache.REFRESH_SECONDS if search.status == "running" else None
    st.fragment(run_every=every)(_draw_head)(context, search.path, name)
    x_axis = st.segmented_control(
        "best so far against",
        X_KEYS,
        default="time",
        required=True,
        key="search-x",
        bind="query-params",
    )
    st.fragment(run_every=every)(_draw_trials)(search.path, x_axis or "time")


def _draw_head(context: Context, path: Path, name: str) -> None:
    """Draw the answer, the state, the numbers of the confirmation, and what to do next."""
    search = file_cache.search(path)
    outcome = search.outcome
    if outcome is None:
        st.error(literal(f"{name}: {search.problem}"))
        return
    time = f"{elapsed(search.spent_seconds)} of {elapsed(3600 * outcome.hours)}"
    if search.status == "running":
        running = literal(f"running: {time}; {_running_trials(search, outcome)}")
        st.progress(search.share_spent, text=running)
    st.write(literal(outcome.answer))
    if outcome.edge_text:
        st.write(literal(outcome.edge_text))
    how = METHODS.get(outcome.sampler, outcome.sampler)
    if outcome.prune:
        how += " with successive halving"
    counts = ", ".join(f"{count} {_status(search, status)}" for status, count in outcome.counts().items())
    parts = [search.status, time, f"{how}: {counts or 'no trial yet'}", outcome.proxy]
    st.caption(literal(" · ".join(parts)))
    _draw_confirmation(outcome)
    _draw_commands(context, search, name)


def _draw_confirmation(outcome: Outcome) -> None:
    if outcome.default_mean is None or outcome.winner_mean is None:
        return
    confirmed = outcome.confirmed
    with st.container(horizontal=True):
        about = f"bits per byte on {outcome.confirmed_on}, mean of fresh seeds"
        st.metric("default", f"{outcome.default_mean:.4f}", width="content", help=about)
        st.metric("winner", f"{outcome.winner_mean:.4f}", width="content", help=about)
        if confirmed is not None:
            st.metric("difference", f"{confirmed.difference:+.4f}", width="content")
            if confirmed.low is not None and confirmed.high is not None:
                st.metric("95 % interval", f"{confirmed.low:+.4f} to {confirmed.high:+.4f}", width="content")


def _running_trials(search: Search, outcome: Outcome) -> str:
    """Return how far the trials that run now are, from their own metrics."""
    texts = []
    for trial in outcome.trials:
        if trial.status == "running" and trial.run:
            run = search.path / trial.run
            state = progress(file_cache.brief(run), file_cache.newest_metrics(run))
            texts.append(f"trial {trial.number}: {state.text}")
    if not texts and (search.path / "confirm" / PLAN).exists():
        return "the winner and the default train with fresh seeds"
    return "; ".join(texts) or "no trial runs now"


def _draw_commands(context: Context, search: Search, name: str) -> None:
    winner = search.path / "winner.toml"
    commands = []
    if winner.exists():
        commands.append(f"deskside train {shlex.quote(str(winner))}")
    if search.status == INTERRUPTED:
        commands.append(f"deskside search {shlex.quote(str(search.path))} --resume")
    if commands:
        st.code("\n".join(commands), language=None, wrap_lines=True)
    with st.container(horizontal=True):
        st.page_link(
            context.pages["report"], label="Report", icon=":material/description:", query_params={"of": name}
        )
        if (search.path / "confirm" / RESULTS).exists():
            st.page_link(
                context.pages["study"],
                label="Confirmation on fresh seeds",
                icon=":material/science:",
                query_params={"study": f"{name}/confirm"},
            )


def _draw_what_mattered(outcome: Outcome) -> None:
    st.header("What mattered")
    if shares := importances(outcome):
        text = ", ".join(f"{key} {share:.0%}" for key, share in shares)
        chart(search_charts.importance_chart(shares), "search-importance", f"importance: {text}")
        st.caption(ABOUT_IMPORTANCE)
    columns: Any = ()
    for place, data in enumerate(slices(outcome)):
        if place % 2 == 0:
            columns = st.columns(2)
        with columns[place % 2]:
            chart(
                search_charts.slice_chart(data, outcome.winner),
                f"search-slice-{data.key}",
                f"bits per byte of {plural(len(data.x), 'trial')} by {data.key}",
            )
    st.caption(
        "Blue square: the default; orange diamond: the best trial. The other settings of a trial differ too."
    )


def _draw_trials(path: Path, x_key: str) -> None:
    """Draw the charts and the table of the trials."""
    search = file_cache.search(path)
    outcome = search.outcome
    if outcome is None:
        return
    data = best_so_far(outcome, x_key)
    if data.points:
        number, (_, loss) = data.numbers[-1], data.best[-1]
        about = f"bits per byte of {plural(len(data.points), 'trial')}; the best until trial {number} is {loss:.4f}"
        chart(search_charts.best_chart(data), "search-best", about)
        st.caption("Trials that finished, with one seed each. Measured.")
        _draw_what_mattered(outcome)
    else:
        st.info("No trial has finished yet.")
    _draw_table(search, outcome)


def _draw_table(search: Search, outcome: Outcome) -> None:
    st.header("Trials")
    counts = outcome.counts()
    chosen = st.pills(
        "status",
        list(counts),
        selection_mode="multi",
        format_func=lambda status: f"{_status(search, status)} ({counts.get(status, 0)})",
        key=f"{search.path}: statuses",
    )
    unit = time_unit(outcome)
    rows = [_row(search, trial, unit) for trial in outcome.trials if not chosen or trial.status in chosen]
    if not rows:
        st.info("No trial has begun yet.")
        return
    frame = pd.DataFrame(rows)
    formats = {"bits per byte": "%.4f", _ended(unit): "%.2f"}
    st.dataframe(
        frame,
        hide_index=True,
        width="stretch",
        height=min(640, 40 + 35 * len(rows)),
        column_config={
            **{name: st.column_config.NumberColumn(format=form) for name, form in formats.items()},
            "why": st.column_config.TextColumn(width="large"),
        },
        placeholder="",
    )
    st.caption("Click on a heading to sort. Every trial was checked by the planner before it could start.")
    file = f"{search.path.resolve().name}-trials.csv"
    st.download_button("Trials as CSV", frame.to_csv(index=False), file, "text/csv", on_click="ignore")


def _ended(unit: tuple[str, float]) -> str:
    return f"ended after, {unit[0]}"


def _row(search: Search, trial: SearchTrial, unit: tuple[str, float]) -> dict[str, Any]:
    return {
        "trial": trial.number,
        "bits per byte": trial.loss,
        "status": _status(search, trial.status),
        **{
            key: value_text(value) if isinstance(value, bool) else value
            for key, value in trial.settings.items()
        },
        _ended(unit): None if trial.elapsed is None else trial.elapsed / unit[1],
        "why": trial.reason or ("the default" if trial.number == 0 else ""),
    }


def _status(search: Search, status: str) -> str:
    """Return a trial's status as text. A trial of a search that was killed does not run."""
    return INTERRUPTED if status == "running" and search.status != "running" else trial_status_text(status)
