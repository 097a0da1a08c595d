"""The planner compared with the hand-written step, measured on an H200 since
2026-11-21 (benchmarks/planner_points.py).

No constant of memory was fitted to these measurements, but some of them were known when the terms were chosen. The
constants of speed were fitted to the calibrating half (benchmarks/planner_fit.py).
"""

from dataclasses import replace
from typing import Any

import pytest

from benchmarks.planner_fit import errors, groups, replace_section, section, split, unprobed
from benchmarks.planner_points import MeasuredPoint, points
from deskside.budget.activations import sublayer_gradient_bytes
from deskside.budget.memory import instants, training_memory
from deskside.budget.operators.step import step_operators
from deskside.budget.sizes import Sizes
from deskside.budget.step_spec import StepSpec
from deskside.facts.gpus import find
from deskside.plan.calibrate import calibrate
from deskside.plan.estimate import estimate
from tests.sources import ROOT

RATES = unprobed()
POINTS = points()
CALIBRATION = calibrate(find("h200"), [])
LEAST_GIB = 4.0  # for peaks whose error is given in per cent; below it, fragments of fixed size dominate


def named(name: str) -> MeasuredPoint:
    return next(point for point in POINTS if point.name == name)


BF16, MUON = named("124m, bf16, adamw"), named("1.5b, bf16, muon, block recomputed")


def test_every_kind_of_measurement_is_there() -> None:
    """Single steps, whole runs and all 31 arms of the release study. Nothing is omitted for being far off."""
    kinds = [point.kind for point in POINTS]
    assert kinds.count("steps") == 28 and kinds.count("run") == 8
    trials = sum(len(point.speeds) for point in POINTS if point.kind == "study")
    assert trials == 93  # two arms have the same configuration, so there are 30 points
    assert kinds.count("study") == 30
    assert kinds.count("passes") == 15


@pytest.mark.parametrize(
    "point", [p for p in POINTS if p.gib is not None], ids=lambda point: f"{point.kind} {point.name}"
)
def test_peaks(point: MeasuredPoint) -> None:
    assert point.gib is not None
    within = 0.015 if point.gib > LEAST_GIB else 0.06
    assert point.modelled_gib == pytest.approx(point.gib, rel=within)


def test_rows_that_were_kept_out_are_predicted() -> None:
    """The issue requires 15 % for nine in ten."""
    calibrating, kept_out = split(POINTS)
    assert len(calibrating) == 54 and len(kept_out) == 27
    found = errors(kept_out, RATES)
    assert found.median < 0.02 and found.nine_in_ten < 0.15


@pytest.mark.parametrize(
    "group",
    [
        "tensorwise FP8",
        "rowwise FP8",
        "sliding windows",
        "Muon, whole runs",
        "Muon, study",
        "states on the host",
    ],
)
def test_groups_that_were_missed(group: str) -> None:
    """Before the host was modelled, the errors were: rowwise +168 %, windows +22 %, Muon +25 %."""
    found = errors(groups()[group], RATES)
    assert len(found) >= 2 and found.nine_in_ten < 0.15


def test_small_passes() -> None:
    """Only eight in ten are within 15 %, because the same CPU's time varies by a fifth from minute to minute.

    Before the host was modelled, they were predicted +51 to +727 % too fast.
    """
    found = groups()["small passes"]
    close = [p for p in found if abs(p.modelled_speed(RATES) / p.speed - 1) < 0.15]
    assert errors(found, RATES).median < 0.06 and len(close) >= 0.8 * len(found)


@pytest.mark.parametrize("point", POINTS, ids=lambda point: f"{point.kind} {point.name}")
def test_the_stated_range_holds(point: MeasuredPoint) -> None:
    found = estimate(point.setting, CALIBRATION, 2**40)
    low, _, high = found.tokens_per_second
    assert low <= point.speed <= high
    small = point.setting.micro_tokens <= 2048
    assert found.host_bound or not small
    if small:
        assert found.speed_spread > CALIBRATION.speed_spread + 0.2


def test_every_fp8_recipe_has_a_price_of_its_own() -> None:
    speeds = {
        name: replace(BF16, setting=replace(BF16.setting, precision=name)).modelled_speed(RATES)  # type: ignore[arg-type]
        for name in (
            "fp8-delayed",
            "fp8-tensorwise",
            "fp8-rowwise",
            "nvfp4",
            "nvfp4-4o6",
            "nvfp4-eden",
            "fp8-nvfp4",
        )
    }
    assert len(set(speeds.values())) == len(speeds)
    assert speeds["fp8-delayed"] > speeds["fp8-tensorwise"] > speeds["fp8-rowwise"]


def test_the_report_has_every_point_and_its_data() -> None:
    text = "\n".join(section())
    for point in POINTS:
        assert point.name in text
        assert all(source in text for source in point.sources)


def test_the_document_has_the_report_as_it_is_today() -> None:
    text = (ROOT / "docs" / "planner-accuracy.md").read_text("utf-8")
    assert replace_section(text) == text, (
        "run: python -m benchmarks.planner_fit section --out docs/planner-accuracy.md"
    )


def test_what_was_measured_with_recomputation_holds_the_weights_that_are_cached() -> None:
    """The benchmark once modelled this arm without cached weights, and was 2.1 GiB too low."""
    (_, shape, spec), gib = next(MUON.setting.step_specs()), MUON.gib
    without = training_memory(shape, replace(spec, copies="use")).allocated / 2**30
    assert without < 0.92 * gib


def test_gradients_inside_a_half_by_format() -> None:
    """Counted by hand for 124m: D 768, F 2048, q 768, kv 192."""
    _, shape, spec = next(BF16.setting.step_specs())
    assert sublayer_gradient_bytes(Sizes(shape, spec)) == (2 * 768 + 8 * 768 + 4 * 192, 2 * 768 + 6 * 2048)
    fp8 = replace(spec, precision="fp8-delayed")
    assert sublayer_gradient_bytes(Sizes(shape, fp8)) == (6 * 768 + 4 * (768 + 2 * 192), 6 * 768 + 8 * 2048)
    assert sublayer_gradient_bytes(Sizes(shape, replace(fp8, precision="nvfp4")))[1] == 6 * 768 + 12 * 2048
    kept = replace(fp8, precision="nvfp4", kept_blocks=3)
    assert sublayer_gradient_bytes(Sizes(shape, kept)) == sublayer_gradient_bytes(Sizes(shape, spec))


@pytest.mark.parametrize(("rung", "grows"), [("attention", "mlp"), ("mlp", "block")])
def test_a_rung_keeps_less_and_a_half_at_a_time_is_done_again(rung: Any, grows: Any) -> None:
    _, shape, spec = next(BF16.setting.step_specs())
    with_rung, further = (
        instants(shape, replace(spec, activation_checkpointing=name)) for name in (rung, grows)
    )
    assert with_rung["loss"].items["activations"] > further["loss"].items["activations"]
    assert with_rung["backward"].items["workspace"] <= further["backward"].items["workspace"]


def test_bf16_gradients_add_up_inside_of_products() -> None:
    _, shape, spec = next(BF16.setting.step_specs())

    def bytes_of(spec: StepSpec) -> float:
        return next(o.amount for o in step_operators(shape, spec) if o.group == "weights")

    halves = replace(spec, micro_tokens=spec.micro_tokens // 2)
    assert bytes_of(halves) == bytes_of(spec)
    fp8 = replace(halves, precision="fp8-delayed")
    assert bytes_of(fp8) == bytes_of(replace(halves, copies="pass")) == 2 * bytes_of(spec)
