"""Labels, lines and heat maps in the dashboard's charts."""

from dataclasses import replace

import pytest

from deskside.dashboard import plotly_charts
from tests.study import made


@pytest.mark.parametrize("length", range(20, 30))
def test_a_wrapped_label_keeps_its_escapes_whole(length: int) -> None:
    label = plotly_charts.wrap_label("a" * length + "<b>&c")
    assert label.replace("<br>", "") == "a" * length + "&lt;b>&amp;c"
    assert "&lt;" in label
    assert "&amp;" in label


def test_arms_of_one_label_stay_apart() -> None:
    twins = [replace(arm, label="same") for arm in made.results().arms[:2]]
    assert len(set(plotly_charts.unique_labels(twins).values())) == 2


def test_a_heat_map_of_experts_has_numbers_if_they_fit() -> None:
    small = plotly_charts.expert_heat_map([[0.5, 1.5], [1.0, 1.0]], ["hi", "<b>"], "language")
    assert small.data[0].texttemplate and not small.data[0].showscale
    assert list(small.data[0].y) == ["hi", "&lt;b>"] and list(small.data[0].z[0]) == [0.5, 1.5]
    wide = plotly_charts.expert_heat_map([[1.0] * 64] * 61, [str(layer) for layer in range(61)], "layer")
    assert not wide.data[0].texttemplate and wide.data[0].showscale


def test_labelled_lines_differ_without_color() -> None:
    names = [f"<{number}>" for number in range(7)]
    figure = plotly_charts.labelled_lines({name: ([0, 1], [2, 3]) for name in names}, "x", "y")
    styles = {(line.line.dash, line.marker.symbol) for line in figure.data}
    assert len(styles) == len(names) and figure.data[0].name == "&lt;0>"
    assert list(figure.data[3].y) == [2, 3]
