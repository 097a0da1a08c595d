"""Insights page: findings for the selected card and goal, in sentences with their intervals."""

import streamlit as st

from deskside.dashboard import file_cache
from deskside.dashboard.components import empty_state
from deskside.dashboard.sidebar import Context, literal
from deskside.run.record import machine_name
from deskside.study.narrative.findings import GOALS, findings_by_group, unfinished
from deskside.study.results import NOT_ENDED, Results
from deskside.utils.format import plural


def show(context: Context) -> None:
    """Draw the page."""
    if context.selection is None:
        empty_state(context)
        return
    studies = file_cache.readable_studies(context.scan)
    st.header("What the data says")
    if not studies:
        st.info(
            "Single runs do not show which option made a difference. A study compares: "
            "`deskside study matrix16-quick` takes three minutes on a CPU."
        )
        return
    first, second = st.columns(2)
    cards = list(dict.fromkeys(machine_name(results.machine) for results in studies.values()))
    selected_card = context.selection.card
    card = first.selectbox(
        "card", cards, index=cards.index(selected_card) if selected_card in cards else 0, key="insights-card"
    )
    goal = second.selectbox("goal", list(GOALS), key="insights-goal")
    selected = context.selection.folder
    for path, results in studies.items():
        if machine_name(results.machine) == card:
            is_selected = path == selected
            _draw_study(
                context.selection.results if is_selected else results,
                is_selected and context.selection.hidden > 0,
                goal,
            )
    st.caption(
        "Findings hold for the card, model sizes and budget of their study; with others, results may differ."
    )


def _draw_study(results: Results, filtered: bool, goal: str) -> None:
    st.subheader(literal(results.name))
    st.caption(
        literal(results.question) + (" The filters in the sidebar hide some arms." if filtered else "")
    )
    findings = findings_by_group(results, goal)
    for group, sentences in findings:
        if len(findings) > 1:
            st.markdown(f"#### {literal(group.heading)}")
        st.markdown("\n".join(f"- {literal(line)}" for line in sentences))
    if findings:
        for line in unfinished(results):
            st.caption(literal(line))
    else:
        waiting = sum(trial.status in NOT_ENDED for arm in results.arms for trial in arm.trials)
        more = f"; {plural(waiting, 'trial')} to come" if waiting else ""
        st.write(f"Nothing to compare yet: no trial has finished{more}.")
