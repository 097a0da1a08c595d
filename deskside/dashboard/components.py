"""Elements that several tabs share: charts, empty states, the picker of a group, the list of unreadable directories."""

import streamlit as st

from deskside.dashboard import file_cache, plotly_charts, tables
from deskside.dashboard.sidebar import Context, StudySelection, all_groups_key, group_key, literal
from deskside.report import study_text
from deskside.run.record import number
from deskside.study.stats.metrics import metric_named

COMMANDS = """deskside go --preset demo --hours 0.05     # three minutes on a CPU, from bundled text
deskside study matrix16-quick              # sixteen arms: GQA and FP4 at four sizes, on a CPU
deskside train 124m --data.path DIR        # one run"""


def chart(figure: plotly_charts.go.Figure, key: str, alt: str) -> None:
    """Draw a chart. `alt` is read by screen readers; the mode bar saves the chart as PNG under the name `key`."""
    image = {"format": "png", "scale": 2, "filename": key}
    st.plotly_chart(
        figure, key=f"chart-{key}", config={**plotly_charts.MODE_BAR, "toImageButtonOptions": image}, alt=alt
    )


def empty_state(context: Context) -> None:
    """Say why a tab is empty: the filters leave no arm, or there is no study and no run yet."""
    if context.selection is not None:
        st.info("The filters in the sidebar leave no arm. Clear one of them.")
        return
    st.info(f"There is no study and no run below `{context.root}` yet. Each of these commands makes one:")
    st.code(COMMANDS, language="bash")
    st.caption("This page finds new runs while they train. For another directory: deskside dashboard DIR")


def usable(context: Context, groups: bool = False) -> StudySelection | None:
    """Draw a tab's heading and return the selection to show, or say why there is none and return None.

    Groups of a study have different budgets, batches and baselines, so a tab shows one group at a time. The picker is
    in the page and not in the sidebar, because a phone hides the sidebar. With `groups` the tab can show all groups
    together, and does so at first.
    """
    whole = context.selection
    if whole is None or not whole.results.arms:
        empty_state(context)
        return None
    known = whole.whole.groups
    if len(known) < 2 or (groups and st.toggle("all groups", key=all_groups_key(whole.name))):
        _heading(whole)
        return whole
    titles = {group.name: group.heading for group in known}
    name = st.selectbox(
        f"group, one of {len(known)}", list(titles), key=group_key(whole.name), format_func=titles.__getitem__
    )
    one = whole.of_group(name)
    _heading(one)
    if not one.results.arms:
        st.info("The filters leave no arm of this group. Clear one of them, or pick another group.")
        return None
    return one


def _heading(selection: StudySelection) -> None:
    """Draw the study's name, machine, budget and state."""
    results = selection.results
    parts = [f"**{literal(results.name)}** on {literal(selection.card)}"]
    if len(results.groups) == 1 and results.groups[0].budget:
        parts.append(f"{literal(results.groups[0].budget)} per trial")
    if selection.hidden:
        parts.append(f"{len(results.arms)} of {len(selection.whole.arms)} arms shown")
    if selection.folder is not None and not results.complete:
        parts.append("not complete")
    if (base := _baseline(selection)) is not None:
        parts.append(f"baseline: {literal(base)}")
    st.caption(" · ".join(parts))


def _baseline(selection: StudySelection) -> str | None:
    """Return the factor levels of an arm that is labelled only "baseline"."""
    groups, arms = selection.whole.groups, selection.whole.arms
    base = next((arm for arm in arms if arm.label == "baseline"), None)
    if len(groups) != 1 or base is None:
        return None
    levels = [f"{f.label} {base.levels[f.name]}" for f in groups[0].factors if f.name in base.levels]
    return ", ".join(levels) or None


def problems(context: Context) -> list[dict[str, str]]:
    """Return a table row for every directory that could not be read completely."""
    rows = [(str(path), reason) for path, reason in context.found.problems]
    for path in context.found.studies:
        study = file_cache.study(path)
        if study is not None and study.problem:
            rows.append((str(path), study.problem))
    for run in context.found.own_runs:
        if reasons := file_cache.brief(run.path).problems:
            rows.append((str(run.path), "; ".join(reasons)))
    return [{"directory": path.removeprefix(f"{context.root}/"), "why": reason} for path, reason in rows]


def memory_limit(selection: StudySelection) -> tuple[float, str] | None:
    """Return the card's memory in GiB with its label, if the study recorded it."""
    gpu = selection.results.machine.get("gpu")
    size = number(gpu.get("memory_gib")) if isinstance(gpu, dict) else None
    return None if size is None else (size, f"the card: {size:.0f} GiB")


def metric_charts(
    selection: StudySelection,
    key: str,
    limit: tuple[float, str] | None = None,
    note: str = "",
    beside: tuple[str, ...] = (),
) -> None:
    """Draw a metric of every arm, and the differences from the baselines as a chart and a table.

    `limit` is a line to compare with and its label, `note` is added to the caption, and `beside` are more metrics of
    the table.
    """
    results, metric = selection.results, metric_named(key)
    figure = plotly_charts.bars(results.arms, key, limit)
    if figure is None:
        st.info(f"{metric.label}: {study_text.NOT_MEASURED}. {sentence(metric.about)}")
    else:
        chart(figure, key, f"{metric.heading} of {len(results.arms)} arms")
        missing = tables.not_measured(results.arms, key)
        st.caption(f"{seeds_note(selection, key)} {sentence(metric.about)} {note}{missing}")
    figure = plotly_charts.forest(results, key)
    if figure is not None:
        st.header("Against the baseline")
        chart(figure, f"{key}-difference", f"relative differences in {metric.label}, with intervals")
        st.dataframe(tables.differences(results, (key, *beside)), hide_index=True, width="stretch")


def seeds_note(selection: StudySelection, key: str) -> str:
    """Return a sentence about how many seeds the intervals of a chart rest on."""
    if selection.folder is None:
        return "One run each, so no interval."
    seeds = study_text.seeds_text(selection.results.arms, key)
    return f"Measured, {seeds}." if "no " in seeds else f"Measured; means with their intervals, {seeds}."


def sentence(text: str) -> str:
    """Return the text with a capital letter and a full stop; an empty text stays empty."""
    return f"{text[:1].upper()}{text[1:]}." if text else ""
