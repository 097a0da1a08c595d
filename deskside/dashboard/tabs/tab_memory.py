"""Memory tab: the peak of every arm, and the difference from its baseline."""

import streamlit as st

from deskside.dashboard import plotly_charts
from deskside.dashboard.components import chart, memory_limit, metric_charts, sentence, usable
from deskside.dashboard.sidebar import Context
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
    limit = memory_limit(selection)
    note = (
        f"{sentence(limit[1]) if limit else ''} Where the micro-batch is fitted to the memory, a smaller model may use "
        "as much as a larger one. "
    )
    metric_charts(selection, CHOICES[choice], limit, note, beside=("micro_tokens",))
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
