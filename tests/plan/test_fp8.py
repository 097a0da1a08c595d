"""The published gain of FP8: the pairs as they were published, and nothing where there are none."""

import pytest

from deskside.facts.gpus import find
from deskside.plan.fp8 import gain


@pytest.mark.parametrize(
    ("card", "params", "speed"),
    [
        ("rtx4090", 494e6, 47645 / 39845),  # llmq benchmarks/4090x1.md
        ("rtx4090", 1543.6e6, 20333 / 14070),
        ("rtx5090", 112.1e6, 191 / 165),  # yxanul_0.6B EXPERIMENTS_FP8.md
    ],
)
def test_the_published_pairs(card: str, params: float, speed: float) -> None:
    found = gain(find(card), params)
    assert found is not None
    assert found.speed == pytest.approx(speed, rel=0.01)
    assert found.source.startswith("published")


def test_between_sizes_it_grows_and_outside_it_stays() -> None:
    card = find("rtx4090")
    speeds = [gain(card, size).speed for size in (1e8, 4.94e8, 9e8, 1.5436e9)]  # type: ignore[union-attr]
    assert speeds[0] == speeds[1] < speeds[2] < speeds[3]


def test_a_card_without_fp8_has_none_and_a_relative_is_named() -> None:
    assert gain(find("rtx3090"), 1e9) is None
    relative = gain(find("rtx4080"), 1e9)
    assert relative is not None and "4090" in relative.source
