"""Elements that several pages share: charts and the group selector."""

from collections.abc import Mapping, Sequence
from typing import Any

import streamlit as st

from deskside.dashboard import plotly_charts, study_charts, tables, theme
from deskside.dashboard.notes import empty_state
from deskside.dashboard.sidebar import Context, StudySelection, all_groups_key, group_key, literal
from deskside.report import study_text
from deskside.run.expert_load import layer_with_differences, load_by_language, newest_load, relative
from deskside.run.record import RunRecord, number
from deskside.study.metrics import metric_named
from deskside.utils.format import plural


def chart(figure: plotly_charts.go.Figure, key: str, alt: str) -> None:
    """Draw a chart. Screen readers read `alt`. The mode bar saves the chart as a PNG file named `key`."""
    image = {"format": "png", "scale": 2, "filename": key}
    for update in (figure.update_xaxes, figure.update_yaxes):  # a title that is set replaces its font
        update(title_font={"color": plotly_charts.TEXT_COLOR})
    drawn = theme.chart_colors(figure.to_plotly_json()) if theme.is_dark() else figure
    st.plotly_chart(
        drawn, key=f"chart-{key}", config={**plotly_charts.MODE_BAR, "toImageButtonOptions": image}, alt=alt
    )


def pick_group(context: Context, allow_all: bool = False) -> StudySelection | None:
    """Draw a page's heading and return the selection for one group. If there is none, draw a note and return None.

    Groups of a study have different budgets, batches and baselines, so a page shows one group at a time. The group is
    selected in the page and not in the sidebar, because a phone hides the sidebar. With `allow_all`, the page can also
    show all groups together.
    """
    selection = context.selection
    if selection is None or not selection.results.arms:
        empty_state(context)
        return None
    groups = selection.results.groups
    if len(groups) == 1:
        selection = selection.of_group(groups[0].name)
    if len(groups) < 2 or (allow_all and st.toggle("all groups", key=all_groups_key(selection.name))):
        _draw_heading(selection)
        return selection
    headings = {group.name: group.heading for group in groups}
    name = st.selectbox(
        f"group, one of {len(groups)}",
        list(headings),
        key=group_key(selection.name),
        format_func=headings.__getitem__,
    )
    group_selection = selection.of_group(name)
    _draw_heading(group_selection)
    return group_selection


def _draw_heading(selection: StudySelection) -> None:
    """Draw the study's name, machine, budget and state."""
    results = selection.results
    parts = [f"**{literal(results.name)}** on {literal(selection.card)}"]
    if len(results.groups) == 1 and results.groups[0].budget:
        parts.append(f"{literal(results.groups[0].budget)} per trial")
    if selection.hidden:
        parts.append(f"{len(results.arms)} of {len(selection.unfiltered.arms)} arms shown")
    if not results.complete:
        parts.append("not complete")
    if (baseline := _baseline_levels(selection)) is not None:
        parts.append(f"baseline: {literal(baseline)}")
    st.caption(" · ".join(parts))


def _baseline_levels(selection: StudySelection) -> str | None:
    """Return the factor levels of a single group's baseline if its label is only "baseline", else None."""
    groups, arms = selection.unfiltered.groups, selection.unfiltered.arms
    baseline = next((arm for arm in arms if arm.label == "baseline"), None)
    if len(groups) != 1 or baseline is None:
        return None
    levels = [f"{f.label} {baseline.levels[f.name]}" for f in groups[0].factors if f.name in baseline.levels]
    return ", ".join(levels) or None


def memory_limit(selection: StudySelection) -> tuple[float, str] | None:
    """Return the memory of the card in GiB and a label for it, or None if the study did not record it."""
    gpu = selection.results.machine.get("gpu")
    size = number(gpu.get("memory_gib")) if isinstance(gpu, dict) else None
    return None if size is None else (size, f"the card: {size:.0f} GiB")


def metric_charts(
    selection: StudySelection,
    key: str,
    limit: tuple[float, str] | None = None,
    note: str = "",
    table_metrics: tuple[str, ...] = (),
) -> None:
    """Draw a metric of every arm, and the differences from the baselines as a chart and a table.

    `limit` is the position and label of a reference line, `note` is added to the caption, and `table_metrics` are more
    metrics for the table.
    """
    results, metric = selection.results, metric_named(key)
    figure = study_charts.bars(results, key, limit)
    if figure is None:
        st.info(f"{metric.label}: {study_text.NOT_MEASURED}. {sentence(metric.about)}")
    else:
        chart(figure, key, f"{metric.heading} of {plural(len(results.arms), 'arm')}")
        missing = tables.not_measured(results.arms, key)
        st.caption(f"{seeds_note(selection, key)} {sentence(metric.about)} {note}{missing}")
    figure = study_charts.forest(results, key)
    if figure is not None:
        st.header("Against the baseline")
        chart(figure, f"{key}-difference", f"relative differences in {metric.label}, with intervals")
        st.dataframe(tables.differences(results, (key, *table_metrics)), hide_index=True, width="stretch")


def expert_charts(
    record: RunRecord, newest: Sequence[Mapping[str, Any]], curve: Sequence[Mapping[str, Any]]
) -> None:
    """Draw the load of a run's experts by layer and by language, and its imbalance; nothing without experts.

    newest: the last rows of metrics.jsonl. curve: rows from which the imbalance over time is drawn.
    """
    load = newest_load(newest)
    if load is None:
        return
    key = f"{record.path.name}-{abs(hash(str(record.path)))}"  # two runs may have the same name
    left, right = st.columns(2)
    with left:
        layers = [str(layer) for layer in range(len(load.load_LE))]
        figure = plotly_charts.expert_heat_map(load.relative_LE, layers, "layer")
        chart(figure, f"experts-{key}", f"load of the experts of {record.name} by layer")
        st.caption(
            f"Load of each expert at step {load.step:,} divided by the even share: 1 is even; "
            f"{load.dropped_text}. Measured."
        )
    with right:
        points = [
            (step, value)
            for row in curve
            if (step := number(row.get("step"))) is not None
            and (value := number(row.get("load_imbalance"))) is not None
        ]
        if points:
            steps, values = zip(*points, strict=True)
            figure = plotly_charts.line(steps, values, "step", "load imbalance")
            chart(figure, f"imbalance-{key}", f"load imbalance of {record.name}")
            st.caption(
                "The largest load of a layer divided by the even share, averaged over the layers; 1 is even."
            )
    by_language = load_by_language(record)
    if len(by_language) > 1:
        layer = layer_with_differences(by_language)
        cells = relative([loads[layer] for loads in by_language.values()])
        figure = plotly_charts.expert_heat_map(cells, list(by_language), "language")
        chart(figure, f"expert-languages-{key}", f"load of the experts of {record.name} by language")
        st.caption(
            f"Load by language of the validation text in layer {layer}, in which the languages differ most. Measured."
        )


def seeds_note(selection: StudySelection, key: str) -> str:
    """Return a sentence about the number of seeds behind the intervals of a chart."""
    seeds = study_text.seeds_text(selection.results.arms, key)
    has_interval = "no " not in seeds  # not "no finished trial" or "1 seed, so no interval"
    return f"Measured; means with their intervals, {seeds}." if has_interval else f"Measured, {seeds}."


def sentence(text: str) -> str:
    """Return the text with a capital letter and a full stop; an empty text stays empty."""
    return f"{text[:1].upper()}{text[1:]}." if text else ""
