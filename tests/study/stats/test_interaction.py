"""Interactions compared with the textbook: a regression with an interaction term, and designs with missing cells."""

import itertools
import math

import numpy as np
import pytest
from scipy import stats

from deskside.study.results import Interaction
from deskside.study.stats.compare import compare
from tests.study.made import results as made
from tests.study.small import Numbers, crossed


def one(numbers: dict[tuple[str, ...], Numbers], names: tuple[str, ...] = ("a", "b")) -> Interaction:
    found = [i for i in compare(crossed(numbers, names)).interactions if (i.first, i.second) == names[:2]]
    assert len(found) == 1
    return found[0]


def noisy(effect: float, seeds: int, key: tuple[str, ...], spread: float = 0.001) -> list[float | None]:
    draw = np.random.default_rng([len(key), *(level == "on" for level in key)])
    both = effect if key[:2] == ("on", "on") else 0.0
    logs = 0.02 * (key[0] == "on") + 0.03 * (key[1] == "on") + both + 0.05 * np.arange(seeds)
    return list(1.3 * np.exp(logs + spread * draw.standard_normal(seeds)))


def test_the_effect_is_that_of_a_regression_with_seeds_as_blocks() -> None:
    cells = list(itertools.product(("off", "on"), repeat=3))
    numbers = {key: noisy(0.04, 4, key) for key in cells}
    found = one(numbers, ("a", "b", "c"))
    rows, logs = [], []
    for (a, b, c), values in numbers.items():
        for seed, value in enumerate(values):
            x, y, z = a == "on", b == "on", c == "on"
            rows.append([x, y, z, x and y, x and z, y and z, x and y and z, *(seed == s for s in range(4))])
            logs.append(math.log(value or 0.0))
    solved = np.linalg.lstsq(np.array(rows, float), np.array(logs), rcond=None)[0]
    # With c off it is the a-b term, and with c on the three-way term is added: the mean of the two.
    assert math.log1p(found.effect) == pytest.approx(solved[3] + solved[6] / 2, abs=1e-9)
    assert found.levels == {"a": "on", "b": "on"} and found.n == 4 and found.verdict == "higher"


def test_the_interval_is_scipys_over_seeds() -> None:
    numbers = {key: noisy(0.0, 5, key, 0.01) for key in itertools.product(("off", "on"), repeat=2)}
    found = one(numbers)
    log = {key: np.log(np.array(values, float)) for key, values in numbers.items()}
    each = log["on", "on"] - log["on", "off"] - log["off", "on"] + log["off", "off"]
    low, high = np.expm1(stats.ttest_1samp(each, 0).confidence_interval(0.95))
    assert (found.low, found.high) == pytest.approx((low, high), abs=1e-9)


def test_factors_that_multiply_do_not_interact() -> None:
    for found in compare(made(seeds=6)).interactions:
        assert found.verdict in ("no difference shown", "exact")
        assert found.low is not None and found.high is not None and found.low <= 0 <= found.high
    crossings = {(i.first, i.second) for i in compare(made()).interactions}
    assert crossings == {("size", "gqa"), ("size", "fp4"), ("gqa", "fp4")}


def test_every_seed_is_averaged_over_the_same_settings() -> None:
    """A third factor changes the interaction. Where it is on, one cell lacks a seed, so that setting is left out."""
    numbers: dict[tuple[str, ...], Numbers] = {
        key: noisy(0.1 if key[2] == "on" else 0.0, 3, key)
        for key in itertools.product(("off", "on"), repeat=3)
    }
    whole = one(numbers, ("a", "b", "c"))
    assert whole.effect == pytest.approx(math.exp(0.05) - 1, abs=0.003) and whole.n == 3
    numbers["on", "off", "on"] = [*list(numbers["on", "off", "on"])[:2], None]
    partly = one(numbers, ("a", "b", "c"))
    assert partly.effect == pytest.approx(0.0, abs=0.003) and partly.n == 3


def test_one_seed_is_too_few_and_no_noise_is_exact() -> None:
    keys = list(itertools.product(("off", "on"), repeat=2))
    alone = one({key: [2.0 if key == ("on", "on") else 1.0] for key in keys})
    assert (alone.verdict, alone.low, alone.n) == ("too few seeds", None, 1)
    assert alone.effect == pytest.approx(1.0)
    exact = one({key: [2.0 if key == ("on", "on") else 1.0] * 2 for key in keys})
    assert exact.verdict == "exact" and exact.low == exact.high == exact.effect == pytest.approx(1.0)


def test_without_all_four_cells_there_is_none() -> None:
    keys = list(itertools.product(("off", "on"), repeat=2))
    assert compare(crossed({key: [1.0, 1.1] for key in keys[:3]}, ("a", "b"))).interactions == []
    failed = {key: [1.0, 1.1] if key != ("on", "on") else [None, None] for key in keys}
    assert compare(crossed(failed, ("a", "b"))).interactions == []  # type: ignore[arg-type]


def test_every_other_level_is_crossed() -> None:
    keys = list(itertools.product(("off", "low", "high"), ("off", "on")))
    found = compare(crossed({key: [1.0, 1.1] for key in keys}, ("a", "b"))).interactions
    assert [i.levels for i in found] == [{"a": "low", "b": "on"}, {"a": "high", "b": "on"}]
