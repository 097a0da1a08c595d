"""Overview page: the study at a glance, and drawings of what each technique does."""

from collections import Counter

import streamlit as st

from deskside.dashboard import file_cache, illustrations
from deskside.dashboard.components import chart, empty_state, problem_rows, sentence
from deskside.dashboard.sidebar import Context, StudySelection, literal
from deskside.study.results import Group, status_text
from deskside.utils.format import plural

QUERY_HEADS, HEAD_DIM, BATCH_ROWS = 16, 64, 16


def show(context: Context) -> None:
    """Draw the page."""
    if context.selection is None:
        empty_state(context)
    else:
        _draw_summary(context, context.selection)
    if problems := problem_rows(context):
        with st.expander(f"{plural(len(problems), 'directory')} could not be read completely"):
            st.dataframe(problems, hide_index=True, width="stretch")
    st.header("What each technique does")
    st.caption("Drawings, not measurements. The other tabs show what was measured.")
    first, second = st.columns(2)
    with first:
        _draw_heads()
        _draw_recomputation()
    with second:
        _draw_fp4()
        _draw_micro_batches()


def _draw_summary(context: Context, selection: StudySelection) -> None:
    live = file_cache.live_runs(context.scan.runs)
    studies = [path for path in context.scan.studies if file_cache.study(path) is not None]
    totals = {"studies": len(studies), "runs": len(context.scan.runs), "running now": len(live)}
    with st.container(horizontal=True):
        for label, count in totals.items():
            st.metric(label, f"{count:,}", width=150)
    results = selection.unfiltered
    st.header(literal(results.name))
    st.write(literal(results.question))
    if selection.folder is None:
        return
    trials = [trial for arm in results.arms for trial in arm.trials]
    counts = Counter(trial.status for trial in trials)
    ended = ", ".join(f"{count} {status_text(status)}" for status, count in counts.items())
    notes = [
        f"On {selection.card}; {plural(len(results.arms), 'arm')}, "
        f"{plural(len(results.seeds), 'seed')}; trials: {ended or 'none yet'}.",
        *(_group_text(group, len(results.groups)) for group in results.groups),
        *results.notes,
    ]
    if not results.complete:
        notes.append(f"It is not complete. Continue it: deskside study --resume --out {selection.folder}")
    st.markdown("\n".join(f"- {literal(line)}" for line in notes))


def _group_text(group: Group, group_count: int) -> str:
    text = f"{group.budget} per trial, based on {group.base}."
    return f"{group.heading}: {text}" if group_count > 1 else sentence(text.removesuffix("."))


def _draw_heads() -> None:
    st.subheader("Grouped-query attention")
    st.write(
        "Several query heads share one key-value head. Fewer keys and values are computed, and cached during "
        "generation; too few cost quality. MHA: one for each query head. MQA: one for all."
    )
    keys = st.select_slider("key-value heads", [16, 8, 4, 2, 1], value=4, key="overview-heads")
    chart(
        illustrations.heads(QUERY_HEADS, keys),
        "gqa",
        f"{QUERY_HEADS} query heads share {keys} key-value heads",
    )
    cache_bytes = 2 * keys * HEAD_DIM * 2  # a key and a value per head, two bytes per number
    st.caption(
        f"With heads of {HEAD_DIM} in BF16, a layer keeps {cache_bytes:,} bytes per token of text: "
        f"{keys / QUERY_HEADS:.0%} of what MHA keeps."
    )


def _draw_recomputation() -> None:
    st.subheader("Recomputation")
    st.write(
        "The backward pass needs what the forward pass computed. With recomputation, each block keeps only its "
        "input and is computed again in the backward pass: less memory for about a third more arithmetic."
    )
    chart(
        illustrations.recomputation(),
        "recomputation",
        f"{illustrations.BLOCKS} blocks: kept, memory peaks at {illustrations.BLOCKS} blocks; recomputed, at about two",
    )


def _draw_fp4() -> None:
    st.subheader("Four-bit products (NVFP4)")
    st.write(
        "A number is a sign and one of eight sizes: 0, 0.5, 1, 1.5, 2, 3, 4, 6. Sixteen adjacent values share one FP8 "
        "scale, and a tensor one more. Matrix products in FP4 are fast on cards that support them; elsewhere they are "
        "emulated, which shows their effect on quality but not their speed."
    )
    chart(
        illustrations.fp4(),
        "fp4",
        "sixteen values and the nearest FP4 value of each; the largest ones lie on the coarsest grid",
    )
    st.caption("Dotted lines: all values that FP4 has at this block's scale.")


def _draw_micro_batches() -> None:
    st.subheader("Micro-batches")
    st.write(
        "A step's batch goes through the model in passes whose gradients are summed. The result is that of one large "
        "pass; memory is that of a small one. The largest micro-batch that fits is usually the fastest."
    )
    micro = st.select_slider("rows per pass", [16, 8, 4, 2, 1], value=4, key="overview-micro")
    chart(
        illustrations.micro_batches(BATCH_ROWS, micro),
        "micro-batches",
        f"a batch of {BATCH_ROWS} rows in {BATCH_ROWS // micro} passes of {micro}",
    )
