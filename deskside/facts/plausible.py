"""Can this number be? A check of claimed speeds and costs against what the card can do.

A training run cannot compute faster than the card's matrix products. For data centre and workstation cards the bound
is the matrix product that others measured, which is 50 to 87 % of the data sheet; the data sheet where nobody did.
GeForce cards boost above the clock on their data sheet, and from card to card differently, so 10 % more than the
higher of sheet and measurement is allowed to them. At the other end, a speed far below what every published run on
this card reached is doubted: a wrong log (tokens counted once per accumulation step) looks like that.
"""

from dataclasses import dataclass
from typing import Literal

from deskside.facts.gpus import Gpu
from deskside.facts.measurements import published
from deskside.utils.errors import UsageError

GEFORCE_ALLOWANCE = 1.10
SLOW_SHARE = 0.02  # of the bound; real runs of real models reach 15 to 90 %
SLOW_AGAINST_PUBLISHED = 0.5  # of the slowest published run on this card, as FLOP/s
CLAIM_TOLERANCE = 0.05  # numbers that a text rounds


@dataclass(frozen=True)
class Bound:
    """The most that a card can compute. flops: FLOP/s; why: one line."""

    flops: float
    why: str


@dataclass(frozen=True)
class Verdict:
    """impossible: no card of this kind can. doubtful: it can, but something is probably wrong. why: one line.
    share: of the bound, where there is one."""

    verdict: Literal["plausible", "doubtful", "impossible"]
    why: str
    share: float | None = None


def bound(gpu: Gpu, precision: Literal["bf16", "fp16", "fp8"] = "bf16") -> Bound:
    """The bound of one card. Products with FP32 accumulation are meant, also for fp16, as PyTorch makes them.

    Raises UsageError for FP8 on a card without units for it (an emulation computes in BF16: ask for bf16).
    """
    sheet, measured = gpu.bf16_flops, gpu.measured_bf16_flops
    if gpu.geforce:
        best = max(sheet, measured or 0.0)
        flops, why = (
            best * GEFORCE_ALLOWANCE,
            f"110 % of {best / 1e12:.0f} TFLOP/s, since GeForce cards boost",
        )
    elif measured is not None:
        flops, why = measured, f"{measured / 1e12:.0f} TFLOP/s measured ({gpu.measured_source})"
    else:
        flops, why = sheet, f"{sheet / 1e12:.0f} TFLOP/s on the data sheet"
    if precision != "fp8":
        return Bound(flops, f"{gpu.name}: {why}")
    if gpu.fp8_flops is None and not gpu.laptop:
        raise UsageError(f"fp8: the {gpu.name} has no units for it; give bf16")
    # Twice, on every card that has it; what was measured stays below that too (H100 1403, H200 1453, B200 3432).
    return Bound(2 * flops, f"{gpu.name}: FP8 at twice BF16, {why}")


def rate(
    gpu: Gpu,
    flops_per_token: float,
    tokens_per_second: float,
    precision: Literal["bf16", "fp16", "fp8"] = "bf16",
) -> Verdict:
    """Judge a training speed of one card.

    flops_per_token: forward and backward, as `budget.shape.flops_per_token` counts them.
    tokens_per_second: per GPU. Raises UsageError for numbers that are not above 0.
    """
    if not (0 < flops_per_token < float("inf") and 0 < tokens_per_second < float("inf")):
        raise UsageError("the FLOPs per token and the tokens per second must both be above 0")
    limit = bound(gpu, precision)
    claimed = flops_per_token * tokens_per_second
    share = claimed / limit.flops
    said = f"{tokens_per_second:,.0f} tokens/s is {claimed / 1e12:.1f} TFLOP/s"
    if share > 1:
        return Verdict("impossible", f"{said}, {share:.0%} of what the card can ({limit.why})", share)
    if share < SLOW_SHARE:
        why = f"{said}, {share:.1%} of what the card can ({limit.why}); is it tokens of one micro-batch only?"
        return Verdict("doubtful", why, share)
    slowest = slowest_published(gpu)
    if slowest is not None and claimed < SLOW_AGAINST_PUBLISHED * slowest:
        why = f"{said}; the slowest published BF16 run on this card made {slowest / 1e12:.0f}"
        return Verdict("doubtful", why, share)
    return Verdict("plausible", f"{said}, {share:.0%} of what the card can ({limit.why})", share)


def slowest_published(gpu: Gpu) -> float | None:
    """FLOP/s per GPU of the slowest complete published BF16 pretraining run on this card, None without one."""
    rates = [
        row.flops_per_token * row.tokens_per_second_per_gpu
        for row in published()
        if row.card == gpu.name and row.precision == "bf16" and row.complete_for_speed
        if row.flops_per_token is not None and row.tokens_per_second_per_gpu is not None
    ]
    return min(rates, default=None)


def scaling(one_gpu: float, gpus: int, total: float, efficiency: float | None = None) -> Verdict:
    """Judge tokens/s of several GPUs against one: more than linear cannot be, and a stated efficiency (a share) must
    be the quotient. Raises UsageError for numbers that are not above 0."""
    if min(one_gpu, gpus, total) <= 0:
        raise UsageError("tokens per second and the number of GPUs must be above 0")
    share = total / (one_gpu * gpus)
    said = f"{total:,.0f} tokens/s on {gpus} GPUs is {share:.0%} of {gpus} x {one_gpu:,.0f}"
    if share > 1 + CLAIM_TOLERANCE:
        return Verdict("impossible", f"{said}: more than linear", share)
    if efficiency is not None and abs(share - efficiency) > CLAIM_TOLERANCE:
        expected = one_gpu * gpus * efficiency
        return Verdict("doubtful", f"{said}, not {efficiency:.0%}, which would be {expected:,.0f}", share)
    return Verdict("plausible", said, share)


def energy_cost(per_billion_tokens: float, tokens_per_second: float, watts: float, per_kwh: float) -> Verdict:
    """Judge a claimed cost of a billion tokens by the electricity that they need at least.

    tokens_per_second and watts of the same machine; per_kwh in the currency of the claim. Raises UsageError for
    numbers that are not above 0.
    """
    if min(per_billion_tokens, tokens_per_second, watts, per_kwh) <= 0:
        raise UsageError("cost, tokens per second, watts and the price of a kWh must all be above 0")
    least = 1e9 / tokens_per_second / 3600 * watts / 1000 * per_kwh
    said = f"a billion tokens need {least:.3g} of electricity at {watts:.0f} W and {per_kwh:g} per kWh"
    if per_billion_tokens < least * (1 - CLAIM_TOLERANCE):
        why = (
            f"{said}; the claim of {per_billion_tokens:.3g} is {least / per_billion_tokens:.0f} times too low"
        )
        return Verdict("impossible", why)
    return Verdict("plausible", said)
