"""Memory: the peak of every arm, and what each option saves against its baseline."""

import streamlit as st

from deskside.dashboard import charts, tables
from deskside.dashboard.cached import Context
from deskside.dashboard.common import chart, memory_limit, seeds_told, sentence, usable
from deskside.report import study_words as words
from deskside.study.results import Results

CHOICES = {"peak, allocated": "peak_memory_gib", "held by the allocator": "peak_reserved_gib"}


def show(context: Context) -> None:
    """The tab."""
    selection = usable(context)
    if selection is None:
        return
    results = selection.results
    st.header("Peak memory")
    choice = st.radio(
        "memory", list(CHOICES), horizontal=True, key="memory-kind", label_visibility="collapsed"
    )
    key = CHOICES[choice]
    limit = memory_limit(selection)
    figure = charts.bars(results, key, limit)
    if figure is None:
        st.info(f"{words.metric(key).label}: {words.NOT_MEASURED}. {sentence(words.metric(key).about)}")
    else:
        chart(figure, key, f"{words.unit(words.metric(key))} of {len(results.arms)} arms")
        st.caption(
            f"{seeds_told(selection, key)} {sentence(words.metric(key).about)} {sentence(limit[1]) if limit else ''} "
            f"Where the micro-batch is fitted to the memory, a smaller model may use as much as a larger one. "
            f"{tables.not_measured(results.arms, key)}"
        )
    figure = charts.forest(results, key)
    if figure is not None:
        st.header("Against the baseline")
        chart(
            figure, f"{key}-difference", f"relative differences in {words.metric(key).label}, with intervals"
        )
        st.dataframe(tables.differences(results, (key, "micro_tokens")), hide_index=True, width="stretch")
    _micro_batches(results)


def _micro_batches(results: Results) -> None:
    """Bars where arms differ in it; one number otherwise."""
    known = {found.mean for arm in results.arms if (found := words.known(arm, "micro_tokens")) is not None}
    if not known:
        return
    st.header("Micro-batch")
    if len(known) == 1:
        size = words.value(words.metric("micro_tokens"), known.pop())
        st.write(f"{size} tokens per forward pass in every arm.")
        return
    figure = charts.bars(results, "micro_tokens")
    if figure is not None:
        chart(figure, "micro-batch", "tokens per forward pass of each arm")
