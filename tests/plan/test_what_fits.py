"""The table of what fits on a GPU has the same numbers as the plans of each size and time."""

import math

import pytest

from deskside.budget.loss import LAW
from deskside.plan.planner import make_plan
from deskside.plan.what_fits import FitRow, what_fits
from tests.plan import made

HOURS = (1.0, 24.0)


@pytest.fixture(scope="module")
def rows() -> list[FitRow]:
    return what_fits(made.request(), HOURS)


def test_each_best_size_is_about_that_of_the_plan(rows: list[FitRow]) -> None:
    for column, hours in enumerate(HOURS):
        plan = make_plan(made.request(value=hours))
        assert plan.best is not None
        (best,) = [row.cells[column].candidate for row in rows if row.cells[column].is_best]
        assert best is not None
        assert best.loss[1] == pytest.approx(plan.best.candidate.loss[1], rel=0.005)
        if best.shape.preset == plan.best.candidate.shape.preset:
            assert best.tokens == plan.best.candidate.tokens


def test_what_does_not_fit_does_not_fit_in_any_time(rows: list[FitRow]) -> None:
    states = [tuple(cell.state for cell in row.cells) for row in rows]
    assert states[-1] == states[-2] == ("no", "no") and "no" not in states[-3]
    small_card = what_fits(made.request(memory_gib=8.0), HOURS)
    assert largest(small_card) < largest(rows)


def largest(rows: list[FitRow]) -> int:
    return max(row.params for row in rows if row.cells[0].state != "no")


def test_a_model_finishes_where_no_larger_one_is_better_for_its_arithmetic(rows: list[FitRow]) -> None:
    """Uses only the loss law, with FLOPs proportional to weights x tokens."""
    seen = set()
    for cell in (cell for row in rows for cell in row.cells):
        if (candidate := cell.candidate) is None or cell.state == "tight":
            continue
        flops = candidate.weights * candidate.tokens[1]
        sizes = [candidate.weights * 10 ** (step / 50) for step in range(-100, 101)]
        best = min(sizes, key=lambda size: LAW.at(size, flops / size))
        distance = math.log10(best / candidate.weights)
        if abs(distance) > 0.03:
            assert (distance > 0) is (cell.state == "finishes")
            seen.add(cell.state)
    assert seen == {"finishes", "short"}


def test_models_are_sorted_and_differ(rows: list[FitRow]) -> None:
    params = [row.params for row in rows]
    assert params == sorted(set(params))


def test_too_little_time_learns_nothing() -> None:
    rows = what_fits(made.request(), (0.005,))
    assert {cell.state for row in rows for cell in row.cells} == {"too short", "no"}
