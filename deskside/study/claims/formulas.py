"""Computed answers to claims that compare no trials: exact bytes, data sheets, electricity, prices and rents.

`FORMULAS` maps the `formula` of a claim (facts/claims.toml) to a function that returns its `Answer`. Answers about
whole runs are modelled by the planner and have a range, as plans have (planned_formulas.py). None is a measurement.
"""

from collections.abc import Callable
from functools import cache, partial

from deskside.budget.memory import training_memory
from deskside.budget.running_costs import (
    gpu_watts,
    kilowatt_hours,
    own_or_rent,
    per_billion_tokens,
    wall_watts,
)
from deskside.budget.shape import kv_bytes_per_token
from deskside.budget.step_spec import Precision, StepSpec
from deskside.config import merge, presets
from deskside.config.model import ModelConfig
from deskside.facts import gpus
from deskside.facts.power_and_prices import rental_prices
from deskside.study.claims.planned_formulas import PLANNED
from deskside.study.claims.verdicts import Answer

NVFP4_BITS = 4 + 8 / 16  # a value, and its share of an 8-bit scale for 16 values
CLAIMED_PRICE = 0.10  # dollars per kWh, as the guide reckons
CLAIMED_CLUSTER_SPEED = 1.3e6  # tokens/s of its eight cards, as the guide reckons with
GPT2_TOKENS = 49e9


# Bytes


def _kv_cache(heads: int, shared_by: int) -> Answer:
    """Change of the KV cache when `shared_by` of `heads` heads share their keys and values."""

    def bytes_with(kv_heads: int) -> float:
        shape = ModelConfig(num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=64)
        return kv_bytes_per_token(shape, 2)

    return Answer.exact(bytes_with(heads // shared_by) / bytes_with(heads) - 1, on=f"{heads} heads")


def _mixed_precision_memory() -> Answer:
    shape = merge.build(presets.layers("medium")).model

    def peak(precision: Precision) -> int:
        work = StepSpec(512, 16 * 512, 16 * 512, optimizer="adamw", precision=precision, compiled=False)
        return training_memory(shape, work).allocated

    return Answer.exact(peak("bf16") / peak("fp32") - 1, "modelled", "medium, plain torch")


def _sheet(card: str, number: Callable[[gpus.Gpu], float | None]) -> Answer:
    """A number of a card's data sheet."""
    gpu = gpus.find(card)
    return Answer.exact(number(gpu) or 0.0, "data sheet", gpu.name)


def _time(tokens: float, unit_seconds: float, tokens_per_second: float, on: str) -> Answer:
    """Time to train on so many tokens at the speed that the document claims."""
    return Answer.exact(tokens / tokens_per_second / unit_seconds, on=on)


# Electricity, rents and prices


def _cluster_kilowatts() -> Answer:
    """Power at the wall of eight cards."""
    wall = wall_watts(gpu_watts(gpus.find("rtx5090")), 8)
    return Answer.modelled((wall.low, wall.expected, wall.high), 1e-3, "8 x RTX 5090 with their host")


def _dollars(hours: float, cards: int = 8, longest: float | None = None) -> Answer:
    """Cost of electricity for `hours` to `longest` hours, at the documents' price."""
    wall = wall_watts(gpu_watts(gpus.find("rtx5090")), cards)
    longest = hours if longest is None else longest
    low, shorter, _ = kilowatt_hours(wall, hours, hours, hours)
    _, longer, high = kilowatt_hours(wall, longest, longest, longest)
    kwh = (low, (shorter + longer) / 2, high)
    return Answer.modelled(kwh, CLAIMED_PRICE, f"{cards} x RTX 5090, $0.10 per kWh")


def _cost_of(tokens: float) -> Answer:
    return _dollars(tokens / CLAIMED_CLUSTER_SPEED / 3600)


def _total_cost() -> Answer:
    """Cost of the guide's whole pipeline: 10.5 hours of eight cards, then one of SFT and two to three of DPO on one."""
    parts = _cost_of(GPT2_TOKENS), _dollars(1.0, 1), _dollars(2.0, 1, 3.0)
    low, value, high = (sum(ends) for ends in zip(*((p.low, p.value, p.high) for p in parts), strict=True))
    return Answer(low, value, high, "modelled", "10.5 h of 8 x RTX 5090, 3 to 4 h of one, $0.10 per kWh")


def _rented_per_billion(dollars: float, tokens_per_second: float) -> Answer:
    on = f"${dollars} per hour, {tokens_per_second:,.0f} tokens/s"
    return Answer.exact(per_billion_tokens(dollars, tokens_per_second), on=on)


def _rent_against_own(dollars: float, tokens_per_second: float, inverse: bool = False) -> Answer:
    """Rent per billion tokens as a multiple of the cost of electricity; inverse: electricity in percent of rent."""
    rented, own = per_billion_tokens(dollars, tokens_per_second), _cost_of(1e9)
    on = f"${dollars} per hour, {tokens_per_second:,.0f} tokens/s; electricity alone"
    if inverse:
        return Answer.modelled((own.low, own.value, own.high), 100 / rented, on)
    return Answer(rented / own.high, rented / own.value, rented / own.low, "modelled", on)


def _break_even_hours() -> Answer:
    def hours(rent: float) -> float:
        found = own_or_rent(8, 2000.0, 3600.0, CLAIMED_PRICE, rent / 8).break_even_hours
        assert found is not None  # such rents are far above electricity
        return found

    return Answer(hours(50), hours(40), hours(30), "arithmetic", "$16,000, $30 to $50 per hour")


def _rent(card: str) -> Answer:
    gpu = gpus.find(card)
    first, *others = rental_prices(gpu)  # facts/prices.toml has this card
    offers = [first.usd, *(price.usd for price in others)]
    return Answer(min(offers), first.usd, max(offers), "published prices", f"{gpu.name}, {first.date}")


FORMULAS: dict[str, Callable[[], Answer]] = {
    "kv_cache_gqa4": partial(_kv_cache, 12, 4),
    "kv_cache_gqa8": partial(_kv_cache, 16, 8),
    "kv_cache_mqa": partial(_kv_cache, 12, 12),
    "fp4_storage": lambda: Answer.exact(NVFP4_BITS / 16 - 1, on="against 16-bit weights"),
    "fp4_weights_3b": lambda: Answer.exact(3e9 * NVFP4_BITS / 8 / 1e9, on="3 billion parameters"),
    "mixed_precision_memory": _mixed_precision_memory,
    "bandwidth_rtx5090": partial(_sheet, "rtx5090", lambda gpu: gpu.bandwidth / 1e12),
    "board_power_rtx5090": partial(_sheet, "rtx5090", lambda gpu: gpu.watts),
    "cores_rtx5090": partial(_sheet, "rtx5090", lambda gpu: 128 * gpu.multiprocessors),
    "capability_rtx5090": partial(_sheet, "rtx5090", lambda gpu: float(gpu.compute_capability)),
    "memory_rtx5090": partial(_sheet, "rtx5090", lambda gpu: gpu.memory_bytes / 2**30),
    "memory_rtx4090": partial(_sheet, "rtx4090", lambda gpu: gpu.memory_bytes / 2**30),
    "memory_h100": partial(_sheet, "h100 sxm", lambda gpu: gpu.memory_bytes / 2**30),
    "memory_a100": partial(_sheet, "a100 80gb sxm", lambda gpu: gpu.memory_bytes / 2**30),
    "fp8_rate_rtx4090": partial(_sheet, "rtx4090", lambda gpu: (gpu.fp8_flops or 0.0) / 1e12),
    "fp4_rate_h100": partial(_sheet, "h100 sxm", lambda gpu: (gpu.fp4_flops or 0.0) / 1e12),
    "price_rtx5090": partial(_sheet, "rtx5090", lambda gpu: gpu.msrp_usd),
    "price_rtx4090": partial(_sheet, "rtx4090", lambda gpu: gpu.msrp_usd),
    "price_h100": partial(_sheet, "h100 sxm", lambda gpu: gpu.msrp_usd),
    "price_a100": partial(_sheet, "a100 80gb sxm", lambda gpu: gpu.msrp_usd),
    "cluster_efficiency": lambda: Answer.exact(
        100 * 1.3e6 / (8 * 185_000), on="1.3M of 8 x 185,000 tokens/s"
    ),
    "hours_of_49b": partial(_time, GPT2_TOKENS, 3600, CLAIMED_CLUSTER_SPEED, "1.3M tokens/s"),
    "hours_of_25b": partial(_time, 25e9, 3600, CLAIMED_CLUSTER_SPEED, "1.3M tokens/s"),
    "minutes_of_2_5b": partial(_time, 2.5e9, 60, CLAIMED_CLUSTER_SPEED, "1.3M tokens/s"),
    "minutes_of_100m": partial(_time, 100e6, 60, 185_000, "185,000 tokens/s"),
    "hours_in_all": lambda: Answer(13.5, 14.0, 14.5, "arithmetic", "10.5 + 1 + 2 to 3 hours"),
    "chinchilla_tokens": lambda: Answer.exact(20 * 124e6 / 1e9, on="20 tokens for each of 124M parameters"),
    "casts_saved": lambda: Answer.exact(16 - 1, on="one cast instead of 16 in a step of 16 passes"),
    "moe_sum": lambda: Answer.exact(3 + 3 + 6 + 8 + 4, on="the document's own items"),
    "moe_use": lambda: Answer.exact(100 * 28 / 32, on="28 of 32 GB"),
    "rent_saving": lambda: Answer.exact(100 * (1 - 0.50 / 0.79), on="$0.50 and $0.79 per hour"),
    "cluster_kilowatts": _cluster_kilowatts,
    "cluster_dollars_per_hour": partial(_dollars, 1.0),
    "cost_of_49b": partial(_cost_of, GPT2_TOKENS),
    "cost_of_sft": partial(_dollars, 1.0, 1),
    "cost_of_dpo": partial(_dollars, 2.0, 1, 3.0),
    "total_cost": _total_cost,
    "cost_per_billion": partial(_cost_of, 1e9),
    "cost_per_billion_a100": partial(_rented_per_billion, 0.79, 188_000),
    "cost_per_billion_h100": partial(_rented_per_billion, 2.49, 280_000),
    "a100_rent_against_own": partial(_rent_against_own, 0.79, 188_000),
    "h100_rent_against_own": partial(_rent_against_own, 2.49, 280_000),
    "own_share_of_a100_rent": partial(_rent_against_own, 0.79, 188_000, inverse=True),
    "break_even_hours": _break_even_hours,
    # Of the A100s that equal eight RTX 5090, by the speeds and the rent of the documents.
    "cluster_rent": lambda: Answer.exact(
        CLAIMED_CLUSTER_SPEED / 188_000 * 0.79, on="1.3M tokens/s, 188,000 per A100, $0.79 per hour"
    ),
    "rent_rtx5090": partial(_rent, "rtx5090"),
    "rent_rtx4090": partial(_rent, "rtx4090"),
    "rent_a100": partial(_rent, "a100 80gb sxm"),
    "rent_h100": partial(_rent, "h100 sxm"),
    **PLANNED,
}


@cache
def evaluate(formula: str) -> Answer:
    """Return the answer of a formula, computed once. Raises KeyError for an unknown formula."""
    return FORMULAS[formula]()
