"""The loss law for a setting: bits per byte after a number of tokens, and the tokens for a loss.

Two options affect the loss after a number of tokens:

- The optimizer. AdamW needs more tokens than Muon for the same loss: 1.4 times as many at 0.1 billion parameters, 1.1
  times at 1.2 billion (Wen et al. 2025, arXiv 2509.02046), interpolated on a log scale.
- Sequence-length stages (`run_length.stages`). The law treats the tokens of all stages alike: in 300 s on one H200, a
  run with stages ended at 1.136 bits per byte, one without at 1.151 (docs/log.md).
"""

import math

from deskside.budget.loss import LAW, LossLaw, expected_bpb
from deskside.budget.scaling import batch_token_factor
from deskside.budget.shape import matmul_params
from deskside.plan.estimate import Range
from deskside.plan.request import PlanRequest
from deskside.plan.setting import Setting

MUON_ADVANTAGE = ((1e8, 1.4), (1.2e9, 1.1))  # (parameters, tokens that AdamW needs / tokens that Muon needs)


def optimal_tokens(law: LossLaw, params: float) -> float:
    """Return the compute-optimal tokens of a model size: at equal FLOPs, no other size has a lower loss."""
    return (law.beta * law.B * params**law.alpha / (law.alpha * law.A)) ** (1 / law.beta)


def muon_advantage(params: float) -> float:
    """Return the tokens that AdamW needs for a loss, divided by those that Muon needs."""
    (small, at_small), (large, at_large) = MUON_ADVANTAGE
    share = (math.log(params) - math.log(small)) / (math.log(large) - math.log(small))
    return at_small + min(1.0, max(0.0, share)) * (at_large - at_small)


def law_inputs(setting: Setting, tokens: float) -> tuple[int, float]:
    """Return (params, tokens) of the loss law. Steps beyond the best batch and AdamW are worth fewer tokens."""
    weights = matmul_params(setting.model)
    effective = tokens / batch_token_factor(setting.tokens_per_step, max(1.0, tokens))
    if setting.optimizer == "adamw":
        effective /= muon_advantage(weights)
    return weights, max(effective, 1.0)


def bpb(request: PlanRequest, setting: Setting, tokens: float) -> Range:
    """Return the range of bits per byte after `tokens` tokens, according to the law alone."""
    return expected_bpb(LAW, *law_inputs(setting, tokens), request.unique_tokens)


def tokens_to_reach(request: PlanRequest, setting: Setting, loss: float, end: int) -> float | None:
    """Return the tokens after which the low (0), expected (1) or high (2) end of the loss reaches `loss`, or None.

    The ends are those of the law, without its widening outside the measured sizes. Bisection on a log scale.
    """
    target = loss / (LAW.low, 1.0, LAW.high)[end]
    too_few, enough = None, None
    for step in range(12 * 8 + 1):
        tokens = 10 ** (4 + step / 8)  # 10 thousand to 10 quadrillion
        if bpb(request, setting, tokens)[1] <= target:
            enough = tokens
            break
        too_few = tokens
    if enough is None or too_few is None:
        return enough
    for _ in range(30):
        middle = math.sqrt(too_few * enough)
        if bpb(request, setting, middle)[1] <= target:
            enough = middle
        else:
            too_few = middle
    return enough
