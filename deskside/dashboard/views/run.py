"""Page of a run, or of several runs in one chart each. It is live: new steps, events, runs and results are drawn."""

import html
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import streamlit as st

from deskside.dashboard import file_cache, plotly_charts, run_details, run_plots, theme
from deskside.dashboard.components import chart, expert_charts
from deskside.dashboard.live import rerun_when_changed
from deskside.dashboard.notes import empty_state
from deskside.dashboard.run_details import key_numbers, last_bpb_note, newest_values
from deskside.dashboard.run_table import RUN, TRIAL, TableRow, cost_note, study_of
from deskside.dashboard.runs import progress
from deskside.dashboard.scan import FoundRun, name_below, stamp
from deskside.dashboard.sidebar import Context, literal
from deskside.report.run_answer import loss_unit, objective
from deskside.report.run_chart_data import CHARTS, run_line
from deskside.report.run_report import verdict
from deskside.run.record import RunRecord, flatten, has_known_peak, machine_name
from deskside.utils.format import elapsed, percent, plural, value_text

MAX_RUNS = 8  # that are drawn together
SILENT_SECONDS = 60.0  # a longer time since the last logged step is reported
X_KEYS = {"tokens": "tokens", "steps": "step", "time": "seconds"}
PARTS = ("Charts", "Samples", "Configuration", "Events")


def show(context: Context) -> None:
    """Draw the page. The names of the runs are in its address."""
    rerun_when_changed(lambda: file_cache.scan_result(str(context.root)).runs)
    found = {name_below(run.path, context.root): run for run in context.scan.runs}
    if not found:
        st.title("Run")
        empty_state(context)
        return
    heading = st.container()
    live = file_cache.live_runs(context.scan.runs)
    if "run" not in st.session_state and "run" not in st.query_params:
        st.session_state["run"] = [_newest(context)]
    names = st.multiselect(
        "runs, one or several to compare",
        list(found),
        key="run",
        bind="query-params",
        max_selections=MAX_RUNS,
        persist_state="session",
    )
    title = (
        f"{len(names)} runs" if len(names) != 1 else names[0].removeprefix("runs/").rpartition("/runs/")[2]
    )
    heading.title(literal(title))
    if not names:
        st.info("Select a run above, or several to compare them.")
        return
    chosen = {name: found[name] for name in names}
    rerun_when_changed(lambda: _state(chosen))
    every = file_cache.REFRESH_SECONDS if any(run.path in live for run in chosen.values()) else None
    st.fragment(run_every=every)(_draw_head)(context, chosen)
    for part, tab in zip(
        PARTS, st.tabs(PARTS, key="part", on_change="rerun", bind="query-params"), strict=True
    ):
        if tab.open:
            with tab:
                if part == "Charts":
                    settings = _chart_settings()
                    st.fragment(run_every=every)(_draw_charts)(chosen, *settings)
                elif part == "Events":
                    st.fragment(run_every=every)(_draw_events)(chosen)
                else:
                    {"Samples": _draw_samples, "Configuration": _draw_options}[part](chosen)


def _state(chosen: Mapping[str, FoundRun]) -> object:
    """Return what changes when a run ends or goes on: whether each trains, and the times of its files."""
    live = file_cache.live_runs(tuple(chosen.values()))
    return [(run.path in live, stamp(run.path, *file_cache.RUN_JSON_FILES)) for run in chosen.values()]


def _newest(context: Context) -> str:
    """Return the name of the run that started last, of those that are training if there are any."""
    rows = [row for row in file_cache.rows(context.scan, context.root) if row.kind in (RUN, TRIAL)]
    return next((row.name for row in rows if row.status == "running"), rows[0].name)


def _draw_head(context: Context, chosen: Mapping[str, FoundRun]) -> None:
    """Draw the state and the numbers of one run, or the legend with the numbers of several."""
    live = file_cache.live_runs(tuple(chosen.values()))
    rows = {
        name: file_cache.row(run.path, run.path in live, context.root, TRIAL if run.study else RUN)
        for name, run in chosen.items()
    }
    if len(chosen) > 1:
        st.html(_legend(list(rows.values())))
        return
    (name, run), (row,) = next(iter(chosen.items())), rows.values()
    record, log = file_cache.brief(run.path), file_cache.newest_metrics(run.path)
    if row.status == "running":
        state = progress(record, log)
        silent = state.silent_seconds or 0.0
        silence = f"; no step logged for {elapsed(silent)}" if silent > SILENT_SECONDS else ""
        st.progress(state.share or 0.0, text=f"running: {state.text}{silence}")
    else:
        st.write(literal(verdict(record)))
    details = [row.details, f"started {row.created[:16].replace('T', ' ')} UTC" if row.created else ""]
    st.caption(" · ".join(literal(part) for part in [*details, *record.problems, log.problem] if part))
    with st.container(horizontal=True, gap="medium"):
        logged = file_cache.metrics(run.path).rows
        numbers = key_numbers(row, newest_values([*logged, record.summary]))
        if not has_known_peak(record.environment):
            del numbers["MFU"]
        for label, value in numbers.items():
            if value is not None:
                st.metric(label, value, width="content", help=cost_note() if label == "electricity" else None)
    if note := last_bpb_note(row):
        st.caption(note)
    # A label may end with a unit, after a comma.
    if missing := [label.split(",")[0] for label, value in numbers.items() if value is None]:
        st.caption(f"Not measured: {', '.join(missing)}.")
    with st.container(horizontal=True):
        st.page_link(
            context.pages["report"], label="Report", icon=":material/description:", query_params={"of": name}
        )
        if run.study is not None:
            study = study_of(name)
            page, icon = context.pages["study"], ":material/science:"
            st.page_link(page, label=literal(study), icon=icon, query_params={"study": study})


def _chart_settings() -> tuple[str, float, bool]:
    """Draw the controls of the charts. Return the key of the x axis, the smoothing and whether axes are logarithmic."""
    with st.container(horizontal=True, vertical_alignment="bottom"):
        x_axis = st.segmented_control(
            "against", list(X_KEYS), default="tokens", required=True, key="x", bind="query-params"
        )
        smoothing = st.slider(
            "smoothing", 0.0, 0.99, 0.0, 0.01, key="smoothing", bind="query-params", width=220
        )
        log = st.toggle("logarithmic", key="log", bind="query-params")
    return X_KEYS[x_axis or "tokens"], smoothing, log


def _draw_charts(chosen: Mapping[str, FoundRun], x_key: str, smoothing: float, log: bool) -> None:
    """Draw every metric that one of the runs logged."""
    rows = {name: file_cache.metrics(run.path).rows for name, run in chosen.items()}
    records = {name: file_cache.brief(run.path) for name, run in chosen.items()}
    places = {name: place for place, name in enumerate(chosen)}
    drawn, has_end = 0, False
    columns: Sequence[Any] = ()
    for spec in CHARTS:
        lines = [
            line
            for name in chosen
            if (line := run_line(name, rows[name], records[name].summary, spec, x_key, smoothing)) is not None
        ]
        if not lines:
            continue
        has_end = has_end or any(line.final is not None for line in lines)
        if drawn % 2 == 0:
            columns = st.columns(2)
        with columns[drawn % 2]:
            if spec.key == "loss":  # only if it is that of every run in the chart
                units = {loss_unit(records[line.run]) for line in lines}
                spec = replace(spec, unit=units.pop() if len(units) == 1 else "")
            figure = run_plots.run_chart(spec, lines, places, x_key, log)
            newest = "; ".join(f"{line.run}: {line.newest:.6g}" for line in lines)
            chart(
                figure,
                f"run-{spec.key}",
                f"{spec.title} of {plural(len(lines), 'run')}, newest value {newest}",
            )
        drawn += 1
    if not drawn:
        st.info("No step has been logged yet.")
        return
    notes = ["Measured."]
    if smoothing:
        notes.append(f"Pale: each logged step; strong: moving average of weight {smoothing:g}.")
    if has_end:
        notes.append("Square: the evaluation at the end.")
    st.caption(" ".join(notes))
    if len(chosen) == 1:
        (name,) = chosen
        expert_charts(records[name], rows[name][-200:], rows[name])
        _draw_languages(replace(records[name], metrics=rows[name]))


def _legend(rows: Sequence[TableRow]) -> str:
    """Return the lines of several runs with their names and numbers as an HTML table."""
    heads = ("", "run", "best bits per byte", "tokens/s", "MFU", "time", "status")
    lines = ["".join(f'<th scope="col">{head}</th>' for head in heads)]
    for place, row in enumerate(rows):
        color, dash = run_plots.line_style(place)
        color = theme.chart_colors(color) if theme.is_dark() else color
        cells = (
            f'<hr style="border-top-color:{color};border-top-style:{"solid" if dash == "solid" else "dashed"}">',
            f"{html.escape(row.title)}<br><small>{html.escape(row.details)}</small>",
            _best_and_last(row),
            "" if row.tokens_per_second is None else f"{row.tokens_per_second:,.0f}",
            "" if row.mfu is None else percent(row.mfu, 1),
            "" if row.seconds is None else elapsed(row.seconds),
            row.status,
        )
        lines.append("".join(f"<td>{cell}</td>" for cell in cells))
    body = "".join(f"<tr>{line}</tr>" for line in lines[1:])
    return f'<table class="runs-legend"><thead><tr>{lines[0]}</tr></thead><tbody>{body}</tbody></table>'


def _best_and_last(row: TableRow) -> str:
    """Return the lowest bits per byte and, if they are worse, the last ones below it, as HTML."""
    best = "" if row.bpb is None else f"{row.bpb:.4f}"
    end = "at the end" if row.status == "finished" else "newest"
    return f"{best}<br><small>{row.last_bpb:.4f} {end}</small>" if last_bpb_note(row) else best


def _draw_languages(record: RunRecord) -> None:
    """Draw the validation bits per byte of each language: the newest in a table, all as lines."""
    curves = record.language_series()
    if not curves:
        return
    title = "validation bits per byte by language"
    table, lines = st.columns((1, 3))
    with table:
        rows = [{"language": name, "bits per byte": y[-1]} for name, (_, y) in curves.items()]
        st.dataframe(rows, hide_index=True, width="stretch")
    with lines:
        chart(plotly_charts.labelled_lines(curves, "training tokens", title), "run-languages", title)


def _draw_samples(chosen: Mapping[str, FoundRun]) -> None:
    for name, run in chosen.items():
        record = file_cache.brief(run.path)
        texts = run_details.samples(record)
        between = "\n" if objective(record) else ""  # an answer is not the rest of the question's line
        if len(chosen) > 1:
            st.subheader(literal(name))
        if not texts:
            st.caption("There are no samples; they are generated when a run finishes.")
        for sample in texts:
            title = f"<small>{html.escape(sample.title)}</small>" if sample.title else ""
            prompt, generated = html.escape(sample.prompt), html.escape(sample.text)
            st.html(f'<div class="sample">{title}<b>{prompt}</b>{between}{generated}</div>')
            for title, other in sample.others.items():
                with st.expander("Before training" if title == "before" else "Reference answer"):
                    st.code(other, language=None, wrap_lines=True)
    st.caption("Bold: the prompt. The rest was generated at the end of the run.")


def _draw_options(chosen: Mapping[str, FoundRun]) -> None:
    """Draw the configuration, or with several runs the options in which they differ."""
    records = {name: file_cache.brief(run.path) for name, run in chosen.items()}
    differences = len(records) > 1 and not st.toggle("all options", key="all-options")
    rows = run_details.option_rows(records, differences)
    if not rows:
        st.info("The configuration is unknown." if len(records) == 1 else "The configurations are equal.")
        return
    height = min(720, 40 + 35 * len(rows))
    st.dataframe(rows, hide_index=True, width="stretch", height=height)
    if len(records) == 1:
        st.caption("Select a second run above: the table then shows only the options in which they differ.")
        machine = records[next(iter(records))].environment
        if not machine:
            st.caption("The machine is unknown: the run has no environment.json.")
            return
        st.subheader(f"Machine: {literal(machine_name(machine))}")
        facts = [{"fact": key, "value": value_text(value)} for key, value in flatten(machine).items()]
        st.dataframe(facts, hide_index=True, width="stretch")


def _draw_events(chosen: Mapping[str, FoundRun]) -> None:
    for name, run in chosen.items():
        if len(chosen) > 1:
            st.subheader(literal(name))
        events = file_cache.events(run.path)
        if not events:
            st.caption("No events were logged.")
            continue
        notable = run_details.notable(events)
        st.caption(
            f"{plural(len(events), 'line')} in events.log, {len(notable)} of them about trouble or resumes."
        )
        if notable:
            st.code("\n".join(notable[-20:]), language=None, wrap_lines=True)
        _log()(key=f"log-{name}", data={"text": "\n".join(events)})


@st.cache_resource(show_spinner=False)
def _log() -> Any:
    """Return the component that draws a log. Streamlit's own code blocks scroll with a mouse only."""
    return st.components.v2.component(
        "deskside_log",
        html='<pre class="log" tabindex="0" role="region" aria-label="events.log"></pre>',
        css=theme.read_asset("event_log.css"),
        js=theme.read_asset("event_log.js"),
    )
