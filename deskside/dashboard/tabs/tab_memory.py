"""Memory tab: the peak of every arm, and the difference from its baseline."""

import streamlit as st

from deskside.dashboard import plotly_charts, tables
from deskside.dashboard.components import chart, memory_limit, seeds_note, sentence, usable
from deskside.dashboard.sidebar import Context
from deskside.report import study_text
from deskside.study.results import Results
from deskside.study.stats.metrics import metric_named

CHOICES = {"peak, allocated": "peak_memory_gib", "held by the allocator": "peak_reserved_gib"}


def show(context: Context) -> None:
    """Draw the tab."""
    selection = usable(context)
    if selection is None:
        return
    results = selection.results
    st.header("Peak memory")
    choice = st.radio(
        "memory", list(CHOICES), horizontal=True, key="memory-kind", label_visibility="collapsed"
    )
    key = CHOICES[choice]
    metric = metric_named(key)
    limit = memory_limit(selection)
    figure = plotly_charts.bars(results.arms, key, limit)
    if figure is None:
        st.info(f"{metric.label}: {study_text.NOT_MEASURED}. {sentence(metric.about)}")
    else:
        chart(figure, key, f"{metric.heading} of {len(results.arms)} arms")
        st.caption(
            f"{seeds_note(selection, key)} {sentence(metric.about)} {sentence(limit[1]) if limit else ''} "
            f"Where the micro-batch is fitted to the memory, a smaller model may use as much as a larger one. "
            f"{tables.not_measured(results.arms, key)}"
        )
    figure = plotly_charts.forest(results, key)
    if figure is not None:
        st.header("Against the baseline")
        chart(
            figure,
            f"{key}-difference",
            f"relative differences in {metric.label}, with intervals",
        )
        st.dataframe(tables.differences(results, (key, "micro_tokens")), hide_index=True, width="stretch")
    _micro_batches(results)


def _micro_batches(results: Results) -> None:
    """Draw bars if the arms differ, else one number."""
    known = {found.mean for arm in results.arms if (found := arm.estimate("micro_tokens")) is not None}
    if not known:
        return
    st.header("Micro-batch")
    if len(known) == 1:
        size = metric_named("micro_tokens").text(known.pop())
        st.write(f"{size} tokens per forward pass in every arm.")
        return
    figure = plotly_charts.bars(results.arms, "micro_tokens")
    if figure is not None:
        chart(figure, "micro-batch", "tokens per forward pass of each arm")
