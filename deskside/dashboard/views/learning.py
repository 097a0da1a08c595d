"""Learning page: drawings of what each technique does. None of their numbers are measured."""

import streamlit as st

from deskside.dashboard import illustrations
from deskside.dashboard.components import chart
from deskside.dashboard.sidebar import Context
from deskside.utils.format import percent

QUERY_HEADS, HEAD_DIM, BATCH_ROWS = 16, 64, 16


def show(context: Context) -> None:
    """Draw the page. It is the same for every directory."""
    st.title("What each technique does")
    st.caption("Drawings, not measurements. The pages of a study show what was measured.")
    first, second = st.columns(2, gap="large")
    with first:
        _draw_heads()
        _draw_recomputation()
    with second:
        _draw_fp4()
        _draw_micro_batches()


def _draw_heads() -> None:
    st.subheader("Grouped-query attention")
    st.write(
        "Several query heads share one key-value head. Fewer keys and values are computed, and cached during "
        "generation; too few cost quality. MHA: one for each query head. MQA: one for all."
    )
    keys = st.select_slider("key-value heads", [16, 8, 4, 2, 1], value=4, key="learning-heads")
    chart(
        illustrations.heads(QUERY_HEADS, keys),
        "gqa",
        f"{QUERY_HEADS} query heads share {keys} key-value heads",
    )
    cache_bytes = 2 * keys * HEAD_DIM * 2  # a key and a value per head, two bytes per number
    st.caption(
        f"With heads of {HEAD_DIM} in BF16, a layer keeps {cache_bytes:,} bytes per token of text: "
        f"{percent(keys / QUERY_HEADS, 0)} of what MHA keeps."
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
    micro = st.select_slider("rows per pass", [16, 8, 4, 2, 1], value=4, key="learning-micro")
    chart(
        illustrations.micro_batches(BATCH_ROWS, micro),
        "micro-batches",
        f"a batch of {BATCH_ROWS} rows in {BATCH_ROWS // micro} passes of {micro}",
    )
