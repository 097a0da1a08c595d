"""Answers that the planner models for claims about whole runs: speed, memory, hours, loss."""

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
from deskside.plan.request import PlanQuestion, ask
from deskside.study.claims.verdicts import Answer

SPEEDRUN_FLOPS = 4.33e19
DAY = 24 * 3600.0

# The model of the FP8 document: 49,152 entries, and the head shares the embedding.
FP8_MODEL = {"vocab_size": 49152, "tie_word_embeddings": True}

# The shape was not given: 3.0 billion parameters, 8 experts, 16K context (tests/plan/test_claim_check.py).
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
MOE_ROW, MOE_STEP_ROWS, MOE_PASS_ROWS, MOE_STEPS = 16384, 32, 2, 100_000


def _estimate(card: str, preset: str, overrides: dict[str, Any], **options: Any) -> StepEstimate:
    """Return the planner's estimate of one setting, from data sheets and published runs alone."""
    with TemporaryDirectory() as no_probes:
        request = ask(PlanQuestion(gpu=card, preset=preset, probes=no_probes, **options), overrides)
    found = make_plan(request).asked
    assert found is not None  # the model is given
    return found


def _batch(rows: int, passes: int = 1, gpus_count: int = 1, fitted: bool = False) -> dict[str, Any]:
    """Return AdamW with rows of 2,048 tokens. fitted: the planner chooses the micro-batch."""
    tokens = 2048 * rows
    batch = {"tokens": tokens * passes * gpus_count, "sequence_length": 2048}
    return {
        "batch": batch if fitted else {**batch, "micro_tokens": tokens},
        "optim": {"name": "adamw"},
    }


def _speed(preset: str, fitted: bool = False, cards: int = 1) -> Answer:
    setting = _batch(12, gpus_count=cards, fitted=fitted)
    found = _estimate("rtx5090", preset, setting, precision="fp8", gpus=cards)
    on = "RTX 5090" if cards == 1 else f"{cards} x RTX 5090"
    return Answer.modelled(found.tokens_per_second, 1.0, f"{preset}, FP8, {on}")


def _rows_estimate(card: str, rows: int, precision: Precision) -> StepEstimate:
    """Estimate the model and the batch of the FP8 document, 16 passes of `rows` rows, on a card."""
    return _estimate(card, "124m", {**_batch(rows, 16), "model": FP8_MODEL}, precision=precision)


def _card_speed(card: str, rows: int, precision: Precision) -> Answer:
    found = _rows_estimate(card, rows, precision)
    on = f"112M parameters, {rows} x 2048 tokens, {precision.upper()}, {gpus.find(card).name}"
    return Answer.modelled(found.tokens_per_second, 1.0, on)


def _rows_memory(rows: int) -> Answer:
    found = _rows_estimate("rtx5090", rows, "fp8")
    return Answer.modelled(found.memory_bytes, 1 / 2**30, f"124m, {rows} x 2048 tokens, FP8")


def _speed_ratio(
    ours: StepEstimate, theirs: StepEstimate, on: str, unit: Callable[[float], float] = float
) -> Answer:
    """Return the ratio of two modelled speeds, whose errors are taken as independent, in a unit."""
    (low, value, high), (slow, other, fast) = ours.tokens_per_second, theirs.tokens_per_second
    return Answer(unit(low / fast), unit(value / other), unit(high / slow), "modelled", on)


def _against_a100(rows: tuple[int, int], passes: int, on: str, unit: Callable[[float], float]) -> Answer:
    """Speed of an RTX 5090 in FP8 over that of an A100 in BF16, each with its rows in a pass."""
    ours = _estimate("rtx5090", "124m", _batch(rows[0], passes), precision="fp8")
    theirs = _estimate("a100 40gb", "124m", _batch(rows[1], passes), precision="bf16")
    return _speed_ratio(ours, theirs, on, unit)


def _against_4090(card: str, precision: Precision) -> Answer:
    """Speed of a card as a multiple of an RTX 4090 in BF16. A 3B model fits neither, so 355m is used instead."""
    ours = _estimate(card, "340m", _batch(8, 4), precision=precision)
    theirs = _estimate("rtx4090", "340m", _batch(8, 4), precision="bf16")
    return _speed_ratio(
        ours, theirs, f"340m, {gpus.find(card).name} in {precision.upper()}, RTX 4090 in BF16"
    )


def _parameters_112m() -> Answer:
    shape = merge.build([*presets.layers("124m"), {"model": FP8_MODEL}]).model
    return Answer.exact(num_params(shape) / 1e6, on="12 layers, 768, 3 key-value heads, 49,152 entries, tied")


def _tokens_over_parameters() -> Answer:
    """Relative change of bits per byte: 124M parameters on 100B tokens against the best larger model of equal
    compute.

    Both losses come from one scaling law, so its offset and most of its error cancel. The law gives no range for a
    ratio.
    """
    params, tokens = matmul_params(merge.build(presets.layers("124m")).model), 100e9
    larger = np.geomspace(params, 100 * params, 400)[1:]
    best = min(loss.LAW.at(size, params * tokens / size) for size in larger)
    return Answer.exact(
        float(loss.LAW.at(params, tokens) / best) - 1, "modelled", "the planner's loss law, equal compute"
    )


def _moe() -> StepEstimate:
    batch = {
        "sequence_length": MOE_ROW,
        "tokens": MOE_STEP_ROWS * MOE_ROW,
        "micro_tokens": MOE_PASS_ROWS * MOE_ROW,
    }
    compute = {"activation_checkpointing": "block"}
    overrides = {"model": MOE, "batch": batch, "optim": {"name": "adamw"}, "compute": compute}
    return _estimate("rtx5090", "124m", overrides)


def _moe_item(*items: str) -> Answer:
    """Gigabytes of these items at the peak."""
    found = _moe()
    size = sum(found.memory.items[item] for item in items) / 1e9
    low, value, high = (size * end / found.memory_bytes[1] for end in found.memory_bytes)
    return Answer(low, value, high, "modelled", "the 3B mixture, blocks recomputed")


def _moe_hadamard() -> Answer:
    """Milliseconds of the Hadamard transforms of a step: both operands of each weight gradient, 16 values at a
    time.

    Low: the operations alone at the card's BF16 rate, fused into casts that read and write anyway. High: separate
    passes, which read and write two bytes per value.
    """
    gpu, shape = gpus.find("rtx5090"), ModelConfig(**MOE)
    heads, kv_heads = shape.num_attention_heads * shape.head_dim, shape.num_key_value_heads * shape.head_dim
    # Inputs and output gradients: q, k, v; o; and of each chosen expert gate, up and down.
    attention = shape.hidden_size + heads + 2 * kv_heads + heads + shape.hidden_size
    expert = (
        shape.hidden_size
        + 2 * MOE["moe_intermediate_size"]
        + MOE["moe_intermediate_size"]
        + shape.hidden_size
    )
    values = (
        shape.num_hidden_layers * (attention + MOE["num_experts_per_tok"] * expert) * MOE_STEP_ROWS * MOE_ROW
    )
    fused = 1e3 * values * 2 * 16 / gpu.bf16_flops
    apart = 1e3 * values * 4 / gpu.bandwidth
    return Answer(fused, (fused + apart) / 2, apart, "modelled", "RTX 5090, fused into the casts or apart")


def _speedrun_hours() -> Answer:
    """Hours for 4.33e19 FLOPs on eight H100, at the speed modelled for d20, the deepest preset."""
    found = _estimate("h100 sxm", "d20", {}, gpus=8)
    low, value, high = found.tokens_per_second
    hours = SPEEDRUN_FLOPS / found.setting.flops_per_token / 3600
    return Answer(hours / high, hours / value, hours / low, "modelled", "d20, BF16, 8 x H100 SXM")


def _moe_ideal(unit: Callable[[float], float] = float) -> Answer:
    """Seconds of a step at the card's full FP4 rate, in a unit."""
    gpu = gpus.find("rtx5090")
    assert gpu.fp4_flops is not None  # of the data sheet
    flops = flops_per_token(ModelConfig(**MOE), MOE_ROW) * MOE_STEP_ROWS * MOE_ROW
    return Answer.exact(unit(flops / gpu.fp4_flops), on="RTX 5090, all at its FP4 rate")


def _day_on_4090() -> Answer:
    found = _estimate("rtx4090", "d16", {})
    share = 100 * DAY * found.setting.flops_per_token / SPEEDRUN_FLOPS
    return Answer.modelled(found.tokens_per_second, share, "d16, BF16, RTX 4090")


PLANNED: dict[str, Callable[[], Answer]] = {
    "parameters_112m": _parameters_112m,
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
    "rtx5090_against_a100": lambda: _against_a100(
        (18, 16), 16, "124m, RTX 5090 and A100 40GB", lambda ratio: ratio - 1
    ),
    "a100_share": lambda: _against_a100(
        (12, 12), 1, "124m, RTX 5090 in FP8 and A100 40GB in BF16", lambda ratio: 100 * ratio
    ),
    "rtx5090_against_4090": partial(_against_4090, "rtx5090", "fp8"),
    "h100_against_4090": partial(_against_4090, "h100 sxm", "fp8"),
    "a100_against_4090": partial(_against_4090, "a100 80gb sxm", "bf16"),
    "tokens_over_parameters": _tokens_over_parameters,
    "memory_8_rows": partial(_rows_memory, 8),
    "memory_16_rows": partial(_rows_memory, 16),
    "memory_18_rows": partial(_rows_memory, 18),
    "memory_20_rows": partial(_rows_memory, 20),
    "moe_memory": lambda: Answer.modelled(
        _moe().memory_bytes, 1 / 2**30, "the 3B mixture, blocks recomputed"
    ),
    "moe_gradients": partial(_moe_item, "gradients"),
    "moe_optimizer": partial(_moe_item, "optimizer"),
    "moe_activations": partial(_moe_item, "activations", "logits", "workspace"),
    "moe_hadamard": _moe_hadamard,
    "moe_speed": lambda: Answer.modelled(_moe().tokens_per_second, 1.0, "the 3B mixture, BF16, RTX 5090"),
    "moe_step_seconds": _moe_ideal,
    "moe_hours": lambda: _moe_ideal(lambda seconds: seconds * MOE_STEPS / 3600),
    "moe_days": lambda: _moe_ideal(lambda seconds: seconds * MOE_STEPS / 3600 / 24),
    "day_on_4090": _day_on_4090,
    "speedrun_hours": _speedrun_hours,
}
