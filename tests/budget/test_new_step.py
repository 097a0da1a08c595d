"""The planner against the hand-written step of 2026-11-21, measured on an H200 (docs/data/2026-11-21-step).

The efficiencies of this step come from the kernels of `124m`, and of Newton-Schulz from Muon's update at 1.5b. Memory
has no constant that was fitted to it; what is counted was counted with these points in sight.
"""

from dataclasses import replace
from typing import Any

import pytest

from benchmarks.planner_new_step import TEACHER, notice, points, runs, unprobed
from deskside.budget.memory import half_gradients, instants, training_memory
from deskside.budget.operators import step_operators
from deskside.budget.work import Work

RATES = unprobed()
POINTS = {point.name: point for point in points()}
BF16, MUON = POINTS["124m, bf16, adamw"], POINTS["1.5b, bf16, muon, block recomputed"]


@pytest.mark.parametrize("name", POINTS)
def test_peaks(name: str) -> None:
    assert POINTS[name].modelled_gib == pytest.approx(POINTS[name].gib, rel=0.01)


@pytest.mark.parametrize("name", POINTS)
def test_speeds(name: str) -> None:
    point = POINTS[name]
    bound = 0.02 if point.preset == TEACHER else 0.06
    assert point.modelled_speed(RATES) == pytest.approx(point.speed, rel=bound)


def test_peaks_of_whole_runs() -> None:
    """Eight recipes with Muon; NVFP4's gradients in the first block's half among them."""
    found = list(runs())
    assert len(found) == 8
    for run in found:
        assert run.modelled_gib == pytest.approx(run.gib, rel=0.01), run.name


def test_the_report_says_that_older_points_are_of_another_step() -> None:
    text = "\n".join(notice())
    assert "before 2026-11-21" in text and all(name in text for name in POINTS)


def test_what_was_measured_with_recomputation_holds_the_weights_that_are_cached() -> None:
    """The benchmark once modelled this arm without them, and was 2.1 GiB too low."""
    shape, work, gib = MUON.shape, MUON.work, MUON.gib
    without = training_memory(shape, replace(work, copies="use")).allocated / 2**30
    assert without < 0.92 * gib


def test_gradients_inside_a_half_by_format() -> None:
    """Counted by hand for 124m: D 768, F 2048, q 768, kv 192."""
    shape, work = BF16.shape, BF16.work
    assert half_gradients(shape, work) == (2 * 768 + 8 * 768 + 4 * 192, 2 * 768 + 6 * 2048)
    fp8 = replace(work, precision="fp8-delayed")
    assert half_gradients(shape, fp8) == (6 * 768 + 4 * (768 + 2 * 192), 6 * 768 + 8 * 2048)
    assert half_gradients(shape, replace(fp8, precision="nvfp4"))[1] == 6 * 768 + 12 * 2048
    kept = replace(fp8, precision="nvfp4", kept_blocks=3)
    assert half_gradients(shape, kept) == half_gradients(shape, work)


@pytest.mark.parametrize(("rung", "grows"), [("attention", "mlp"), ("mlp", "block")])
def test_a_rung_keeps_less_and_a_half_at_a_time_is_done_again(rung: Any, grows: Any) -> None:
    shape, work = BF16.shape, BF16.work
    with_rung, further = (
        instants(shape, replace(work, activation_checkpointing=name)) for name in (rung, grows)
    )
    assert with_rung["loss"].items["activations"] > further["loss"].items["activations"]
    assert with_rung["backward"].items["workspace"] <= further["backward"].items["workspace"]


def test_bf16_gradients_add_up_inside_of_products() -> None:
    shape, work = BF16.shape, BF16.work

    def bytes_of(work: Work) -> float:
        return next(o.amount for o in step_operators(shape, work) if o.group == "weights")

    halves = replace(work, micro_tokens=work.micro_tokens // 2)
    assert bytes_of(halves) == bytes_of(work)
    fp8 = replace(halves, precision="fp8-delayed")
    assert bytes_of(fp8) == bytes_of(replace(halves, copies="pass")) == 2 * bytes_of(work)
