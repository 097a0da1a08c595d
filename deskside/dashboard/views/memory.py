"""Memory page: the peak of every arm, and the difference from its baseline."""

import streamlit as st

from deskside.dashboard import plotly_charts
from deskside.dashboard.components import chart, memory_limit, metric_charts, pick_group, sentence
from deskside.dashboard.sidebar import Context
from deskside.study.results import Results
from deskside.study.stats.metrics import metric_named

MEMORY_METRICS = {"peak, allocated": "peak_memory_gib", "held by the allocator": "peak_reserved_gib"}


def show(context: Context) -> None:
    """Draw the page."""
    selection = pick_group(context)
    if selection is None:
        return
    results = selection.results
    st.header("Peak memory")
    choice = st.radio(
        "memory", list(MEMORY_METRICS), horizontal=True, key="memory-kind", label_visibility="collapsed"
    )
    limit = memory_limit(selection)
    note = (
        f"{sentence(limit[1]) if limit else ''} Where the micro-batch is fitted to the memory, a smaller model may use "
        "as much as a larger one. "
    )
    metric_charts(selection, MEMORY_METRICS[choice], limit, note, table_metrics=("micro_tokens",))
    _draw_micro_batches(results)


def _draw_micro_batches(results: Results) -> None:
    """Draw the micro-batch of each arm as bars, or write one number if all arms have the same."""
    sizes = {estimate.mean for arm in results.arms if (estimate := arm.estimate("micro_tokens")) is not None}
    if not sizes:
        return
    st.header("Micro-batch")
    if len(sizes) == 1:
        size = metric_named("micro_tokens").text(sizes.pop())
        st.write(f"{size} tokens per forward pass in every measured arm.")
        return
    figure = plotly_charts.bars(results.arms, "micro_tokens")
    if figure is not None:
        chart(figure, "micro-batch", "tokens per forward pass of each arm")
