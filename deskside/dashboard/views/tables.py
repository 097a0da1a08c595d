"""Tables page of a study: tables that can be sorted, filtered and downloaded as CSV."""

import streamlit as st

from deskside.dashboard import tables
from deskside.dashboard.components import pick_group
from deskside.dashboard.notes import problem_rows
from deskside.dashboard.sidebar import Context, StudySelection
from deskside.report import study_text
from deskside.study.metrics import metric_named

MAX_STYLED_CELLS = 200_000  # a larger table is shown without number formats


def show(context: Context) -> None:
    """Draw the page."""
    selection = pick_group(context, allow_all=True)
    if selection is not None:
        _draw_tables(selection)
        _draw_interactions(selection)
    if problems := problem_rows(context):
        st.header("Directories that could not be read completely")
        st.dataframe(problems, hide_index=True, width="stretch")


def _draw_tables(selection: StudySelection) -> None:
    results = selection.results
    st.title("Tables")
    kind = st.radio(
        "rows", ["arms", "trials"], horizontal=True, key="tables-rows", label_visibility="collapsed"
    )
    frame = tables.display_arms(results) if kind == "arms" else tables.display_trials(results)
    formats = {column: form for column, form in tables.number_formats().items() if column in frame.columns}
    shown = frame.style.format(formats) if frame.size <= MAX_STYLED_CELLS else frame
    wide = {name: st.column_config.TextColumn(width="medium") for name in ("status", "why") if name in frame}
    height = min(640, 40 + 35 * max(1, len(frame)))
    st.dataframe(
        shown,
        hide_index=True,
        width="stretch",
        height=height,
        column_config=wide,
        placeholder=study_text.NOT_MEASURED,
    )
    st.caption(
        "Click on a heading to sort. Means over the finished trials, measured; the speed of an emulated arm is not "
        "that of hardware with its format. The files hold the arms shown here, with all digits and every interval."
    )
    stem = selection.folder.resolve().name
    files = (("arms", tables.arms(results)), ("trials", tables.trials(results)))
    for column, (name, table) in zip(st.columns(2), files, strict=True):
        label, data = f"{name.capitalize()} as CSV", table.to_csv(index=False)
        column.download_button(label, data, f"{stem}-{name}.csv", "text/csv", width="stretch")


def _draw_interactions(selection: StudySelection) -> None:
    if not selection.results.interactions:
        return
    st.header("Do the options act independently?")
    labels = {factor.name: factor.label for group in selection.results.groups for factor in group.factors}
    headings = {group.name: group.heading for group in selection.results.groups}
    rows = [
        {
            **({"group": headings.get(interaction.group, interaction.group)} if len(headings) > 1 else {}),
            "options": " and ".join(
                f"{labels.get(name, name)}: {interaction.levels.get(name, '')}"
                for name in (interaction.first, interaction.second)
            ),
            "in": metric_named(interaction.metric).label,
            "effect beyond the product of both": study_text.relative_text(
                interaction.effect, interaction.low, interaction.high, interaction.verdict
            ),
            "seeds": interaction.n,
        }
        for interaction in selection.results.interactions
    ]
    st.dataframe(rows, hide_index=True, width="stretch")
