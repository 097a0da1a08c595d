"""The planner's charts contain the numbers of the plans and predictions."""

import pytest

from deskside.dashboard import planner_charts
from deskside.dashboard.runs import Prediction, accuracies
from deskside.plan.what_fits import HOURS, what_fits
from tests.plan import made


def test_what_fits_is_drawn_with_losses_and_the_best_of_each_column() -> None:
    rows = what_fits(made.request(), HOURS[:2])
    figure = planner_charts.fit_map(rows, HOURS[:2])
    cells = figure.data[0]
    assert list(cells.x) == ["1 h", "4 h"] and len(cells.z) == len(rows)
    frames = sorted((round(shape.x0 + 0.47), round(shape.y0 + 0.44)) for shape in figure.layout.shapes)
    best = [(c, r) for r, row in enumerate(rows) for c, cell in enumerate(row.cells) if cell.is_best]
    assert len(best) == 2 and frames == sorted(best)
    for row, texts in zip(rows, cells.text, strict=True):
        for cell, text in zip(row.cells, texts, strict=True):
            loss = "no" if cell.candidate is None else f"{cell.candidate.loss[1]:.3f}"
            assert loss in text and (text.startswith("<b>") is cell.is_best)
    present = {cell.state for row in rows for cell in row.cells}
    assert {trace.name for trace in figure.data[1:]} == {planner_charts.STATES[state][0] for state in present}


@pytest.mark.parametrize(
    "hours, text", [(1, "1 h"), (24, "1 day"), (72, "3 days"), (168, "1 week"), (30, "30 h")]
)
def test_hours_in_words(hours: float, text: str) -> None:
    assert planner_charts.hours_text(hours) == text


def test_errors_carry_the_range_of_the_prediction_and_are_sorted_by_size() -> None:
    near = Prediction("near", "speed", 100.0, 80.0, 125.0, 110.0, "plan")
    far = Prediction("far", "speed", 100.0, None, None, 30.0, "plan")
    figure = planner_charts.errors([near, far])
    first, last = figure.data
    assert first.x[0] == pytest.approx(1.1) and last.x[0] == pytest.approx(0.3)
    assert first.x[0] + first.error_x.array[0] == pytest.approx(110 / 80)
    assert first.x[0] - first.error_x.arrayminus[0] == pytest.approx(110 / 125)
    assert "+10 %" in first.text[0] and "-70 %" in last.text[0]
    assert first.marker.color != last.marker.color and first.marker.symbol != last.marker.symbol


def test_the_accuracy_of_a_quantity() -> None:
    found = accuracies(
        [
            Prediction("a", "speed", 100.0, 80.0, 120.0, 90.0, "plan"),
            Prediction("b", "speed", 100.0, 80.0, 120.0, 50.0, "plan"),
            Prediction("c", "speed", 100.0, 80.0, 120.0, 120.0, "plan"),
            Prediction("a", "tokens", 10.0, None, None, 10.0, "plan"),
        ]
    )
    speed, tokens = found
    assert (speed.error, speed.worst.name, speed.within_range) == (pytest.approx(-0.1), "b", 2)
    assert (tokens.error, tokens.within_range) == (0.0, None)


def test_a_part_of_almost_nothing_is_left_out() -> None:
    figure = planner_charts.breakdown({"much": 1.0, "nothing": 1e-9, "some": 0.5}, "s")
    assert list(figure.data[0].y) == ["much", "some"]
