"""The drawings of the learning page are correct."""

import pytest

from deskside.dashboard import illustrations, theme


def test_the_drawn_fp4_values_are_on_the_grid() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    assert [float(v) for v in ml_dtypes.finfo(ml_dtypes.float4_e2m1fn).max.reshape(1)] == [
        illustrations.E2M1[-1]
    ]
    codes = __import__("numpy").arange(8, dtype="uint8").view(ml_dtypes.float4_e2m1fn)
    assert tuple(float(code) for code in codes) == illustrations.E2M1


def test_the_drawn_fp4_values_are_rounded_as_fp4_rounds() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    scale = max(abs(value) for value in illustrations.SAMPLE_VALUES) / illustrations.E2M1[-1]
    kept = illustrations.fp4().data[2].y
    rounded = [float(ml_dtypes.float4_e2m1fn(value / scale)) * scale for value in illustrations.SAMPLE_VALUES]
    assert kept == pytest.approx(rounded)


def test_recomputation_as_drawn_needs_less_memory() -> None:
    kept, again = illustrations.recomputation().data
    assert max(again.y) < max(kept.y) / 3
    assert max(kept.y) == illustrations.BLOCKS


@pytest.mark.parametrize(("rows", "micro"), [(16, 16), (16, 4), (16, 1)])
def test_micro_batches_are_one_box_per_pass_and_the_update(rows: int, micro: int) -> None:
    passes, update = illustrations.micro_batches(rows, micro).data
    assert list(passes.y) == [micro] * (rows // micro) and list(update.y) == [rows]


@pytest.mark.parametrize("keys", [16, 4, 1])
def test_every_query_head_has_one_line(keys: int) -> None:
    lines, queries, shared = illustrations.heads(16, keys).data
    assert lines.x.count(None) == 16 and len(queries.x) == 16 and len(shared.x) == keys


def test_letters_are_dark_in_both_themes() -> None:
    _, *marks = illustrations.heads(16, 4).data
    update = illustrations.micro_batches(16, 4).layout.annotations[0]
    for color in [*(mark.textfont.color for mark in marks), update.font.color]:
        assert theme.chart_colors(color) == color
