"""Charts show the given numbers with units and intervals, and mark emulation by more than colour."""

import re
from dataclasses import replace

import pytest

from deskside.dashboard import plotly_charts, study_charts, trade_off_chart
from deskside.report.curve_data import finished_curves, seed_band
from deskside.study.metrics import METRICS
from deskside.study.results import Results
from deskside.study.stats.compare import compare
from tests.study import made

WHOLE = compare(made.results())


def test_bars_carry_means_intervals_and_units() -> None:
    figure = study_charts.bars(WHOLE, "joules_per_token")
    assert figure is not None
    native = next(bar for bar in figure.data if bar.name == "native")
    arms = [arm for arm in WHOLE.arms if not arm.emulated]
    found = [arm.estimates["joules_per_token"] for arm in arms]
    assert list(native.x) == pytest.approx([1000 * f.mean for f in found])  # stored J, shown mJ
    assert list(native.error_x.array) == pytest.approx([1000 * (f.high - f.mean) for f in found if f.high])
    assert list(native.error_x.arrayminus) == pytest.approx([1000 * (f.mean - f.low) for f in found if f.low])
    assert figure.layout.xaxis.title.text == "energy, mJ per token"


def test_emulated_bars_are_hatched_and_named_so() -> None:
    figure = study_charts.bars(WHOLE, "tokens_per_second")
    assert figure is not None
    patterns = {bar.name: bar.marker.pattern.shape for bar in figure.data if bar.type == "bar"}
    assert patterns == {"native": "", study_charts.EMULATED: "/"}
    assert figure.layout.showlegend


def test_one_seed_draws_no_interval() -> None:
    figure = study_charts.bars(compare(made.results(seeds=1)), "val_bpb")
    assert figure is not None and figure.data[0].error_x.visible is False


def test_nothing_measured_draws_nothing() -> None:
    bare = replace(WHOLE, arms=[replace(arm, estimates={}, comparisons=[], trials=[]) for arm in WHOLE.arms])
    assert study_charts.bars(bare, "val_bpb") is None
    assert study_charts.forest(bare, "val_bpb") is None
    assert trade_off_chart.trade_off(bare, "peak_memory_gib", "tokens_per_second") is None
    assert study_charts.curves({}, "seconds", "loss") is None


def test_the_forest_shows_relative_differences_and_opens_what_is_not_shown() -> None:
    figure = study_charts.forest(WHOLE, "val_bpb")
    assert figure is not None
    marks = {trace.marker.symbol: trace for trace in figure.data if trace.name != plotly_charts.CLIPPED}
    drawn = sum(len(trace.x) for trace in marks.values())
    for symbol, verdict in (("circle", "lower"), ("diamond", "higher")):  # a lower loss is better
        found = [arm for arm in WHOLE.arms if (c := arm.comparison("val_bpb")) and c.verdict == verdict]
        assert len(marks[symbol].x if symbol in marks else ()) == len(found)
    compared = [c for arm in WHOLE.arms if (c := arm.comparison("val_bpb"))]
    assert drawn == len(compared)
    unclear = [c for c in compared if c.verdict == "no difference shown"]
    assert unclear and len(marks["circle-open"].x) == len(unclear)
    assert sorted(marks["circle-open"].x) == pytest.approx(sorted(100 * c.relative for c in unclear))
    assert "%" in figure.layout.xaxis.title.text and "left is better" in figure.layout.xaxis.title.text


def test_the_front_has_rings_and_every_level_a_look_of_its_own() -> None:
    across, up = "peak_memory_gib", "tokens_per_second"
    factor = next(factor for factor in WHOLE.groups[0].factors if factor.name == "gqa")
    figure = trade_off_chart.trade_off(WHOLE, across, up, factor)
    assert figure is not None
    traces = {trace.name: trace for trace in figure.data}
    looks = set()
    for level in factor.levels:
        arms = [arm for arm in WHOLE.arms if arm.levels["gqa"] == level]
        trace = traces[f"GQA {level}"]
        assert list(trace.x) == pytest.approx([arm.estimates[across].mean for arm in arms])
        assert list(trace.y) == pytest.approx([arm.estimates[up].mean for arm in arms])
        assert [symbol.endswith("-open") for symbol in trace.marker.symbol] == [arm.emulated for arm in arms]
        looks.add((trace.marker.color, trace.marker.symbol[0].removesuffix("-open")))
    assert len(looks) == len(factor.levels) and figure.layout.legend.title.text == factor.label
    front = {name for found in trade_off_chart.fronts_in(WHOLE, across, up) for name in found.arms}
    rings = zip(traces[trade_off_chart.ON_FRONT].x, traces[trade_off_chart.ON_FRONT].y, strict=True)
    arms = [arm for arm in WHOLE.arms if arm.id in front]
    assert sorted(rings) == sorted((a.estimates[across].mean, a.estimates[up].mean) for a in arms)
    assert figure.layout.xaxis.title.text == "peak memory, GiB (less is better)"


def test_tooltips_name_baselines_by_label_and_no_ids() -> None:
    arms = [replace(arm, id=f"id-{arm.id}", baseline=f"id-{arm.baseline}") for arm in made.results().arms]
    whole = compare(replace(made.results(), arms=arms))
    for figure in (
        study_charts.bars(whole, "val_bpb"),
        study_charts.forest(whole, "val_bpb"),
        trade_off_chart.trade_off(whole, "tokens_per_second", "val_bpb"),
    ):
        assert figure is not None
        texts = [text for trace in figure.data if trace.hovertext is not None for text in trace.hovertext]
        assert texts and not any("id-" in text for text in texts)
        assert any("against small, GQA off, FP4 off: " in text for text in texts)


def test_a_point_without_a_name_has_a_number_and_is_listed() -> None:
    figure = trade_off_chart.trade_off(WHOLE, "tokens_per_second", "val_bpb")
    assert figure is not None
    notes = figure.layout.annotations
    names = {note.text for note in notes if not note.text.isdigit()}
    assert names and names <= {plotly_charts.wrap_label(arm.label) for arm in WHOLE.arms}
    numbered = figure.layout.meta["numbered"]
    narrow = [note.text for note in notes if note.name == "narrow"]
    assert set(narrow) <= {number for number, _, _ in numbered}
    assert len(numbered) + sum(note.name == "" for note in notes) == len(WHOLE.arms)
    style = trade_off_chart.screen_style(figure, "here")
    small, large = style.split("@media (min-width")
    for part, screens in ((small, "wide"), (large, "narrow")):
        hidden = [str(i) for i, note in enumerate(notes) if note.name == screens]
        assert re.findall(r'data-index="(\d+)"', part) == hidden
    listed = trade_off_chart.number_list(figure)
    assert [f"{number}</b> {name}" in listed for number, name, _ in numbered] == [True] * len(numbered)


def test_a_name_that_is_cut_where_it_differs_is_a_number() -> None:
    arms = [
        replace(arm, label=f"{'a very long name ' * 3}{place}", baseline=arm.id)
        for place, arm in enumerate(WHOLE.arms)
    ]
    figure = trade_off_chart.trade_off(replace(WHOLE, arms=arms), "tokens_per_second", "val_bpb")
    assert figure is not None
    assert all(note.text.isdigit() for note in figure.layout.annotations) and figure.layout.annotations
    assert [name for _, name, _ in figure.layout.meta["numbered"]] == [arm.label for arm in arms]


def test_labels_keep_what_tells_arms_apart() -> None:
    labels = ("8 x 2048, 16 passes, BF16", "8 x 2048, 16 passes, FP8", "16 x 2048, 16 passes, FP8")
    one = made.results()
    arms = [
        replace(arm, label=label, baseline=arm.id)  # with several baselines, arms keep their full labels
        for arm, label in zip(one.arms, labels, strict=False)
    ]
    figure = trade_off_chart.trade_off(compare(replace(one, arms=arms)), "tokens_per_second", "val_bpb")
    assert figure is not None
    shown = {note.text for note in figure.layout.annotations if not note.text.isdigit()}
    assert shown and shown <= {"8 x 2048, BF16", "8 x 2048, FP8", "16 x 2048, FP8"}


def with_one_wide_interval(key: str) -> Results:
    """Return the study with one wide interval: the first arm's, in one metric,
    reaches from 0 to ten times its mean.
    """
    first = WHOLE.arms[0]
    found = first.estimates[key]
    wide = {**first.estimates, key: replace(found, low=0.0, high=10 * found.mean)}
    return replace(WHOLE, arms=[replace(first, estimates=wide), *WHOLE.arms[1:]])


def test_an_interval_far_beyond_the_means_is_cut_and_marked_in_the_bubbles() -> None:
    across, up = "tokens_per_second", "val_bpb"
    figure = trade_off_chart.trade_off(with_one_wide_interval(up), across, up)
    assert figure is not None
    start, stop = figure.layout.yaxis.range
    means = [arm.estimates[up].mean for arm in WHOLE.arms]
    assert start < min(means) and stop > max(means) and stop - start < 3 * (max(means) - min(means))
    marks = next(trace for trace in figure.data if trace.name == plotly_charts.CLIPPED)
    assert list(marks.marker.symbol[:2]) == ["triangle-down", "triangle-up"]
    assert list(marks.y[:2]) == pytest.approx([start, stop])
    assert list(marks.x[:2]) == [WHOLE.arms[0].estimates[across].mean] * 2
    assert f"0 to {10 * means[0]:,.4g}" in marks.hovertext[0]  # all of it is legible
    for trace in figure.data:
        if trace.name != plotly_charts.CLIPPED and trace.error_y.array is not None:
            ends = zip(trace.y, trace.error_y.array, trace.error_y.arrayminus, strict=True)
            assert all(y + up_ <= stop + 1e-9 and y - down >= start - 1e-9 for y, up_, down in ends)


def test_bars_keep_their_scale_beside_a_wide_interval() -> None:
    figure = study_charts.bars(with_one_wide_interval("joules_per_token"), "joules_per_token")
    assert figure is not None
    longest = 1000 * max(arm.estimates["joules_per_token"].mean for arm in WHOLE.arms)
    assert longest < figure.layout.xaxis.range[1] < 2.5 * longest
    marks = next(trace for trace in figure.data if trace.name == plotly_charts.CLIPPED)
    assert list(marks.marker.symbol) == ["triangle-right"] and figure.layout.showlegend


def test_means_far_apart_get_a_logarithmic_axis() -> None:
    arms = [
        replace(
            arm,
            estimates={
                **arm.estimates,
                "tokens_per_second": replace(
                    arm.estimates["tokens_per_second"], mean=10.0**place, low=None, high=None
                ),
            },
        )
        for place, arm in enumerate(WHOLE.arms)
    ]
    figure = trade_off_chart.trade_off(replace(WHOLE, arms=arms), "peak_memory_gib", "tokens_per_second")
    assert figure is not None and figure.layout.yaxis.type == "log" and figure.layout.xaxis.type != "log"
    start, stop = figure.layout.yaxis.range
    assert -2 < start < 0 and 7 < stop < 9


def test_the_memory_of_the_card_is_a_line_only_where_it_is_near() -> None:
    most = max(arm.estimates["peak_memory_gib"].mean for arm in WHOLE.arms)
    near = study_charts.bars(WHOLE, "peak_memory_gib", (1.5 * most, "the card"))
    far = study_charts.bars(WHOLE, "peak_memory_gib", (20 * most, "the card"))
    assert near is not None and len(near.layout.shapes) == 1 and near.layout.xaxis.range[1] > 1.5 * most
    assert far is not None and len(far.layout.shapes) == 0 and far.layout.xaxis.range[1] < 2 * most


def test_long_labels_get_higher_rows() -> None:
    short = study_charts.bars(WHOLE, "val_bpb")
    arms = [replace(arm, label=f"{arm.label}, " + "with many words more " * 4) for arm in WHOLE.arms]
    long = study_charts.bars(replace(WHOLE, arms=arms), "val_bpb")
    assert short is not None and long is not None and long.layout.height > 1.5 * short.layout.height


def test_curves_are_means_with_bands_and_differ_by_dash_and_marker() -> None:
    lines = {arm.label: finished_curves(arm, "val_bpb", "tokens") for arm in WHOLE.arms[:3]}
    figure = study_charts.curves(lines, "tokens", "val_bpb")
    assert figure is not None
    means = [trace for trace in figure.data if trace.fill is None]
    assert [trace.name for trace in means] == [arm.label for arm in WHOLE.arms[:3]]
    assert len({(trace.line.dash, trace.marker.symbol) for trace in means}) == 3
    bands = [trace for trace in figure.data if trace.fill == "toself"]
    for mean, band, curves in zip(means, bands, lines.values(), strict=True):
        expected = seed_band(curves)
        assert list(mean.y) == list(expected.mean)
        assert list(band.y) == [*expected.high, *reversed(expected.low)]
    one = study_charts.curves({"a": lines[WHOLE.arms[0].label][:1]}, "tokens", "val_bpb")
    assert one is not None and len(one.data) == 1 and not one.layout.showlegend


def test_a_label_with_digits_is_no_number() -> None:
    """Plotly would read "512, 1,024" as a number and draw an axis from 0 on."""
    arms = [replace(arm, label=f"{place}, 1,024") for place, arm in enumerate(WHOLE.arms)]
    for figure in (
        study_charts.bars(replace(WHOLE, arms=arms), "val_bpb"),
        study_charts.forest(replace(WHOLE, arms=arms), "val_bpb"),
    ):
        assert figure is not None and figure.layout.yaxis.type == "category"


def test_markup_in_a_name_is_text() -> None:
    arm = replace(WHOLE.arms[0], label="<img src=x onerror=alert(1)> & more")
    figure = study_charts.bars(replace(WHOLE, arms=[arm]), "val_bpb")
    assert figure is not None
    assert "<img" not in figure.to_json().replace("\\u003c", "<")


@pytest.mark.parametrize("metric", METRICS, ids=lambda metric: metric.key)
def test_every_axis_has_its_unit(metric) -> None:  # type: ignore[no-untyped-def]
    figure = study_charts.bars(WHOLE, metric.key)
    if figure is not None:
        assert metric.unit in figure.layout.xaxis.title.text
