"""Summary page of a study: the answer of each group, with its difference, its verdict and a chart."""

import shlex
from collections import Counter

import streamlit as st

from deskside.dashboard import study_charts, verdict_rows
from deskside.dashboard.components import chart, seeds_note, sentence
from deskside.dashboard.notes import empty_state, problem_rows
from deskside.dashboard.sidebar import Context, StudySelection, literal
from deskside.dashboard.verdict_rows import VerdictRow
from deskside.report.study_claims import claims_sentence
from deskside.study.metrics import Metric, metric_named
from deskside.study.narrative.findings import GOALS, findings_by_group, unfinished
from deskside.study.narrative.headline import Headline, Outcome, headlines
from deskside.study.results import NOT_ENDED, Group, Results, status_text
from deskside.utils.format import plural

# Outcome -> (kind of chip, its text).
CHIPS: dict[Outcome, tuple[str, str]] = {
    "shown": ("better", "shown"),
    "not shown": ("open", "not shown"),
    "one seed": ("open", "one seed"),
    "the same": ("open", "exactly the same"),
    "alone": ("open", "no comparison"),
}
# The meaning of the charts' marks: (kind of chip, text).
LEGEND = (
    ("better", "\u25cf shown to be better"),
    ("worse", "\u25c6 shown to be worse"),
    ("open", "\u25cb no difference shown"),
    ("open", "\u2715 one seed, no interval"),
)


def show(context: Context) -> None:
    """Draw the page."""
    selection = context.selection
    if selection is None or not selection.results.arms:
        empty_state(context)
    else:
        _draw_study(selection)
    if problems := problem_rows(context):
        with st.expander(f"{plural(len(problems), 'directory')} could not be read completely"):
            st.dataframe(problems, hide_index=True, width="stretch")


def _draw_study(selection: StudySelection) -> None:
    results = selection.results
    st.title(literal(results.name))
    st.write(literal(results.question))
    st.caption(literal(_state(selection)))
    if results.claims:
        st.write(literal(claims_sentence(selection.unfiltered)))
    if not any(arm.finished() for arm in results.arms):
        waiting = sum(trial.status in NOT_ENDED for arm in results.arms for trial in arm.trials)
        more = f"; {plural(waiting, 'trial')} to come" if waiting else ""
        st.info(f"Nothing to compare yet: no trial has finished{more}.")
    else:
        goal = st.segmented_control(
            "goal", list(GOALS), default="quality", required=True, key="summary-goal", persist_state="session"
        )
        verdict_rows.draw_legend(LEGEND)
        for group in results.groups:
            _draw_group(selection, group, metric_named(GOALS[goal]))
        with st.expander("all findings in words"):
            _draw_findings(results, goal)
    report = selection.folder / "report.html"
    if report.exists():
        name = f"{selection.folder.resolve().name}.html"
        st.download_button("Report (HTML)", report.read_bytes, name, "text/html", on_click="ignore")
    with st.expander("setup and notes"):
        notes = [*(_group_text(group, len(results.groups)) for group in results.groups), *results.notes]
        st.markdown("\n".join(f"- {literal(line)}" for line in notes))


def _state(selection: StudySelection) -> str:
    """Return the machine, the size and the state of the study in one line."""
    results = selection.unfiltered
    counts = Counter(trial.status for arm in results.arms for trial in arm.trials)
    parts = [
        selection.card,
        plural(len(results.arms), "arm"),
        plural(len(results.seeds), "seed"),
        "trials: " + (", ".join(f"{n} {status_text(status)}" for status, n in counts.items()) or "none yet"),
    ]
    if selection.hidden:
        parts.append(f"the filters hide {plural(selection.hidden, 'arm')}")
    if not results.complete:
        folder = shlex.quote(str(selection.folder))
        parts.append(f"not complete; continue it: deskside study {folder} --resume")
    return " · ".join(parts)


def _draw_group(selection: StudySelection, group: Group, metric: Metric) -> None:
    """Draw the answer of a group in one metric: a row for each baseline, and the differences of all arms."""
    only_group = selection.of_group(group.name)
    several = len(selection.unfiltered.groups) > 1
    budget = [f"{group.budget} per trial"] if group.budget else []
    with st.container(border=True):
        st.subheader(literal(group.heading if several else metric.label.capitalize()))
        st.caption(literal(" · ".join([metric.heading if several else metric.unit, *budget])))
        found = headlines(selection.results, group, metric)
        if not found:
            st.caption(f"{sentence(metric.label)} Not measured here.")
            return
        answer, differences = st.columns(2, gap="medium")
        with answer:
            verdict_rows.draw([_row(headline) for headline in found], f"best arms of {group.heading}")
            st.caption(seeds_note(only_group, metric.key))
        figure = study_charts.forest(only_group.results, metric.key)
        if figure is not None:
            figure.update_layout(height=figure.layout.height - 20, showlegend=False, margin={"t": 28})
            name = f"summary-{group.name}-{metric.key}"
            with differences:
                chart(figure, name, f"differences of {group.heading} in {metric.label}")


def _row(headline: Headline) -> VerdictRow:
    kind, verdict = CHIPS[headline.outcome]
    return VerdictRow(
        kind,
        verdict,
        f"{headline.best.label}: {headline.value}",
        sentence(headline.difference or headline.reason),
        (
            ("why", sentence(headline.reason)),
            ("baseline", headline.baseline.label),
            ("may be as good", "; ".join(arm.label for arm in headline.undecided)),
        ),
    )


def _draw_findings(results: Results, goal: str) -> None:
    findings = findings_by_group(results, goal)
    for group, sentences in findings:
        if len(findings) > 1:
            st.markdown(f"#### {literal(group.heading)}")
        st.markdown("\n".join(f"- {literal(line)}" for line in sentences))
    for line in unfinished(results):
        st.caption(literal(line))
    st.caption(
        "Findings hold for the card, model sizes and budget of their study; with others, results may differ."
    )


def _group_text(group: Group, group_count: int) -> str:
    text = f"{group.budget} per trial, based on {group.base}."
    return f"{group.heading}: {text}" if group_count > 1 else sentence(text.removesuffix("."))
