"""The plots of a study, checked by what is drawn in them: marks, bars, lines and words, not only pixels."""

import math
import random
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.axes import Axes
from matplotlib.collections import PathCollection
from matplotlib.colors import to_hex
from matplotlib.container import ErrorbarContainer
from matplotlib.text import Annotation

from deskside.report.canvas import Plot, wrapped
from deskside.report.chart_data import most_different
from deskside.report.charts import STRONGEST, draw_bars, draw_bubbles, draw_forest, draw_front, draw_heat_maps
from deskside.report.colors import BETTER, PAPER
from deskside.report.curves import draw_curves
from deskside.report.study_figures import _prefixes, draw, draw_group
from deskside.study.metrics import PRIMARY
from deskside.study.results import Arm, Factor, Group, Results
from deskside.study.stats.compare import compare
from deskside.utils.format import printable
from tests.study import made

RESULTS = compare(made.results())
GROUP = RESULTS.groups[0]


def drawn(found: Plot | str) -> Plot:
    assert isinstance(found, Plot), found
    return found


def texts(axes: Axes) -> list[str]:
    return [text.get_text() for text in axes.texts]


def relative(arm: Arm, key: str) -> float | None:
    return next((c.relative for c in arm.comparisons if c.metric == key), None)


def many(count: int) -> Results:
    """Return one baseline and count - 1 arms with growing effects, whose names are in a different order."""
    draws = random.Random(3)
    start = RESULTS.arms[0]
    arms = [replace(start, id="baseline", label="baseline", baseline="baseline", levels={"x": "baseline"})]
    places = list(range(1, count))
    draws.shuffle(places)
    for place in places:
        trials = [
            made.trial(
                t.seed,
                {
                    **t.metrics,
                    "val_bpb": t.metrics["val_bpb"] * (1 + place / 1000) * math.exp(draws.gauss(0, 1e-4)),
                },
            )
            for t in start.trials
        ]
        arms.append(
            replace(
                start,
                id=f"x_{place}",
                label=f"arm {place}",
                baseline="baseline",
                levels={"x": str(place)},
                trials=trials,
            )
        )
    factor = Factor("x", "x", [arm.levels["x"] for arm in arms])
    group = Group("main", "", "124m", "one-at-a-time", "4 minutes of training", [factor], [])
    return compare(replace(RESULTS, arms=arms, groups=[group]))


@pytest.mark.parametrize("key", ["val_bpb", "tokens_per_second"])
def test_forest_marks_stand_where_the_comparisons_are(key: str) -> None:
    found = drawn(draw_forest(RESULTS, RESULTS.arms, key))
    axes = found.figure.axes[0]
    marks = sorted(float(line.get_xdata()[0]) for line in axes.lines if line.get_label() == "difference")
    known = sorted(100 * r for arm in RESULTS.arms if (r := relative(arm, key)) is not None)
    assert marks == pytest.approx(known)
    spans = sorted(tuple(line.get_xdata()) for line in axes.lines if line.get_label() == "interval")
    left, right = axes.get_xlim()
    comparisons = [c for arm in RESULTS.arms for c in arm.comparisons if c.metric == key]
    expected = sorted(
        (max(left, 100 * c.relative_low), min(right, 100 * c.relative_high)) for c in comparisons
    )
    assert np.allclose(spans, expected)
    assert sum("against" in text for text in texts(axes)) == 2  # one for each size
    assert "2 to 3 seeds" in found.caption
    hollow = [
        line
        for line in axes.lines
        if line.get_label() == "difference" and line.get_markerfacecolor() == PAPER
    ]
    assert len(hollow) == sum(c.verdict == "no difference shown" for c in comparisons)
    names = [label.get_text() for label in axes.get_yticklabels()]
    assert any("(emulated)" in name for name in names) == (key == "tokens_per_second")


def test_forest_of_one_seed_draws_crosses_and_no_lines() -> None:
    results = compare(made.results(seeds=1))
    axes = drawn(draw_forest(results, results.arms, "val_bpb")).figure.axes[0]
    marks = [line for line in axes.lines if line.get_label() == "difference"]
    assert marks and all(line.get_marker() == "x" for line in marks)
    assert not [line for line in axes.lines if line.get_label() == "interval"]
    assert {"out of memory", "diverged"} <= set(texts(axes))


def test_forest_keeps_forty_rows_best_first() -> None:
    results = many(46)
    found = drawn(draw_forest(results, results.arms, "val_bpb"))
    names = [label.get_text() for label in found.figure.axes[0].get_yticklabels()]
    assert names == [f"arm {place}" for place in range(6, 46)]  # the five that differ least are omitted
    assert "5 of 45 arms are left out" in found.caption


def test_one_arm_far_away_does_not_press_the_others_together() -> None:
    results = many(6)
    far = [
        replace(t, metrics={**t.metrics, "val_bpb": t.metrics["val_bpb"] * 4}) for t in results.arms[1].trials
    ]
    results = compare(
        replace(results, arms=[results.arms[0], replace(results.arms[1], trials=far), *results.arms[2:]])
    )
    axes = drawn(draw_forest(results, results.arms, "val_bpb")).figure.axes[0]
    assert axes.get_xscale() == "symlog"
    marks = [line.get_xdata()[0] for line in axes.lines if line.get_label() == "difference"]
    assert max(marks) == pytest.approx(300, rel=0.02)


def test_bars_have_the_means_and_the_intervals() -> None:
    found = drawn(draw_bars(RESULTS, GROUP, "tokens_per_second"))
    axes = found.figure.axes[0]
    estimates = [arm.estimates["tokens_per_second"] for arm in RESULTS.arms]
    assert [bar.get_width() for bar in axes.patches] == pytest.approx([e.mean for e in estimates])  # type: ignore[attr-defined]
    assert [bool(bar.get_hatch()) for bar in axes.patches] == [arm.emulated for arm in RESULTS.arms]
    errors = [container for container in axes.containers if isinstance(container, ErrorbarContainer)]
    drawn_ends = sorted(x for one in errors for x in one.lines[2][0].get_segments()[0][:, 0])
    assert drawn_ends == pytest.approx(sorted(end for e in estimates for end in (e.low, e.high)))
    assert "tokens/s" in axes.get_xlabel() and "emulated" in found.caption
    memory = drawn(draw_bars(RESULTS, GROUP, "peak_memory_gib")).figure.axes[0]
    assert not any(bar.get_hatch() for bar in memory.patches)  # memory is not emulated


def test_bars_say_why_an_arm_has_none() -> None:
    found = drawn(draw_bars(compare(made.results(seeds=1)), GROUP, "tokens_per_second"))
    assert {"out of memory", "diverged"} <= set(texts(found.figure.axes[0]))
    assert "1 seed, so no interval" in found.caption
    assert "No bar chart" in str(draw_bars(compare(made.results(gpu=False)), GROUP, "watts"))


def test_bubbles_stand_at_memory_and_speed_and_grow_with_parameters() -> None:
    axes = drawn(draw_bubbles(RESULTS, GROUP)).figure.axes[0]
    found = [one for one in axes.collections if isinstance(one, PathCollection)]
    expected = [
        (a.estimates["peak_memory_gib"].mean, a.estimates["tokens_per_second"].mean) for a in RESULTS.arms
    ]
    assert np.allclose([one.get_offsets()[0] for one in found], expected)
    sizes = [float(one.get_sizes()[0]) for one in found]
    assert sizes[4] / sizes[0] == pytest.approx(85 / 25)
    numbers = [text.get_text() for text in axes.texts if isinstance(text, Annotation)]
    assert sorted(numbers, key=int) == [str(i) for i in range(1, 9)]
    key = "\n".join(text.get_text() for text in axes.figure.texts)
    assert all(f"{i}  {arm.label}" in key for i, arm in enumerate(RESULTS.arms, start=1))


def test_front_fills_the_arms_that_are_on_it() -> None:
    found = next(f for f in RESULTS.fronts if f.metrics == ["tokens_per_second", "val_bpb"])
    axes = drawn(draw_front(RESULTS, GROUP, found)).figure.axes[0]
    filled = {float(line.get_xdata()[0]) for line in axes.lines if line.get_marker() == "s"}
    on = [RESULTS.arm(name) for name in found.arms]
    assert filled == {arm.estimates["tokens_per_second"].mean for arm in on if arm is not None}
    step = next(line for line in axes.lines if line.get_drawstyle().startswith("steps"))
    # Down from the right: between two arms of the front, the loss stays that of the faster one.
    assert step.get_drawstyle() == "steps-pre" and list(step.get_ydata()) == sorted(step.get_ydata())


@pytest.mark.parametrize("across", ["seconds", "tokens"])
def test_curves_are_the_mean_over_seeds(across: str) -> None:
    found = drawn(draw_curves(RESULTS, GROUP, across))
    assert len(found.figure.axes) == 2  # a panel for each size
    axes = found.figure.axes[0]
    lines = {line.get_label(): line for line in axes.lines if not str(line.get_label()).startswith("_")}
    assert set(lines) == {"baseline", "GQA on", "FP4 on", "GQA on, FP4 on"}
    assert len({str(line.get_linestyle()) + str(line.get_marker()) for line in lines.values()}) >= 3
    assert len({line.get_marker() for line in lines.values()}) == 4
    trials = RESULTS.arms[0].trials
    last = {"seconds": [t.metrics["val_bpb"] for t in trials]}.get(across)
    if last is not None:
        assert lines["baseline"].get_ydata()[-1] == pytest.approx(sum(last) / len(last))
        assert lines["baseline"].get_xdata()[-1] == 240
    assert len(axes.collections) == 4  # the bands
    assert "mean over 2 to 3 seeds" in found.caption
    named = [text.get_text() for text in axes.texts]
    assert "baseline" in named and len(named) == 4
    labels = found.figure.axes[1].get_xlabel()
    assert labels == {"seconds": "training time (min)", "tokens": "training tokens"}[across]


def test_curves_take_the_training_loss_where_nothing_was_evaluated_on_the_way() -> None:
    arms = [
        replace(
            arm, trials=[replace(t, curve=[{**row, "val_bpb": None} for row in t.curve]) for t in arm.trials]
        )
        for arm in RESULTS.arms
    ]
    found = drawn(draw_curves(replace(RESULTS, arms=arms), GROUP, "tokens"))
    assert found.figure.axes[0].get_ylabel() == "training loss\n(nats per token)"
    empty = [replace(arm, trials=[replace(t, curve=[]) for t in arm.trials]) for arm in RESULTS.arms]
    assert "No curves" in str(draw_curves(replace(RESULTS, arms=empty), GROUP, "tokens"))


def test_curves_show_at_most_six_arms_of_a_baseline() -> None:
    results = many(12)
    found = drawn(draw_curves(results, results.groups[0], "tokens"))
    names = {str(line.get_label()) for line in found.figure.axes[0].lines}
    assert {"baseline", "arm 11", "arm 10", "arm 9", "arm 8", "arm 7"} == names
    assert "6 of 12 arms are left out" in found.caption


def test_heat_map_of_two_factors_and_of_many() -> None:
    (found,) = draw_heat_maps(RESULTS, GROUP)
    words = texts(drawn(found).figure.axes[0])
    assert len(words) == 6 * 4  # the arms other than the baseline; loss, speed, memory, energy
    assert words[1] == "-20.2 %" and any(word.startswith("(") for word in words)
    group = replace(GROUP, factors=[GROUP.factors[0], GROUP.factors[1]])
    two = replace(RESULTS, groups=[group], arms=[arm for arm in RESULTS.arms if arm.levels["fp4"] == "off"])
    maps = [drawn(one) for one in draw_heat_maps(two, group)]
    assert [one.name for one in maps] == ["heat_val_bpb", "heat_tokens_per_second", "heat_peak_memory_gib"]
    speed = maps[1].figure.axes[0]
    assert texts(speed) == ["baseline", "baseline", "+9.62 %", "+9.95 %"]
    assert [tick.get_text() for tick in speed.get_xticklabels()] == ["small", "medium"]
    assert speed.get_title(loc="left") == "down: grouped-query attention; across: size"
    other = replace(group, factors=[GROUP.factors[0], GROUP.factors[2]])
    fp4 = replace(two, groups=[other], arms=[arm for arm in RESULTS.arms if arm.levels["gqa"] == "off"])
    emulated = texts(drawn(draw_heat_maps(fp4, other)[1]).figure.axes[0])
    assert emulated == ["baseline", "baseline", "-20.2 %\nemulated", "-20.0 %\nemulated"]
    cells = {(round(p.get_x() + 0.48), round(p.get_y() + 0.47)): p for p in speed.patches}  # type: ignore[attr-defined]
    assert set(cells) == {(0, 1), (1, 1)}  # the baselines have no color
    assert all(to_hex(cell.get_facecolor()) == BETTER for cell in cells.values())  # faster
    assert cells[0, 1].get_alpha() < cells[1, 1].get_alpha() == STRONGEST


def test_most_different_keeps_baselines_and_the_order() -> None:
    results = many(10)
    kept = most_different(results.arms, "val_bpb", 4)
    assert [arm.id for arm in kept] == [
        a.id for a in results.arms if a.id in ("baseline", "x_9", "x_8", "x_7")
    ]


def test_draw_writes_every_figure(tmp_path: Path) -> None:
    small = compare(replace(made.results(), arms=made.results().arms[:3]))
    overview, groups = draw(small, tmp_path)
    assert [image.path.name for image in overview.images] == [f"forest_{key}.svg" for key in PRIMARY]
    names = {image.path.name for image in groups["main"].images}
    assert {"loss_time.svg", "loss_tokens.svg", "bubbles.svg", "heat_val_bpb.svg"} <= names
    assert {path.name for path in tmp_path.iterdir()} == names | {f"forest_{key}.svg" for key in PRIMARY}
    assert overview.missing == groups["main"].missing == []
    nothing = [replace(arm, trials=[], estimates={}, comparisons=[]) for arm in small.arms]
    overview, groups = draw(replace(small, arms=nothing), tmp_path / "empty")
    assert not (tmp_path / "empty").exists() and not overview.images and not groups["main"].images
    assert overview.missing == ["No charts: no trial has finished."]


def test_hostile_names_are_drawn_as_text_and_stay_in_the_folder(tmp_path: Path) -> None:
    bad = "$\\frac{1}{$ \\undefined \x00\ud800 \u4e2d_{"
    arms = [replace(arm, label=f"{bad} {arm.label}", group="../x") for arm in RESULTS.arms[:2]]
    groups = [replace(GROUP, name="../x", title=bad), replace(GROUP, name="..")]
    _, figures = draw(replace(RESULTS, arms=arms, groups=groups, fronts=[]), tmp_path / "plots")
    assert {image.path.parent for image in figures["../x"].images} == {tmp_path / "plots"}
    assert [path.name for path in tmp_path.iterdir()] == ["plots"]


@pytest.mark.filterwarnings("error")
def test_numbers_that_are_damaged_draw_nothing_and_fail_nothing() -> None:
    first = RESULTS.arms[1]
    estimates = {key: replace(value, mean=math.nan) for key, value in first.estimates.items()}
    comparisons = [replace(c, relative=math.inf, relative_low=None) for c in first.comparisons]
    arms = [RESULTS.arms[0], replace(first, estimates=estimates, comparisons=comparisons)]
    results = replace(RESULTS, arms=arms, fronts=[])
    kept = [one for one in draw_group(results, GROUP) if isinstance(one, Plot)]
    assert "forest_val_bpb" not in {one.name for one in kept} and "loss_time" in {one.name for one in kept}


@given(st.text(max_size=60), st.integers(1, 30), st.integers(1, 3))
def test_long_names_keep_their_beginning_and_their_end(text: str, columns: int, lines: int) -> None:
    shown = wrapped(text, columns, lines).replace(r"\$", "$").split("\n")
    assert len(shown) <= lines and all(len(line) <= columns for line in shown)
    whole = " ".join(printable(text).split())
    if len(whole) <= columns:
        assert shown == [whole]


def test_a_name_that_is_cut_says_so() -> None:
    assert wrapped("FP8, weights converted in every pass", 20, 2) == "FP8, weights\nconverted\u2026every pass"


@pytest.mark.parametrize(
    "names", [["a_3", "a", "a"], ["A", "a", "a+"], ["+", "-", "_1"], ["a_2", "a", "a", "A_3"]]
)
def test_groups_with_similar_names_have_their_own_files(names: list[str]) -> None:
    """Two of the first three groups once had the same files, so that one group's plots replaced the other's."""
    groups = [SimpleNamespace(name=name) for name in names]
    prefixes = _prefixes(groups)  # type: ignore[arg-type]
    assert len({prefix.casefold() for prefix in prefixes}) == len(names)
