"""Computed answers to claims about whole runs (speed, memory, hours, loss), most of them modelled by the planner."""

from collections.abc import Callable
from functools import partial
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from deskside.budget import loss
from deskside.budget.shape import flops_per_token, matmul_params, num_params
from deskside.budget.step_spec import Precision
from deskside.config import merge, presets
from deskside.config.model import ModelConfig
from deskside.facts import gpus
from deskside.plan.estimate import StepEstimate
from deskside.plan.planner import make_plan
from deskside.plan.question import PlanQuestion
from deskside.plan.request import make_request
from deskside.study.claims.verdicts import Answer

SPEEDRUN_FLOPS = 4.33e19  # of a training run that the document about target architectures uses as a reference
DAY = 24 * 3600.0  # seconds

# Changes to the preset 124m that give the model of the FP8 document.
FP8_MODEL = {"vocab_size": 49152, "tie_word_embeddings": True}

# A mixture of experts with 3.0 billion parameters, 8 experts and 16K context. The document does not give the shape;
# tests/plan/test_claim_check.py checks this one.
MOE = {
    "vocab_size": 50304,
    "hidden_size": 2048,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "max_position_embeddings": 16384,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 2048,
}
MOE_SEQUENCE_LENGTH, MOE_STEPS = 16384, 100_000
MOE_STEP_ROWS, MOE_PASS_ROWS = 32, 2  # sequences per optimizer step and per forward pass


def _estimate(card: str, preset: str, overrides: dict[str, Any], **options: Any) -> StepEstimate:
    """Return the planner's estimate of one setting, without probe results.

    Args:
        overrides: Configuration that replaces the preset's.
        options: Fields of `PlanQuestion`.
    """
    with TemporaryDirectory() as no_probes:
        request = make_request(PlanQuestion(gpu=card, preset=preset, probes=no_probes, **options), overrides)
    estimate = make_plan(request).requested
    assert estimate is not None  # the model is given
    return estimate


def _adamw_batch(rows: int, passes: int = 1, cards: int = 1, fitted: bool = False) -> dict[str, Any]:
    """Return a configuration with AdamW and a step of `passes` forward passes, each with `rows` x 2048 tokens per card.

    fitted: the planner chooses the micro-batch.
    """
    tokens = 2048 * rows
    batch = {"tokens": tokens * passes * cards, "sequence_length": 2048}
    return {
        "batch": batch if fitted else {**batch, "micro_tokens": tokens},
        "optim": {"name": "adamw"},
    }


def _speed(preset: str, fitted: bool = False, cards: int = 1) -> Answer:
    """Return the tokens/s of RTX 5090 cards in FP8 with the guide's batch of 12 x 2048 tokens."""
    setting = _adamw_batch(12, cards=cards, fitted=fitted)
    estimate = _estimate("rtx5090", preset, setting, precision="fp8", gpus=cards)
    on = "RTX 5090" if cards == 1 else f"{cards} x RTX 5090"
    return Answer.modelled(estimate.tokens_per_second, 1.0, f"{preset}, FP8, {on}")


def _fp8_document_estimate(card: str, rows: int, precision: Precision) -> StepEstimate:
    """Estimate the model of the FP8 document on a card, with its step of 16 passes of `rows` x 2048 tokens."""
    return _estimate(card, "124m", {**_adamw_batch(rows, 16), "model": FP8_MODEL}, precision=precision)


def _card_speed(card: str, rows: int, precision: Precision) -> Answer:
    """Return the tokens/s of the model of the FP8 document."""
    estimate = _fp8_document_estimate(card, rows, precision)
    on = f"112M parameters, {rows} x 2048 tokens, {precision.upper()}, {gpus.find(card).name}"
    return Answer.modelled(estimate.tokens_per_second, 1.0, on)


def _memory(rows: int) -> Answer:
    """Return the peak memory in GiB of the model of the FP8 document on an RTX 5090."""
    estimate = _fp8_document_estimate("rtx5090", rows, "fp8")
    return Answer.modelled(estimate.memory_bytes, 1 / 2**30, f"112M parameters, {rows} x 2048 tokens, FP8")


def _speed_ratio(
    ours: StepEstimate, theirs: StepEstimate, on: str, convert: Callable[[float], float] = float
) -> Answer:
    """Return the ratio of two modelled speeds, with the range of all ratios within their ranges.

    convert: converts a ratio to the claim's unit.
    """
    our_low, our_speed, our_high = ours.tokens_per_second
    their_low, their_speed, their_high = theirs.tokens_per_second
    low, value, high = our_low / their_high, our_speed / their_speed, our_high / their_low
    return Answer(convert(low), convert(value), convert(high), "modelled", on)


def _rtx5090_against_a100(
    rows: tuple[int, int], passes: int, on: str, convert: Callable[[float], float]
) -> Answer:
    """Return the speed of an RTX 5090 in FP8 over that of an A100 in BF16. rows: sequences per pass of each card."""
    ours = _estimate("rtx5090", "124m", _adamw_batch(rows[0], passes), precision="fp8")
    theirs = _estimate("a100 40gb", "124m", _adamw_batch(rows[1], passes), precision="bf16")
    return _speed_ratio(ours, theirs, on, convert)


def _against_rtx4090(card: str, precision: Precision) -> Answer:
    """Return the speed of a card over that of an RTX 4090 in BF16.

    The document compares the cards with a 3B model, which does not fit into an RTX 4090, so the preset 340m is used.
    """
    ours = _estimate(card, "340m", _adamw_batch(8, 4), precision=precision)
    theirs = _estimate("rtx4090", "340m", _adamw_batch(8, 4), precision="bf16")
    return _speed_ratio(
        ours, theirs, f"340m, {gpus.find(card).name} in {precision.upper()}, RTX 4090 in BF16"
    )


def _fp8_document_parameters() -> Answer:
    """Return the parameters of the model of the FP8 document in millions."""
    shape = merge.build([*presets.layers("124m"), {"model": FP8_MODEL}]).model
    return Answer.exact(num_params(shape) / 1e6, on="12 layers, 768, 3 key-value heads, 49,152 entries, tied")


def _tokens_over_parameters() -> Answer:
    """Return the relative change of bits per byte of 124M parameters on 100B tokens against the best larger model with
    equal compute.

    Both losses come from the same scaling law, so most of its error cancels. The law gives no range for a ratio.
    """
    params, tokens = matmul_params(merge.build(presets.layers("124m")).model), 100e9
    larger_models = np.geomspace(params, 100 * params, 400)[1:]  # parameters
    best = min(loss.LAW.at(size, params * tokens / size) for size in larger_models)
    return Answer.exact(
        float(loss.LAW.at(params, tokens) / best) - 1, "modelled", "the planner's loss law, equal compute"
    )


def _moe_estimate() -> StepEstimate:
    """Estimate the mixture of experts on an RTX 5090 in BF16 with activation checkpointing."""
    batch = {
        "sequence_length": MOE_SEQUENCE_LENGTH,
        "tokens": MOE_STEP_ROWS * MOE_SEQUENCE_LENGTH,
        "micro_tokens": MOE_PASS_ROWS * MOE_SEQUENCE_LENGTH,
    }
    compute = {"activation_checkpointing": "block"}
    overrides = {"model": MOE, "batch": batch, "optim": {"name": "adamw"}, "compute": compute}
    return _estimate("rtx5090", "124m", overrides)


def _moe_memory_of(*items: str) -> Answer:
    """Return the memory in GB of these items at the peak of a step."""
    estimate = _moe_estimate()
    size = sum(estimate.memory.items[item] for item in items) / 1e9
    low, value, high = (size * total / estimate.memory_bytes[1] for total in estimate.memory_bytes)
    return Answer(low, value, high, "modelled", "the 3B mixture, blocks recomputed")


def _moe_hadamard() -> Answer:
    """Return the milliseconds of the Hadamard transforms of a step, which transform both operands of each weight
    gradient in groups of 16 values.

    Low: fused into casts that read and write the values anyway, so only the operations count, at the card's BF16 rate.
    High: separate passes, which read and write two bytes per value.
    """
    gpu, shape = gpus.find("rtx5090"), ModelConfig(**MOE)
    D, expert_D = shape.hidden_size, MOE["moe_intermediate_size"]
    heads_D, kv_D = shape.num_attention_heads * shape.head_dim, shape.num_key_value_heads * shape.head_dim
    # Values per token: the input and the output gradient of each product.
    attention = (D + heads_D + 2 * kv_D) + (heads_D + D)  # q, k and v; o
    expert = (D + 2 * expert_D) + (expert_D + D)  # gate and up; down
    values_per_token = shape.num_hidden_layers * (attention + MOE["num_experts_per_tok"] * expert)
    values = values_per_token * MOE_STEP_ROWS * MOE_SEQUENCE_LENGTH
    fused = 1e3 * values * 2 * 16 / gpu.bf16_flops  # 16 multiplications and additions per value
    separate = 1e3 * values * 4 / gpu.bandwidth
    return Answer(
        fused, (fused + separate) / 2, separate, "modelled", "RTX 5090, fused into the casts or apart"
    )


def _speedrun_hours() -> Answer:
    """Return the hours for 4.33e19 FLOPs on eight H100, at the modelled speed of the preset d20."""
    estimate = _estimate("h100 sxm", "d20", {}, gpus=8)
    low, value, high = estimate.tokens_per_second
    token_hours = SPEEDRUN_FLOPS / estimate.setting.flops_per_token / 3600  # hours at one token per second
    return Answer(
        token_hours / high, token_hours / value, token_hours / low, "modelled", "d20, BF16, 8 x H100 SXM"
    )


def _moe_ideal_time(convert: Callable[[float], float] = float) -> Answer:
    """Return the time of a step at the card's full FP4 rate. convert: converts seconds to the claim's unit."""
    gpu = gpus.find("rtx5090")
    assert gpu.fp4_flops is not None  # the data sheet has it
    flops = flops_per_token(ModelConfig(**MOE), MOE_SEQUENCE_LENGTH) * MOE_STEP_ROWS * MOE_SEQUENCE_LENGTH
    return Answer.exact(convert(flops / gpu.fp4_flops), on="RTX 5090, all at its FP4 rate")


def _speedrun_share_in_a_day() -> Answer:
    """Return the percentage of 4.33e19 FLOPs that an RTX 4090 computes in a day, at the modelled speed of d16."""
    estimate = _estimate("rtx4090", "d16", {})
    percent_per_speed = 100 * DAY * estimate.setting.flops_per_token / SPEEDRUN_FLOPS
    return Answer.modelled(estimate.tokens_per_second, percent_per_speed, "d16, BF16, RTX 4090")


PLANNED: dict[str, Callable[[], Answer]] = {
    "parameters_112m": _fp8_document_parameters,
    "speed_124m": partial(_speed, "124m"),
    "speed_355m": partial(_speed, "340m"),
    "speed_774m": partial(_speed, "710m", fitted=True),
    "speed_1_5b": partial(_speed, "1.3b", fitted=True),
    "cluster_speed": partial(_speed, "124m", cards=8),
    "cluster_speed_355m": partial(_speed, "340m", cards=8),
    "cluster_speed_774m": partial(_speed, "710m", fitted=True, cards=8),
    "speed_fp8_8_rows": partial(_card_speed, "rtx5090", 8, "fp8"),
    "speed_fp8_18_rows": partial(_card_speed, "rtx5090", 18, "fp8"),
    "speed_bf16_8_rows": partial(_card_speed, "rtx5090", 8, "bf16"),
    "speed_rtx4090": partial(_card_speed, "rtx4090", 8, "bf16"),
    "speed_a100": partial(_card_speed, "a100 40gb", 8, "bf16"),
    "speed_h100": partial(_card_speed, "h100 sxm", 8, "fp8"),
    "rtx5090_against_a100": lambda: _rtx5090_against_a100(
        (18, 16), 16, "124m, RTX 5090 and A100 40GB", lambda ratio: ratio - 1
    ),
    "a100_share": lambda: _rtx5090_against_a100(
        (12, 12), 1, "124m, RTX 5090 in FP8 and A100 40GB in BF16", lambda ratio: 100 * ratio
    ),
    "rtx5090_against_4090": partial(_against_rtx4090, "rtx5090", "fp8"),
    "h100_against_4090": partial(_against_rtx4090, "h100 sxm", "fp8"),
    "a100_against_4090": partial(_against_rtx4090, "a100 80gb sxm", "bf16"),
    "tokens_over_parameters": _tokens_over_parameters,
    "memory_8_rows": partial(_memory, 8),
    "memory_16_rows": partial(_memory, 16),
    "memory_18_rows": partial(_memory, 18),
    "memory_20_rows": partial(_memory, 20),
    "moe_memory": lambda: Answer.modelled(
        _moe_estimate().memory_bytes, 1 / 2**30, "the 3B mixture, blocks recomputed"
    ),
    "moe_gradients": partial(_moe_memory_of, "gradients"),
    "moe_optimizer": partial(_moe_memory_of, "optimizer"),
    "moe_activations": partial(_moe_memory_of, "activations", "logits", "workspace"),
    "moe_hadamard": _moe_hadamard,
    "moe_speed": lambda: Answer.modelled(
        _moe_estimate().tokens_per_second, 1.0, "the 3B mixture, BF16, RTX 5090"
    ),
    "moe_step_seconds": _moe_ideal_time,
    "moe_hours": lambda: _moe_ideal_time(lambda seconds: seconds * MOE_STEPS / 3600),
    "moe_days": lambda: _moe_ideal_time(lambda seconds: seconds * MOE_STEPS / 3600 / 24),
    "day_on_4090": _speedrun_share_in_a_day,
    "speedrun_hours": _speedrun_hours,
}
