"""The chips in a study's report agree with its comparisons, and are legible on light and dark pages."""

from dataclasses import replace

import pytest

from deskside.report.colors import CHIP_COLORS, PAGE_COLORS
from deskside.report.document import Chip
from deskside.report.study_verdicts import arms_table, best_shown, best_table, comparison_chip
from deskside.study.metrics import PRIMARY, metric_named
from deskside.study.results import Comparison
from deskside.study.stats.compare import compare
from tests.study import made

RESULTS = compare(made.results())


def luminance(color: str) -> float:
    """Return the relative luminance of #rrggbb as defined by WCAG 2.2."""
    parts = [int(color[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("scheme", [0, 1])
def test_texts_have_contrast(scheme: int) -> None:
    pairs = [CHIP_COLORS[kind][scheme] for kind in CHIP_COLORS]
    backgrounds = [PAGE_COLORS[name][scheme] for name in ("page", "box")]
    pairs += [(PAGE_COLORS[name][scheme], back) for name in ("text", "quiet", "link") for back in backgrounds]
    assert all(contrast(text, background) >= 4.5 for text, background in pairs)


def test_chips_follow_the_comparisons() -> None:
    rows = {str(row[0]): row for row in arms_table(RESULTS, RESULTS.arms).rows}
    assert len(rows) == 2 + 3  # two baselines; the three others have the same short labels in both sizes
    for arm in RESULTS.arms:
        for key in PRIMARY:
            comparison, chip = arm.comparison(key), comparison_chip(arm, key)
            if comparison is None:
                assert chip.kind == "open"
            elif comparison.verdict in ("lower", "higher"):
                good = (comparison.verdict == "lower") == (metric_named(key).better == "lower")
                assert chip.kind == ("better" if good else "worse") and chip.text.endswith(chip.kind)
            else:
                assert chip.kind in ("open", "better", "worse") and comparison.verdict != "too few seeds"


def test_the_best_is_the_largest_improvement_that_is_shown() -> None:
    found = best_shown(RESULTS.arms, "tokens_per_second")
    assert found is not None and found[0].levels["gqa"] == "on" and found[0].levels["fp4"] == "off"
    assert best_shown(RESULTS.arms, "val_bpb") is None  # GQA and FP4 make it worse
    (row,) = best_table(RESULTS).rows
    assert [cell.text for cell in row[1:2] if isinstance(cell, Chip)] == ["not shown"]
    one_seed = compare(made.results(seeds=1))
    assert best_shown(one_seed.arms, "tokens_per_second") is None


def test_an_interval_without_zero_that_shows_nothing_says_why() -> None:
    arm = RESULTS.arms[1]

    def chip(low: float, high: float) -> Chip:
        comparison = Comparison(
            "val_bpb", "base", 3, 0.1, low, high, 0.01, low, high, "paired t", "no difference shown"
        )
        return comparison_chip(replace(arm, comparisons=[comparison]), "val_bpb")

    assert chip(0.001, 0.02).text == chip(-0.001, 0.02).text == "not shown"
    assert "not enough" in chip(0.001, 0.02).detail and "not enough" not in chip(-0.001, 0.02).detail
