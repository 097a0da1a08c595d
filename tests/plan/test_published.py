"""Calibration from published runs: the split, the two-way fit, and its errors on the held-out half."""

import dataclasses
import subprocess
import sys
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.planner_published import held_out, memories, section
from deskside.budget.shape import num_params
from deskside.budget.speed import tokens_per_second
from deskside.budget.step_spec import StepSpec
from deskside.config.model import ModelConfig
from deskside.facts.gpus import find, gpus
from deskside.facts.measurements import Measurement, published
from deskside.plan.calibrate import OTHERS_MEMORY_ERROR, calibrate
from deskside.plan.published import (
    FIRST_KERNELS,
    MAX_SEQUENCE,
    SECOND_KERNELS,
    architecture_factor,
    attention_share,
    calibration_split,
    fit_speed_factors,
    matmul_rate,
    modelled_speed,
    published_fp8_speedup,
    shape_of,
    speed_factors,
    step_of,
    uncalibrated_rates,
    usable,
)

CARDS = ("H100 SXM", "RTX 4090", "A100 80GB SXM", "RTX 5090")
TRAINERS = ("one", "two", "three")


def made(card: str, trainer: str, speed: float) -> Measurement:
    """Return a usable row of another GPU and trainer that ran `speed` times as fast as modelled."""
    row, model = template(card)
    return dataclasses.replace(row, framework=trainer, tokens_per_second=speed * model)


@cache
def template(card: str) -> tuple[Measurement, float]:
    """Return a usable row with another GPU, and its modelled speed there."""
    row = next(row for row in calibration_split()[0] if row.gpus == 1 and row.precision == "bf16")
    row = dataclasses.replace(row, card=card)
    return row, modelled_speed(row)


def test_hopper_is_the_anchor() -> None:
    """deskside was measured there, so nothing published may change it."""
    assert speed_factors().architectures["Hopper"] == 1.0
    for card in ("h200", "h100 sxm", "h100 pcie"):
        assert architecture_factor(find(card))[0] == 1.0


@settings(max_examples=8, deadline=None, derandomize=True)
@given(
    st.lists(st.floats(0.5, 2.0), min_size=3, max_size=3),
    st.lists(st.floats(0.5, 2.0), min_size=3, max_size=3),
    st.data(),
)
def test_planted_parts_are_found(
    trainers: list[float], architectures: list[float], data: st.DataObject
) -> None:
    """In any table of trainers x architectures, with some cells missing (but not the
    anchor's), one bad row per cell does no harm.
    """
    of_trainer = dict(zip(TRAINERS, trainers, strict=True))
    of_card = dict(zip(CARDS, [1.0, *architectures], strict=True))
    spoiled = data.draw(st.sampled_from(CARDS))
    rows = [
        made(card, trainer, of_trainer[trainer] * of_card[card])
        for card in CARDS
        for trainer in TRAINERS
        for _ in range(2)
    ]
    rows.append(made(spoiled, "one", 10 * of_trainer["one"] * of_card[spoiled]))
    found = fit_speed_factors(rows)
    for trainer, part in of_trainer.items():
        assert found.trainers[trainer] == pytest.approx(part, rel=1e-6)
    for card, part in of_card.items():
        assert found.architectures[find(card).architecture] == pytest.approx(part, rel=1e-6)
    assert found.rows["Hopper"] == (7 if spoiled == "H100 SXM" else 6)


def test_the_split_is_by_place_alone() -> None:
    """Every usable row is in one half, the halves alternate within each architecture and
    precision, and repeating it gives the same.
    """
    calibrating, kept = calibration_split()
    usable_rows = [row for row in published() if usable(row)]
    assert len(calibrating) + len(kept) == len(usable_rows) > 100
    assert calibration_split() == (calibrating, kept)
    places: dict[tuple[str, str], list[bool]] = {}
    ids = {id(row) for row in calibrating}
    for row in usable_rows:
        gpu = row.data_sheet()
        assert gpu is not None
        places.setdefault((gpu.architecture, row.precision), []).append(id(row) in ids)
    for halves in places.values():
        assert halves == [place % 2 == 0 for place in range(len(halves))]


def test_no_kept_out_row_has_a_part_in_the_fit() -> None:
    again = fit_speed_factors(row for row in calibration_split()[0] if row.precision == "bf16")
    assert again == speed_factors()
    assert (
        fit_speed_factors(row for part in calibration_split() for row in part if row.precision == "bf16")
        != speed_factors()
    )


def test_usable_rows_are_plain_runs() -> None:
    for row in published():
        if usable(row):
            assert not row.rejected
            assert (row.sequence_length or 0) <= MAX_SEQUENCE
            assert "offload" not in row.saving.lower()
            assert "recompute" not in row.saving.lower()
            spec, shape = step_of(row), shape_of(row)
            assert spec.gpus == row.gpus
            assert shape.num_hidden_layers == row.layers


def test_shapes_have_the_published_parameters() -> None:
    """They agree within 15 % where the published number counts the same
    parameters, apart from tied and value embeddings.
    """
    compared = 0
    for row in published():
        if usable(row) and row.params and "Qwen2.5-7B" in row.model:
            compared += 1
            assert num_params(shape_of(row)) == pytest.approx(row.params, rel=0.01)
    assert compared


@pytest.mark.parametrize(("precision", "rows"), [("bf16", 46), ("fp8", 17)])
def test_nine_in_ten_kept_out_rows_are_in_the_stated_range(precision: str, rows: int) -> None:
    """The range is the planner's for each row's GPU, with the trainer's part. Issue 3 allows 30 %."""
    chosen = [s for s in held_out() if s.row.precision == precision]
    assert len(chosen) == rows
    inside = 0
    for speed in chosen:
        gpu = speed.row.data_sheet()
        assert gpu is not None
        inside += abs(speed.predicted / speed.measured - 1) <= calibrate(gpu, []).speed_spread
    assert inside >= 0.9 * rows
    within = sum(abs(s.predicted / s.measured - 1) <= 0.30 for s in chosen)
    assert within >= 0.9 * rows


def test_both_parts_are_needed() -> None:
    """Without them, the speed of our own step is a third off for one in ten."""
    chosen = [s for s in held_out() if s.row.precision == "bf16"]
    bare = sorted(abs(s.model / s.measured - 1) for s in chosen)
    fine = sorted(abs(s.predicted / s.measured - 1) for s in chosen)
    assert bare[int(0.9 * len(bare))] > 1.3 * fine[int(0.9 * len(fine))]


def test_a_calibration_is_a_factor_of_the_data_sheet() -> None:
    """The planner's tokens per second on a 4090 are the architecture's factor
    times the model's, apart from the delays.
    """
    row = next(r for r in calibration_split()[1] if r.card == "RTX 4090" and r.precision == "bf16")
    gpu = find("rtx4090")
    factor, basis = architecture_factor(gpu)
    speed = tokens_per_second(shape_of(row), step_of(row), calibrate(gpu, []).rates)
    assert speed == pytest.approx(factor * modelled_speed(row), rel=0.03)
    assert "published runs on Ada" in basis


def test_rates_without_a_measurement_come_from_the_sheet() -> None:
    known, unknown = find("rtx4090"), find("rtx 4060 ti 16gb")
    assert matmul_rate(known) == known.measured_bf16_flops
    other = dataclasses.replace(unknown, measured_bf16_flops=None)
    assert 0.95 * other.bf16_flops < matmul_rate(other) < 1.1 * other.bf16_flops
    data_centre = dataclasses.replace(find("h200"), measured_bf16_flops=None)
    assert 0.7 * data_centre.bf16_flops < matmul_rate(data_centre) < 0.9 * data_centre.bf16_flops
    assert uncalibrated_rates(find("rtx 3090")).low_precision_flops is None


def test_links_are_those_of_the_data_sheet_for_every_card() -> None:
    """There is no rule by name: the MI300X and the PRO 6000 once had 22 GB/s, the link of a PCIe 4.0 card."""
    for gpu in gpus():
        rates = uncalibrated_rates(gpu)
        nominal = gpu.fabric_bandwidth or gpu.pcie_bandwidth
        assert 0.6 * nominal < rates.link_bandwidth < nominal
        assert rates.host_bandwidth == pytest.approx(0.8 * gpu.pcie_bandwidth)
    assert uncalibrated_rates(find("mi300x")).link_bandwidth > 300e9
    assert (
        uncalibrated_rates(find("pro 6000")).link_bandwidth
        == 2 * uncalibrated_rates(find("rtx4090")).link_bandwidth
    )


def test_attention_of_published_runs_is_that_of_their_kernels() -> None:
    """Every kernel in the table has a generation. A new name must get one, or be declared to be like ours."""
    ours = {"cuDNN", "cuDNN flash", "FA3", "FA3 window SSSL", "FA", "SDPA (window L)"}
    for row in published():
        if usable(row):
            assert row.attention in {*FIRST_KERNELS, *SECOND_KERNELS, *ours}, row.attention
    row = next(r for r in published() if usable(r) and r.attention == "FlashAttention")
    assert attention_share(row, find("h100 sxm")) < attention_share(row, find("a100 80gb sxm")) == 0.5


def test_kept_out_rows_and_the_issues_target() -> None:
    """Issue 13 requires a median of at most 7 % and a maximum of at most 25 %. One row misses the maximum.

    It is MPT-760m at 512 tokens on A100 80GB, which its authors measured slower than at 2,048.
    """
    errors = sorted(((abs(s.predicted / s.measured - 1), s) for s in held_out()), key=lambda pair: pair[0])
    assert len(errors) == 63
    assert errors[31][0] < 0.05 and errors[56][0] < 0.15
    assert errors[-2][0] < 0.20 < errors[-1][0] < 0.36
    assert (errors[-1][1].row.model, errors[-1][1].row.sequence_length) == ("MPT-760m", 512)


def test_published_memory_is_of_the_right_size() -> None:
    """All rows that are comparable with our step are within 30 %, and half are
    within 10 %. Issue 3's 15 % is missed.
    """
    rows = [m for m in memories() if m.modelled is not None]
    errors = sorted(abs(m.modelled / m.measured - 1) for m in rows if m.modelled is not None)
    assert len(errors) == 9
    assert errors[-1] < 0.30
    assert errors[4] < 0.10
    assert round(errors[-1], 2) == OTHERS_MEMORY_ERROR  # which plans say
    assert all(m.differences for m in memories() if m.modelled is None)


def test_every_kept_out_row_is_in_the_report() -> None:
    text = "\n".join(section())
    table = text.split("### Every held-out row")[1].split("## Published measurements: memory")[0]
    lines = [line for line in table.splitlines() if line.startswith("| ") and "---" not in line]
    assert len(lines) - 1 == len(calibration_split()[1])
    for line in lines[1:]:
        error = float(line.split("|")[9].strip(" *%")) / 100
        assert ("miss" in line) == (abs(error) > 0.30)


def test_no_torch() -> None:
    code = "import sys, benchmarks.planner_published as p; p.section(); sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("precision", "kept", "published"), [("bf16", 0, 21_919), ("fp8", 0, 28_084), ("nvfp4", 5, 30_040)]
)
def test_formats_against_an_8b_model_on_a_b200(precision: Any, kept: int, published: float) -> None:
    """torchtitan's Llama 3 8B in BF16, MXFP8, and NVFP4 with the last 15 % of blocks in BF16
    (torchtitan/components/quantization/nvfp4.md). No part of the model was fitted to these, or to any NVFP4.
    """
    shape = ModelConfig(
        vocab_size=128256, hidden_size=4096, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=8, head_dim=128, intermediate_size=14336, max_position_embeddings=8192,
    )  # fmt: skip
    spec = StepSpec(8192, 8 * 8192, 8192, optimizer="adamw", precision=precision, kept_blocks=kept)
    assert tokens_per_second(shape, spec, uncalibrated_rates(find("b200"))) == pytest.approx(
        published, rel=0.1
    )


@pytest.mark.parametrize(
    ("card", "params", "speed"),
    [
        ("rtx4090", 494e6, 47645 / 39845),  # llmq benchmarks/4090x1.md
        ("rtx4090", 1543.6e6, 20333 / 14070),
        ("rtx5090", 112.1e6, 191 / 165),  # yxanul_0.6B EXPERIMENTS_FP8.md
    ],
)
def test_the_published_pairs(card: str, params: float, speed: float) -> None:
    found = published_fp8_speedup(find(card), params)
    assert found is not None
    assert found.speed == pytest.approx(speed, rel=0.01)
    assert found.source.startswith("published")


def test_between_sizes_it_grows_and_outside_it_stays() -> None:
    card = find("rtx4090")
    speeds = [published_fp8_speedup(card, size).speed for size in (1e8, 4.94e8, 9e8, 1.5436e9)]  # type: ignore[union-attr]
    assert speeds[0] == speeds[1] < speeds[2] < speeds[3]


def test_a_card_without_fp8_has_none_and_a_relative_is_named() -> None:
    assert published_fp8_speedup(find("rtx3090"), 1e9) is None
    relative = published_fp8_speedup(find("rtx4080"), 1e9)
    assert relative is not None and "4090" in relative.source
