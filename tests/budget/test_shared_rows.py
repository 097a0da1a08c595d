"""Rows shared by GPUs: modelled traffic compared with a pass that exchanges keys and values, and memory per GPU."""

import json
import statistics
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.scaling_cases import Case
from benchmarks.step_config import configuration
from deskside.budget.memory import training_memory
from deskside.budget.operators.step import step_operators
from deskside.budget.shape import num_params
from deskside.budget.speed import step_seconds
from deskside.budget.step_spec import StepSpec
from deskside.config.model import ModelConfig
from deskside.config.sections import PrecisionConfig
from deskside.facts.gpus import find
from deskside.kernels.attention import AttentionContext, ContextRanks
from deskside.model.init import initialize
from deskside.model.transformer import Transformer
from deskside.plan.estimate import mean_step_seconds
from deskside.plan.published import uncalibrated_rates
from deskside.plan.setting import setting_from_config
from deskside.precision.convert import convert

SIZES = ModelConfig(
    vocab_size=64, hidden_size=32, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
    intermediate_size=48, max_position_embeddings=64,
)  # fmt: skip
ROWS, T = 2, 64


@dataclass(frozen=True)
class Alone(ContextRanks):
    """Ranks without other processes, whose parts are copies of this one's. Counts the received bytes."""

    received: list[int]

    def gather(self, x_BLKC: Tensor) -> Tensor:
        self.received.append((self.size - 1) * x_BLKC.nbytes)
        return torch.cat([x_BLKC] * self.size, dim=1)

    def sum_parts(self, x_BTKC: Tensor) -> Tensor:
        self.received.append(x_BTKC.nbytes * (self.size - 1) // self.size)
        return self.local(x_BTKC)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("checkpointing", ["none", "attention", "block"])
def test_traffic_is_that_of_a_pass(size: int, checkpointing: str) -> None:
    model = Transformer(SIZES)
    initialize(model, 0)
    precision = convert(model, "bf16", PrecisionConfig(name="bf16"), fused=True)
    precision.set_checkpointing(checkpointing)
    received: list[int] = []
    ranks = Alone(None, 0, size, received)
    tokens = torch.randint(0, 64, (ROWS, T // size))
    context = AttentionContext(backend="gathered", ranks=ranks)
    positions = ranks.local(torch.arange(T)[None])
    model.loss(tokens, tokens, context, positions_BT=positions).backward()
    spec = StepSpec(
        sequence_length=T,
        tokens=ROWS * T,
        micro_tokens=ROWS * T // size,
        gpus=size,
        context=size,
        copies="step",
        activation_checkpointing=checkpointing,  # type: ignore[arg-type]
    )
    (modelled,) = [op.amount for op in step_operators(SIZES, spec) if "shared rows" in op.name]
    assert sum(received) == modelled


def test_a_gpu_keeps_its_part_of_the_activations() -> None:
    """If two GPUs share a row, each keeps half of the activations and of the
    logits, and additional keys and values.
    """
    sizes = SIZES.model_copy(update={"hidden_size": 512, "head_dim": 64})
    whole = StepSpec(sequence_length=1 << 16, tokens=1 << 17, micro_tokens=1 << 16, gpus=2, copies="step")
    half = replace(whole, micro_tokens=1 << 15, context=2)
    before, after = (training_memory(sizes, spec).allocated for spec in (whole, half))
    gathered = 3 * 2 * 2 * 2 * (1 << 15) * sizes.num_key_value_heads * sizes.head_dim
    constant = 32 * num_params(sizes) + (128 << 20)  # weights, gradients, states, copies, libraries
    assert before / 2 <= after <= before / 2 + gathered + constant < before


def test_a_part_of_rows_must_add_up_to_rows() -> None:
    with pytest.raises(ValueError, match="not a multiple of the sequence length"):
        StepSpec(sequence_length=64, tokens=96, micro_tokens=48, gpus=2, context=2)


DATA = Path(__file__).parents[2] / "docs" / "data" / "2026-11-28-scaling"
MEASURED, MEASURED_WITH_CUDNN = (DATA / lease / "measured.jsonl" for lease in ("third", "fourth"))


@pytest.mark.parametrize("preset", ["340m", "indicmoe-3b"])
def test_flash_attention_of_shared_rows_is_modelled_as_it_was_measured(preset: str) -> None:
    """One row of 65,536 tokens on two H200. The two factors were fitted to these cases, so only the step is evidence.

    Those runs had no documents; FlashAttention takes as long with documents that are whole rows.
    """
    rows = map(json.loads, MEASURED.read_text("utf-8").splitlines())
    (row,) = (row for row in rows if row["preset"] == preset and row["mode"] == "context")
    case = Case(**{field.name: row[field.name] for field in fields(Case)})
    given: dict[str, Any] = {"preset": case.preset, "optimizer": case.optimizer, "config": case.config()}
    rates, speeds = uncalibrated_rates(find("h200")), []
    for mask in (False, True):
        given["config"]["data"] = {"document_mask": mask}
        setting = setting_from_config(configuration(given), 2, "bf16")
        assert setting.flash_chunks is mask
        step = mean_step_seconds(setting, rates)
        speeds.append(case.tokens / sum(step.values()))
    traced = statistics.fmean(rank["kinds_ms"]["attention"] for rank in row["profile"]) / 1e3
    assert step["attention"] == pytest.approx(traced, rel=0.01)
    assert speeds[1] == pytest.approx(row["p50"], rel=0.06)
    assert speeds[0] > 1.4 * speeds[1]


def test_cudnn_of_shared_rows_is_modelled_as_it_was_measured() -> None:
    """At head_dim 64, to which the factor was fitted: only the step is evidence."""
    (row,) = map(json.loads, MEASURED_WITH_CUDNN.read_text("utf-8").splitlines())
    case = Case(**{field.name: row[field.name] for field in fields(Case)})
    given = {"preset": case.preset, "optimizer": case.optimizer, "config": case.config()}
    step = mean_step_seconds(
        setting_from_config(configuration(given), 2, "bf16"), uncalibrated_rates(find("h200"))
    )
    traced = statistics.fmean(rank["kinds_ms"]["attention"] for rank in row["profile"]) / 1e3
    assert step["attention"] == pytest.approx(traced, rel=0.01)
    assert case.tokens / sum(step.values()) == pytest.approx(row["p50"], rel=0.09)


def test_only_hopper_has_a_rate_of_flash_attention_for_shared_rows() -> None:
    spec = StepSpec(sequence_length=1 << 16, tokens=1 << 16, micro_tokens=1 << 15, gpus=2, context=2)
    for gpu, slower in (("rtx4090", False), ("h200", True)):
        rates = uncalibrated_rates(find(gpu))
        seconds = [
            step_seconds(SIZES, replace(spec, flash_chunks=flash), rates)["attention"]
            for flash in (False, True)
        ]
        assert (seconds[1] > seconds[0]) is slower
    windowed = SIZES.model_copy(update={"sliding_window": 512, "window_pattern": "S"})
    seconds = [
        step_seconds(windowed, replace(spec, flash_chunks=flash), rates)["attention"]
        for flash in (False, True)
    ]
    assert seconds[0] == seconds[1]
