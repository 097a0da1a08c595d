"""What arithmetic answers of others' claims: data sheets, exact bytes, the planner's models, prices. It needs no trial.

`FORMULAS` maps the `formula` of a claim (facts/claims.toml) to its answer. An answer's `source` says what it rests on:
"arithmetic", "data sheet", "modelled" (budget/ and plan/, never a measurement on the card named) or "published prices".
Modelled answers have a range, as plans have. answers_planned.py and answers_money.py have those of runs and of money.
"""

from collections.abc import Callable
from functools import cache

from deskside.budget.memory import training_memory
from deskside.budget.shape import kv_bytes_per_token
from deskside.budget.step_spec import Precision, StepSpec
from deskside.config import merge, presets
from deskside.config.model import ModelConfig
from deskside.facts import gpus
from deskside.study.claims.answers import Answer, Formula, exact
from deskside.study.claims.answers_money import CLAIMED_CLUSTER_SPEED, GPT2_TOKENS, MONEY
from deskside.study.claims.answers_planned import PLANNED

NVFP4_BITS = 4 + 8 / 16  # a value, and its share of an 8-bit scale for 16 values


@cache
def answer(formula: str) -> Answer:
    """Return the answer of a formula, computed once. Raises KeyError for one that there is none of."""
    return FORMULAS[formula]()


# Bytes


def _kv_cache(heads: int, shared_by: int) -> Callable[[], Answer]:
    """Change of the cache of a model with `heads` heads when `shared_by` of them share their keys and values."""

    def formula() -> Answer:
        def bytes_with(kv_heads: int) -> float:
            shape = ModelConfig(num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=64)
            return kv_bytes_per_token(shape, 2)

        return exact(bytes_with(heads // shared_by) / bytes_with(heads) - 1, on=f"{heads} heads")

    return formula


def _fp4_storage() -> Answer:
    return exact(NVFP4_BITS / 16 - 1, on="against 16-bit weights")


def _fp4_weights_3b() -> Answer:
    return exact(3e9 * NVFP4_BITS / 8 / 1e9, on="3 billion parameters")


def _mixed_precision_memory() -> Answer:
    shape = merge.build(presets.layers("medium")).model

    def peak(precision: Precision) -> int:
        work = StepSpec(512, 16 * 512, 16 * 512, optimizer="adamw", precision=precision, compiled=False)
        return training_memory(shape, work).allocated

    return exact(peak("bf16") / peak("fp32") - 1, "modelled", "medium, plain torch")


# Data sheets


def _sheet(card: str, number: Callable[[gpus.Gpu], float | None]) -> Callable[[], Answer]:
    def formula() -> Answer:
        gpu = gpus.find(card)
        return exact(number(gpu) or 0.0, "data sheet", gpu.name)

    return formula


def _time(tokens: float, unit_seconds: float, tokens_per_second: float, on: str) -> Callable[[], Answer]:
    """How long so many tokens take at a document's own speed."""
    return lambda: exact(tokens / tokens_per_second / unit_seconds, on=on)


FORMULAS: dict[str, Formula] = {
    "kv_cache_gqa4": _kv_cache(12, 4),
    "kv_cache_gqa8": _kv_cache(16, 8),
    "kv_cache_mqa": _kv_cache(12, 12),
    "fp4_storage": _fp4_storage,
    "fp4_weights_3b": _fp4_weights_3b,
    "mixed_precision_memory": _mixed_precision_memory,
    "bandwidth_rtx5090": _sheet("rtx5090", lambda gpu: gpu.bandwidth / 1e12),
    "board_power_rtx5090": _sheet("rtx5090", lambda gpu: gpu.watts),
    "cores_rtx5090": _sheet("rtx5090", lambda gpu: 128 * gpu.multiprocessors),
    "capability_rtx5090": _sheet("rtx5090", lambda gpu: float(gpu.compute_capability)),
    "memory_rtx5090": _sheet("rtx5090", lambda gpu: gpu.memory_bytes / 2**30),
    "memory_rtx4090": _sheet("rtx4090", lambda gpu: gpu.memory_bytes / 2**30),
    "memory_h100": _sheet("h100 sxm", lambda gpu: gpu.memory_bytes / 2**30),
    "memory_a100": _sheet("a100 80gb sxm", lambda gpu: gpu.memory_bytes / 2**30),
    "fp8_rate_rtx4090": _sheet("rtx4090", lambda gpu: (gpu.fp8_flops or 0.0) / 1e12),
    "fp4_rate_h100": _sheet("h100 sxm", lambda gpu: (gpu.fp4_flops or 0.0) / 1e12),
    "price_rtx5090": _sheet("rtx5090", lambda gpu: gpu.msrp_usd),
    "price_rtx4090": _sheet("rtx4090", lambda gpu: gpu.msrp_usd),
    "price_h100": _sheet("h100 sxm", lambda gpu: gpu.msrp_usd),
    "price_a100": _sheet("a100 80gb sxm", lambda gpu: gpu.msrp_usd),
    "cluster_efficiency": lambda: exact(100 * 1.3e6 / (8 * 185_000), on="1.3M of 8 x 185,000 tokens/s"),
    "hours_of_49b": _time(GPT2_TOKENS, 3600, CLAIMED_CLUSTER_SPEED, "1.3M tokens/s"),
    "hours_of_25b": _time(25e9, 3600, CLAIMED_CLUSTER_SPEED, "1.3M tokens/s"),
    "minutes_of_2_5b": _time(2.5e9, 60, CLAIMED_CLUSTER_SPEED, "1.3M tokens/s"),
    "minutes_of_100m": _time(100e6, 60, 185_000, "185,000 tokens/s"),
    "hours_in_all": lambda: Answer(13.5, 14.0, 14.5, "arithmetic", "10.5 + 1 + 2 to 3 hours"),
    "chinchilla_tokens": lambda: exact(20 * 124e6 / 1e9, on="20 tokens for each of 124M parameters"),
    "casts_saved": lambda: exact(16 - 1, on="one cast instead of 16 in a step of 16 passes"),
    "moe_sum": lambda: exact(3 + 3 + 6 + 8 + 4, on="the document's own items"),
    "moe_use": lambda: exact(100 * 28 / 32, on="28 of 32 GB"),
    "rent_saving": lambda: exact(100 * (1 - 0.50 / 0.79), on="$0.50 and $0.79 per hour"),
    **PLANNED,
    **MONEY,
}
