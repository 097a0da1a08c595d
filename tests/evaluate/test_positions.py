"""Bits per byte by position: every token counts once, at its position in the row or in its document."""

import math
from typing import Any

import numpy as np
import pytest
import torch

from deskside.evaluate import positions
from deskside.evaluate.bpb import evaluate_dataset, evaluate_text
from deskside.evaluate.positions import PositionSums
from tests.evaluate.test_bpb import LENGTH, PackedDataset, Setting, setting

__all__ = ["setting"]


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(positions, "FIRST_EDGE", 4)


@pytest.mark.parametrize(
    ("length", "stops"),
    [(512, [512]), (1024, [1024]), (1025, [1024, 1025]), (16384, [1024, 2048, 4096, 8192, 16384])],
)
def test_buckets_double_up_to_the_row(length: int, stops: list[int]) -> None:
    sums = PositionSums(length)
    ones = torch.ones(2, length)
    sums.add(ones, ones * 3, ones > 0, None)
    found = sums.buckets()
    assert [bucket.stop for bucket in found] == stops and [b.start for b in found] == [0, *stops[:-1]]
    assert [b.tokens for b in found] == [2 * (b.stop - b.start) for b in found]
    assert all(b.bpb == pytest.approx(1 / 3 / math.log(2)) for b in found)


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize("masked", [True, False], ids=["documents", "rows"])
def test_dataset_by_position_equals_a_sum_by_hand(masked: bool, setting: Setting) -> None:
    dataset = PackedDataset(setting.data, "val", LENGTH)
    result = evaluate_dataset(setting.model, dataset, micro_rows=3, document_mask=masked)
    assert sum(b.tokens for b in result.by_position) == result.tokens
    assert sum(b.bytes for b in result.by_position) == result.bytes
    assert sum(b.nats for b in result.by_position) == pytest.approx(result.nats, rel=1e-9)
    rows = dataset.rows_by_number(np.arange(dataset.num_rows))
    places = rows.positions if masked else np.broadcast_to(np.arange(LENGTH), rows.positions.shape)
    sizes = np.where(rows.targets >= 0, dataset.token_bytes[np.maximum(rows.targets, 0)], 0)
    for bucket in result.by_position:
        inside = (places >= bucket.start) & (places < bucket.stop) & (sizes > 0)
        assert (bucket.tokens, bucket.bytes) == (inside.sum(), (sizes * inside).sum())


@pytest.mark.usefixtures("short")
def test_text_by_position(setting: Setting) -> None:
    arguments: dict[str, Any] = {"sequence_length": LENGTH, "batch_tokens": 256}
    texts = [("en", text) for text in setting.texts]
    result = evaluate_text(setting.model, setting.tokenizer, setting.end, texts, **arguments)
    assert [b.stop for b in result.by_position] == [4, 8, 16, LENGTH]
    assert sum(b.bytes for b in result.by_position) == result.bytes
    assert sum(b.nats for b in result.by_position) == pytest.approx(result.nats, rel=1e-6)
    short = evaluate_text(setting.model, setting.tokenizer, setting.end, [("en", "sea")], **arguments)
    assert short.by_position[0].stop == 4 and len(short.by_position) < 4
