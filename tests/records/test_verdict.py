"""The interval of new runs, compared with scipy and by simulation; verdicts."""

from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from deskside.facts.records import records
from deskside.records.verdict import judge
from deskside.study.stats.statistics import interval_of_new_mean

SEEDS = (1, 2, 3)
RECORD = replace(records()[0], seeds=SEEDS, bits_per_byte=(1.100, 1.102, 1.101), card="H200 SXM")


def test_against_scipy() -> None:
    values = (1.100, 1.102, 1.107, 1.101)
    low, high = interval_of_new_mean(values, 3)
    scale = np.std(values, ddof=1) * np.sqrt(1 / 4 + 1 / 3)
    assert (low, high) == pytest.approx(stats.t.interval(0.95, 3, np.mean(values), scale), rel=1e-12)
    assert interval_of_new_mean([1.1], 3) == (None, None)


def test_it_contains_95_percent_of_new_means() -> None:
    rng = np.random.default_rng(0)
    inside = 0
    for old, new in zip(rng.normal(size=(2000, 3)), rng.normal(size=(2000, 2)), strict=True):
        low, high = interval_of_new_mean(old.tolist(), 2)
        assert low is not None and high is not None
        inside += low <= new.mean() <= high
    assert inside / 2000 == pytest.approx(0.95, abs=0.015)


@pytest.mark.parametrize(
    ("values", "card", "kind"),
    [
        ((1.100, 1.102, 1.101), "H200 SXM", "within"),
        ((1.12,), "H200 SXM", "worse"),
        ((1.05, 1.06), "H200 SXM", "better"),
        ((1.05, 1.06), "RTX 4090", "not comparable"),
    ],
)
def test_verdicts(values: tuple[float, ...], card: str, kind: str) -> None:
    assert judge(RECORD, values, card).kind == kind


def test_one_seed_has_no_interval() -> None:
    one = replace(RECORD, seeds=(1,), bits_per_byte=(1.1,))
    verdict = judge(one, (1.2,), "H200 SXM")
    assert (verdict.kind, verdict.low, verdict.high) == ("no interval", None, None)
