"""The published rows are typed, complete where they say so, and agree with what their sources print."""

from collections import Counter
from typing import get_args

import pytest

from deskside.facts import measurements
from deskside.facts.gpus import gpus
from deskside.facts.measurements import published

ROWS = published()


def test_the_columns_hold_the_words_that_their_types_promise() -> None:
    names = {gpu.name for gpu in gpus()}
    for row in ROWS:
        assert row.precision in get_args(measurements.Precision)
        assert row.memory_kind in get_args(measurements.MemoryKind)
        assert row.complete in get_args(measurements.Complete)
        assert row.card == "" or row.card in names
        assert (row.peak_memory_bytes is None) == (row.memory_kind == "")
        assert row.source and row.framework and row.model and row.gpus >= 1


def test_what_is_complete_has_everything() -> None:
    for row in ROWS:
        if row.complete in ("speed", "both"):
            assert row.complete_for_speed, row
        if row.complete_for_memory:
            assert row.peak_memory_bytes and row.rows and row.sequence_length
            assert not row.rejected
    assert sum(row.complete_for_speed for row in ROWS) > 200
    assert sum(row.complete_for_memory for row in ROWS) > 10


def test_the_rejected_rows_are_kept_and_flagged() -> None:
    rejected = [(row.gpu, row.framework) for row in ROWS if row.rejected]
    assert rejected == [("A100-80", "academic-pretraining"), ("A100-80", "llm.c"), ("GB10", "NVIDIA blog")]
    assert not any(row.complete_for_speed or row.complete_for_memory for row in ROWS if row.rejected)


def test_bf16_utilisation_of_llmq_is_what_llmq_printed() -> None:
    """llmq prints its share of the speed of light: 6 N + 6 L d T against the BF16 peak with FP32 accumulation. So its
    printed share, its tokens/s, our FLOPs per token and our data sheet must agree.
    """
    checked = 0
    for row in ROWS:
        card = row.data_sheet()
        if not (
            row.framework.startswith("llmq") and row.precision == "bf16" and row.complete == "speed" and card
        ):
            continue
        assert row.flops_per_token and row.tokens_per_second_per_gpu and row.mfu_reported
        ours = row.flops_per_token * row.tokens_per_second_per_gpu / card.bf16_flops
        if "does not fit" in row.note:
            assert abs(ours - row.mfu_reported) > 0.05  # otherwise the note is wrong
        else:
            assert ours == pytest.approx(row.mfu_reported, abs=0.025), row
        checked += 1
    assert checked > 40


def test_known_rows() -> None:
    """Two rows that were checked against their source again, by hand."""
    by = {(row.framework, row.card, row.model, row.precision, row.gpus, row.rows): row for row in ROWS}
    row = by["llmq (C++/CUDA)", "RTX 4090", "Qwen2.5-7B", "bf16", 1, 16]
    assert row.tokens_per_second == 2777 and "e4m3" in row.note  # the page's own command line is wrong
    row = by["llmq (C++/CUDA)", "RTX 5060 Ti 16GB", "Qwen2.5-0.5B", "bf16", 1, 10]
    assert row.tokens_per_second == 13011 and row.mfu_reported == pytest.approx(0.85)


def test_every_class_of_card_has_rows() -> None:
    count = Counter(row.card for row in ROWS if row.complete_for_speed)
    for card in ("RTX 4090", "RTX 5090", "RTX 5060 Ti 16GB", "L40S", "A100 80GB SXM", "H100 SXM"):
        assert count[card] >= 8, card


def test_memory_is_in_bytes() -> None:
    """autoresearch's depth 8 on an H100: 45,060.2 MiB allocated."""
    row = next(row for row in ROWS if row.framework == "autoresearch" and row.complete_for_memory)
    assert row.peak_memory_bytes == round(45060.2 * 2**20) and row.memory_kind == "allocated"
    for row in ROWS:
        card = row.data_sheet()
        if row.peak_memory_bytes and card:
            assert row.peak_memory_bytes < card.memory_bytes, row


def test_no_run_is_faster_than_its_card_except_the_rejected_ones() -> None:
    """A run cannot exceed the measured matmul rate of its GPU, or the data sheet's if there is none, doubled for FP8.

    GeForce cards boost above the clock of their data sheet, so 10 % more is
    allowed. Other rejected rows have no speed.
    """
    judged = 0
    for row in ROWS:
        card, flops, speed = row.data_sheet(), row.flops_per_token, row.tokens_per_second_per_gpu
        if card is None or flops is None or speed is None or row.precision not in ("bf16", "fp8"):
            assert not row.rejected, row
            continue
        rate = card.measured_bf16_flops or card.bf16_flops
        limit = 1.10 * max(card.bf16_flops, rate) if card.geforce else rate
        limit *= 2 if row.precision == "fp8" else 1
        assert (flops * speed > limit) == row.rejected, row
        judged += 1
    assert judged > 200
