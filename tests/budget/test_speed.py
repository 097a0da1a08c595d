"""The operator model of a step, compared with steps measured on a GPU and with counting by hand."""

import json
from pathlib import Path
from typing import Any

import pytest

from deskside.budget.operators.step import step_operators
from deskside.budget.operators.update import newton_schulz_flops
from deskside.budget.shape import block_matrix_params, flops_per_token, parameter_groups
from deskside.budget.speed import ITEMS, Efficiency, Rates, step_seconds, tokens_per_second
from deskside.budget.step_spec import StepSpec
from deskside.config.model import ModelConfig

POINTS = Path(__file__).parents[2] / "docs/data/2026-11-20-planner/h200_points.jsonl"
H200 = Rates(matmul_flops=790e12, bandwidth=4.8e12)
WORK = StepSpec(2048, 65536, 16384)


def measured() -> list[tuple[ModelConfig, StepSpec, float]]:
    found = []
    for row in map(json.loads, POINTS.read_text("utf-8").splitlines()):
        spec = row["spec"]
        if row["status"] == "ok" and "card" not in spec:
            work = StepSpec(
                spec["sequence_length"],
                spec["tokens"],
                spec["micro_tokens"],
                optimizer=spec["optimizer"],
                activation_checkpointing=spec["activation_checkpointing"],
            )
            found.append((ModelConfig(**spec["model"]), work, row["result"]["tokens_per_second"]))
    return found


def test_measured_steps() -> None:
    """63 configurations on an H200. Half of them gave the constants; benchmarks/ decides which half."""
    errors = sorted(
        abs(tokens_per_second(shape, work, H200) / speed - 1) for shape, work, speed in measured()
    )
    assert len(errors) == 63
    assert errors[31] < 0.03
    assert errors[int(0.9 * 63)] < 0.08


@pytest.mark.parametrize("rung", ["none", "attention", "mlp", "block"])
def test_products_and_attention_are_the_flops_of_the_convention(rung: Any) -> None:
    """Operators that are not recomputed add up to budget.shape's FLOPs per token. A
    recomputed block adds a third of its FLOPs.
    """
    shape = ModelConfig()
    operators = step_operators(shape, StepSpec(2048, 65536, 16384, activation_checkpointing=rung))
    counted = [o for o in operators if o.group in ("matmul", "head", "attention")]
    first = sum(o.amount for o in counted if not o.recompute)
    again = sum(o.amount for o in counted if o.recompute)
    assert first == pytest.approx(65536 * flops_per_token(shape, 2048))
    head = 6 * shape.hidden_size * shape.vocab_size * 65536
    whole = (first - head) / 3
    assert again == pytest.approx(whole if rung == "block" else again)
    assert (again == 0) == (rung == "none")


def test_block_matrices_are_what_parameter_groups_count() -> None:
    for shape in (
        ModelConfig(),
        ModelConfig(gated_mlp=False, hidden_act="gelu"),
        ModelConfig(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=128),
    ):
        groups = parameter_groups(shape)
        assert block_matrix_params(shape) == groups["attention"] + groups["mlp"]


def test_newton_schulz_of_one_square_matrix() -> None:
    """Each iteration has X^T X, its square, and X times that: three products of n^3 multiply-adds."""
    n = 64
    shape = ModelConfig(
        hidden_size=n, num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1, head_dim=n,
        intermediate_size=n,
    )  # fmt: skip
    assert newton_schulz_flops(shape) == 7 * 5 * 6 * n**3


def test_every_item_is_there_and_recompute_costs() -> None:
    shape = ModelConfig()
    plain = step_seconds(shape, WORK, H200)
    again = step_seconds(shape, StepSpec(2048, 65536, 16384, activation_checkpointing="block"), H200)
    assert tuple(plain) == ITEMS
    assert plain["recompute"] == plain["communication"] == 0 < again["recompute"]
    assert sum(again.values()) > sum(plain.values())


def test_more_gpus_share_the_tokens_and_talk() -> None:
    shape = ModelConfig()
    one = step_seconds(shape, StepSpec(2048, 131072, 16384), H200)
    two = step_seconds(shape, StepSpec(2048, 131072, 16384, gpus=2), H200)
    sharded = step_seconds(shape, StepSpec(2048, 131072, 16384, gpus=2, sharded=True), H200)
    assert two["matmul"] == pytest.approx(one["matmul"] / 2)
    assert 0 < two["communication"] < sharded["communication"]


def test_rates_correct_groups_and_fp8_needs_a_card_that_has_it() -> None:
    shape = ModelConfig()
    before, after = step_seconds(shape, WORK, H200), step_seconds(shape, WORK, H200.corrected(2.0, 1.0, 3.0))
    assert after["matmul"] == pytest.approx(2 * before["matmul"])
    assert after["traffic"] == pytest.approx(before["traffic"])
    assert after["launches"] == pytest.approx(3 * before["launches"])
    with pytest.raises(ValueError, match="no FP8"):
        step_seconds(shape, StepSpec(2048, 65536, 16384, precision="fp8"), H200)


def test_fp32_is_priced_beside_the_tensor_cores() -> None:
    """With the 67 TFLOP/s of an H200's data sheet, products take that much longer. Muon's stay in bfloat16."""
    shape, work = ModelConfig(), StepSpec(2048, 65536, 16384, precision="fp32")
    rates = Rates(790e12, 4.8e12, single_flops=67e12)
    slow, fast = step_seconds(shape, work, rates), step_seconds(shape, WORK, rates)
    assert slow["matmul"] == pytest.approx(fast["matmul"] * 790 / 67)
    assert slow["optimizer"] == pytest.approx(fast["optimizer"])
    # Otherwise, matmul_flops is FP32's.
    assert step_seconds(shape, work, H200)["matmul"] == pytest.approx(fast["matmul"])


def test_attention_efficiency_between_and_beyond_the_measured_widths() -> None:
    e = Efficiency()
    assert e.attention(64) == pytest.approx(e.attention_64)
    assert e.attention(96) == pytest.approx((e.attention_64 + e.attention_128) / 2)
    assert e.attention(128) == e.attention(256) == pytest.approx(e.attention_128)
    assert e.attention(32) == pytest.approx(e.attention_64 / 2)


@pytest.mark.parametrize(
    ("head_dim", "tflops"),
    [(128, [324.8, 420.9, 494.3, 544.3, 589.1]), (64, [234.5, 304.0, 360.3, 402.1, 445.0])],
)
def test_attention_over_long_rows(head_dim: int, tflops: list[float]) -> None:
    """TFLOP/s of cuDNN, forward and backward, for rows of 1,024 to 16,384 tokens (benchmarks/attention.py)."""
    e = Efficiency()
    for doubling, measured in enumerate(tflops):
        gain = e.attention(head_dim, 1024 * 2**doubling) / e.attention(head_dim, 2048)
        assert gain == pytest.approx(measured / tflops[1], rel=0.07)
