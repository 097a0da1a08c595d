"""Memory: the peak of every arm, and what each option saves against its baseline."""

import streamlit as st

from deskside.dashboard import charts, tables
from deskside.dashboard.cached import Context
from deskside.dashboard.common import chart, memory_limit, seeds_told, sentence, usable
from deskside.report import study_words as words

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
    figure = charts.bars(results, key, memory_limit(selection))
    if figure is None:
        st.info(f"{words.metric(key).label}: {words.NOT_MEASURED}. {sentence(words.metric(key).about)}")
    else:
        chart(figure, key, f"{words.unit(words.metric(key))} of {len(results.arms)} arms")
        st.caption(
            f"{seeds_told(selection, key)} {sentence(words.metric(key).about)} The micro-batch is fitted to the "
            f"memory, so a smaller model may use as much as a larger one. {tables.not_measured(results.arms, key)}"
        )
    figure = charts.forest(results, key)
    if figure is not None:
        st.header("Against the baseline")
        chart(
            figure, f"{key}-difference", f"relative differences in {words.metric(key).label}, with intervals"
        )
        st.dataframe(tables.differences(results, (key, "micro_tokens")), hide_index=True, width="stretch")
    figure = charts.bars(results, "micro_tokens")
    if figure is not None:
        st.header("Micro-batch that was chosen")
        chart(figure, "micro-batch", "tokens per forward pass of each arm")
