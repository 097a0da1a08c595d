"""Charts show the numbers that they were given, with units and intervals, and emulation is marked without colour."""

from dataclasses import replace

import pytest

from deskside.dashboard import illustrations, plotly_charts
from deskside.dashboard.runs import Prediction
from deskside.study.results import Results
from deskside.study.stats.compare import compare
from deskside.study.stats.metrics import METRICS
from tests.study import made

WHOLE = compare(made.results())


def test_bars_carry_means_intervals_and_units() -> None:
    figure = plotly_charts.bars(WHOLE.arms, "joules_per_token")
    assert figure is not None
    native = next(bar for bar in figure.data if bar.name == "native")
    arms = [arm for arm in WHOLE.arms if not arm.emulated]
    found = [arm.estimates["joules_per_token"] for arm in arms]
    assert list(native.x) == pytest.approx([1000 * f.mean for f in found])  # stored J, shown mJ
    assert list(native.error_x.array) == pytest.approx([1000 * (f.high - f.mean) for f in found if f.high])
    assert list(native.error_x.arrayminus) == pytest.approx([1000 * (f.mean - f.low) for f in found if f.low])
    assert figure.layout.xaxis.title.text == "energy, mJ per token"


def test_emulated_bars_are_hatched_and_named_so() -> None:
    figure = plotly_charts.bars(WHOLE.arms, "tokens_per_second")
    assert figure is not None
    patterns = {bar.name: bar.marker.pattern.shape for bar in figure.data if bar.type == "bar"}
    assert patterns == {"native": "", plotly_charts.EMULATED: "/"}
    assert figure.layout.showlegend


def test_one_seed_draws_no_interval() -> None:
    figure = plotly_charts.bars(compare(made.results(seeds=1)).arms, "val_bpb")
    assert figure is not None and figure.data[0].error_x.visible is False


def test_nothing_measured_draws_nothing() -> None:
    bare = replace(WHOLE, arms=[replace(arm, estimates={}, comparisons=[], trials=[]) for arm in WHOLE.arms])
    assert plotly_charts.bars(bare.arms, "val_bpb") is None
    assert plotly_charts.forest(bare, "val_bpb") is None
    assert plotly_charts.bubbles(bare, "peak_memory_gib", "tokens_per_second") is None
    assert plotly_charts.curves({}, "seconds", "loss") is None


def test_the_forest_shows_relative_differences_and_opens_what_is_not_shown() -> None:
    figure = plotly_charts.forest(WHOLE, "val_bpb")
    assert figure is not None
    marks = {trace.marker.symbol: trace for trace in figure.data if trace.name != plotly_charts.CLIPPED}
    drawn = sum(len(trace.x) for trace in marks.values())
    compared = [c for arm in WHOLE.arms if (c := arm.comparison("val_bpb"))]
    assert drawn == len(compared)
    unclear = [c for c in compared if c.verdict == "no difference shown"]
    assert unclear and len(marks["circle-open"].x) == len(unclear)
    assert sorted(marks["circle-open"].x) == pytest.approx(sorted(100 * c.relative for c in unclear))
    assert "%" in figure.layout.xaxis.title.text and "left is better" in figure.layout.xaxis.title.text


def test_bubbles_are_numbered_as_their_list_and_the_front_has_a_rim() -> None:
    across, up = "peak_memory_gib", "tokens_per_second"
    figure = plotly_charts.bubbles(WHOLE, across, up)
    assert figure is not None
    arms = WHOLE.arms
    by_number = {
        text: (x, y, rim)
        for trace in figure.data
        if trace.text
        for text, x, y, rim in zip(trace.text, trace.x, trace.y, trace.marker.line.width, strict=True)
    }
    front = {name for found in plotly_charts.fronts_in(WHOLE, across, up) for name in found.arms}
    assert front
    for number, arm in enumerate(arms, 1):
        x, y, rim = by_number[f"<b>{number}</b>"]
        assert (x, y) == pytest.approx((arm.estimates[across].mean, arm.estimates[up].mean))
        assert (rim > 1) is (arm.id in front)
    assert figure.layout.xaxis.title.text == "peak memory, GiB (less is better)"


def with_one_wide_interval(key: str) -> Results:
    """The study in which the first arm's interval in one metric reaches from 0 to ten times its mean."""
    first = WHOLE.arms[0]
    found = first.estimates[key]
    wide = {**first.estimates, key: replace(found, low=0.0, high=10 * found.mean)}
    return replace(WHOLE, arms=[replace(first, estimates=wide), *WHOLE.arms[1:]])


def test_an_interval_far_beyond_the_means_is_cut_and_marked_in_the_bubbles() -> None:
    across, up = "tokens_per_second", "val_bpb"
    figure = plotly_charts.bubbles(with_one_wide_interval(up), across, up)
    assert figure is not None
    start, stop = figure.layout.yaxis.range
    means = [arm.estimates[up].mean for arm in WHOLE.arms]
    assert start < min(means) and stop > max(means) and stop - start < 3 * (max(means) - min(means))
    marks = next(trace for trace in figure.data if trace.name == plotly_charts.CLIPPED)
    assert list(marks.marker.symbol[:2]) == ["triangle-down", "triangle-up"]
    assert list(marks.y[:2]) == pytest.approx([start, stop])
    assert list(marks.x[:2]) == [WHOLE.arms[0].estimates[across].mean] * 2
    assert f"0 to {10 * means[0]:,.4g}" in marks.hovertext[0]  # the whole of it can be read
    for trace in figure.data:
        if trace.name != plotly_charts.CLIPPED:
            ends = zip(trace.y, trace.error_y.array, trace.error_y.arrayminus, strict=True)
            assert all(y + up_ <= stop + 1e-9 and y - down >= start - 1e-9 for y, up_, down in ends)


def test_bars_keep_their_scale_beside_a_wide_interval() -> None:
    figure = plotly_charts.bars(with_one_wide_interval("joules_per_token").arms, "joules_per_token")
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
    figure = plotly_charts.bubbles(replace(WHOLE, arms=arms), "peak_memory_gib", "tokens_per_second")
    assert figure is not None and figure.layout.yaxis.type == "log" and figure.layout.xaxis.type != "log"
    start, stop = figure.layout.yaxis.range
    assert -2 < start < 0 and 7 < stop < 9


def test_the_memory_of_the_card_is_a_line_only_where_it_is_near() -> None:
    most = max(arm.estimates["peak_memory_gib"].mean for arm in WHOLE.arms)
    near = plotly_charts.bars(WHOLE.arms, "peak_memory_gib", (1.5 * most, "the card"))
    far = plotly_charts.bars(WHOLE.arms, "peak_memory_gib", (20 * most, "the card"))
    assert near is not None and len(near.layout.shapes) == 1 and near.layout.xaxis.range[1] > 1.5 * most
    assert far is not None and len(far.layout.shapes) == 0 and far.layout.xaxis.range[1] < 2 * most


def test_long_labels_get_higher_rows() -> None:
    short = plotly_charts.bars(WHOLE.arms, "val_bpb")
    arms = [replace(arm, label=f"{arm.label}, " + "with many words more " * 4) for arm in WHOLE.arms]
    long = plotly_charts.bars(arms, "val_bpb")
    assert short is not None and long is not None and long.layout.height > 1.5 * short.layout.height


def test_curves_differ_by_dash_and_marker() -> None:
    lines = {arm.label: [trial.curve for trial in arm.trials] for arm in WHOLE.arms[:3]}
    figure = plotly_charts.curves(lines, "tokens", "val_bpb", frozenset({WHOLE.arms[1].label}))
    assert figure is not None
    looks = {trace.legendgroup: (trace.line.dash, trace.marker.symbol) for trace in figure.data}
    assert len(set(looks.values())) == 3
    assert len(figure.data) == 9 and sum(trace.showlegend for trace in figure.data) == 3
    assert "(emulated)" in next(t.name for t in figure.data if t.legendgroup == WHOLE.arms[1].label)
    assert len(figure.data[0].x) == 4  # only where a validation was logged


def test_markup_in_a_name_is_text() -> None:
    arm = replace(WHOLE.arms[0], label="<img src=x onerror=alert(1)> & more")
    figure = plotly_charts.bars([arm], "val_bpb")
    assert figure is not None
    assert "<img" not in figure.to_json().replace("\\u003c", "<")


@pytest.mark.parametrize("length", range(20, 30))
def test_a_wrapped_label_keeps_its_escapes_whole(length: int) -> None:
    label = plotly_charts.wrap_label("a" * length + "<b>&c")
    assert label.replace("<br>", "") == "a" * length + "&lt;b>&amp;c"
    assert "&lt;" in label
    assert "&amp;" in label


def test_arms_of_one_label_stay_apart() -> None:
    twins = [replace(arm, label="same") for arm in WHOLE.arms[:2]]
    assert len(set(plotly_charts.unique_labels(twins).values())) == 2


@pytest.mark.parametrize("metric", METRICS, ids=lambda metric: metric.key)
def test_every_axis_has_its_unit(metric) -> None:  # type: ignore[no-untyped-def]
    figure = plotly_charts.bars(WHOLE.arms, metric.key)
    if figure is not None:
        assert metric.unit in figure.layout.xaxis.title.text


def test_ratios_carry_the_range_of_the_prediction() -> None:
    figure = plotly_charts.ratios([Prediction("r", "speed", 100.0, 80.0, 125.0, 110.0, "plan")])
    mark = figure.data[0]
    assert mark.x[0] == pytest.approx(1.1)
    assert mark.x[0] + mark.error_x.array[0] == pytest.approx(110 / 80)
    assert mark.x[0] - mark.error_x.arrayminus[0] == pytest.approx(110 / 125)


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
    assert len(illustrations.micro_batches(rows, micro).layout.shapes) == rows // micro + 1


@pytest.mark.parametrize("keys", [16, 4, 1])
def test_every_query_head_has_one_line(keys: int) -> None:
    lines, queries, shared = illustrations.heads(16, keys).data
    assert lines.x.count(None) == 16 and len(queries.x) == 16 and len(shared.x) == keys


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
