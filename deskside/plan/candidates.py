"""The search: models that could be trained in the budget, each in the fastest way that fits.

A candidate is a model shape (the depth series, and the presets that only set a shape) with everything else decided:
stages of sequence length, optimizer, activation checkpointing, loss chunk, sharding, tokens per pass and per step.
Options that only affect speed are chosen by the modelled speed. Two choices change how much a token teaches:

- The optimizer. AdamW is credited with fewer tokens than Muon, because it needs more for the same loss: 1.4 times at
  0.1 billion parameters, 1.1 times at 1.2 billion (Wen et al. 2025, arXiv 2509.02046), interpolated on a log scale.
- Short rows first: stages of a quarter, a half and the whole of the sequence. They are used wherever they are long
  enough, because attention over shorter rows costs less and no loss was measurable: in 300 s on one H200 they ended at
  1.136 bits per byte, against 1.151 without (docs/log.md). A token counts the same.
"""

import heapq
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any

from deskside.budget.loss import LAW, MAX_WEIGHTS_PER_TOKEN, LossLaw, expected_bpb
from deskside.budget.scaling import best_batch_tokens
from deskside.budget.shape import matmul_params, num_params
from deskside.budget.step_spec import Checkpointing, OptimizerName, Precision
from deskside.config import merge, presets
from deskside.config.run import RunConfig
from deskside.plan.estimate import (
    Range,
    Setting,
    StageSetting,
    StepEstimate,
    check_shared,
    fitted,
    of_config,
    pass_sizes,
)
from deskside.plan.request import DEEPEST, SPLIT, CandidateModel, PlanRequest, longer
from deskside.utils.errors import UsageError
from deskside.utils.format import duration

STAGES = ((0.35, 4), (0.35, 2), (0.3, 1))  # share of the run, divisor of the sequence length
SHORTEST_STAGE = 256
FEWEST_STEPS = 200  # the batch is chosen small enough for this many steps
LADDER: tuple[tuple[Checkpointing, int], ...] = (
    ("none", 8192),
    ("none", 2048),
    ("attention", 2048),
    ("mlp", 2048),
    ("block", 2048),
    ("block", 512),
)
ENOUGH_PASS_TOKENS = 16384  # with this many tokens per pass, recomputing to fit more makes nothing faster
LONGEST_SECONDS = 365 * 86400.0  # longer runs are refused
TOO_LONG = "that is more than a year of training: it needs more or faster cards, or a smaller goal"
TOO_SMALL = "the budget is too small: nothing would be learned from so few tokens"
AT_MOST = 3.0  # times the target's size: no band is larger
MUON_ADVANTAGE = ((1e8, 1.4), (1.2e9, 1.1))
NOTHING_LEARNED = 8.0  # bits per byte, when every byte is as likely as any other
# Before the first step, when nothing was measured here. On an H200 machine it was 20 to 48 s for one stage
# (docs/log.md); a desktop's processor compiles more slowly, and three stages compile three times.
SETUP_SECONDS = 90.0


@dataclass(frozen=True)
class Candidate:
    """A model trained in the fastest way that fits, and the result.

    tokens, seconds: of the pretraining run, set-up included, at the low, expected and high end of the speed; loss: bits
    per byte after the expected tokens.
    """

    shape: CandidateModel
    estimate: StepEstimate
    tokens: Range
    seconds: Range
    loss: Range

    @property
    def setting(self) -> Setting:
        return self.estimate.setting

    @property
    def params(self) -> int:
        return num_params(self.setting.model)

    @property
    def weights(self) -> int:
        """Weights that a token is multiplied with: the N of the loss law."""
        return matmul_params(self.setting.model)


def shapes(request: PlanRequest) -> Iterator[CandidateModel]:
    """Yield every model of the open search, small to large. Raises UsageError if the overrides exclude all of them."""
    own = frozenset(".".join(path) for path in merge.merge([request.overrides])[1])
    refused: list[UsageError] = []

    def built(named: Iterable[tuple[str, list[dict[str, Any]]]]) -> Iterator[tuple[int, CandidateModel]]:
        for preset, layers in named:
            if request.overrides:
                layers = [*layers, dict(request.overrides)]
            try:
                config = merge.build(layers)
                layer = longer(request.sequence, config, own)
                layers = [*layers, layer]
                if layer != {"batch": {"sequence_length": config.batch.sequence_length}}:
                    config = merge.build(layers)
            except UsageError as error:
                refused.append(error)
            else:
                yield matmul_params(config.model), CandidateModel(preset, tuple(layers), config)

    depth_series = built((f"d{number}", [presets.depth(number)]) for number in range(2, DEEPEST + 1, 2))
    named = [(name, presets.layers(name)) for name in presets.names()]
    shaped = built(
        (name, layers) for name, layers in named if all(set(layer) == {"model"} for layer in layers)
    )
    by_size = itemgetter(0)
    # Text that is repeated many times does not suffice for a large model, and no such run was measured.
    most = math.inf if request.unique_tokens is None else MAX_WEIGHTS_PER_TOKEN * request.unique_tokens
    first = True
    for weights, shape in heapq.merge(depth_series, sorted(shaped, key=by_size), key=by_size):
        if first or weights <= most:
            yield shape
        first = False
    if first and refused:
        raise refused[-1]


def search(request: PlanRequest, end: int = 1, staged: bool = True) -> list[Candidate]:
    """Return the best candidate of every model, small to large.

    The search stops at models more than `AT_MOST` times as large as the best one, and at the first depth that does not
    fit. end: the end of the expected loss that a budget of loss must reach; staged: short rows may come first.
    """
    found: list[Candidate] = []
    best: Candidate | None = None
    for shape in shapes(request):
        if best is not None and matmul_params(shape.model) > 2 * AT_MOST * best.weights:
            break
        ways = [c for c in _ways(request, shape, end, staged) if c is not None]
        if ways:
            found.append(min(ways, key=lambda c: (c.estimate.fits != "fits", c.loss[1], c.seconds[1])))
            if best is None or _merit(request, found[-1]) < _merit(request, best):
                best = found[-1]
        elif shape.preset.startswith("d") and (found or request.budget.kind != "loss"):
            break  # a model is too small for the budget only if that is a loss
    return found


def _merit(request: PlanRequest, found: Candidate) -> float:
    """Return the number that the budget asks to minimize."""
    kind = request.budget.kind
    if kind == "loss":
        return found.seconds[1]
    if kind == "tokens":  # a larger model learns more from them, up to the compute-optimal size
        return abs(math.log(optimal_tokens(LAW, found.weights) / found.tokens[1]))
    return found.loss[1]


def fits_at_all(request: PlanRequest) -> bool:
    """Return whether the smallest model fits in any way."""
    smallest = setting_of(request, next(shapes(request)).config)
    one_row = stages(request.sequence, request.sequence * request.gpus)[-1]
    row = replace(smallest, stages=(replace(one_row, share=1.0),), micro_tokens=request.sequence)
    return fastest(request, row).fits != "no"


def precision(request: PlanRequest) -> Precision:
    """Return the precision of the bands: the requested one, else the default of the device."""
    if request.precision is not None:
        return request.precision  # type: ignore[return-value]
    return "fp32" if request.card.is_cpu else "bf16"


def setting_of(request: PlanRequest, config: RunConfig) -> Setting:
    """Return the setting of a configuration, on the card and in the precision of the request."""
    return of_config(config, request.gpus, precision(request), request.card.is_cpu, request.card.native)


def batch_tokens(total_tokens: float, sequence_length: int, gpus: int) -> int:
    """Return the best tokens per step for a run of `total_tokens`: a power of two of rows on each GPU."""
    row = sequence_length * gpus
    best = min(best_batch_tokens(max(1, int(total_tokens))), total_tokens / FEWEST_STEPS)
    return row * 2 ** max(0, round(math.log2(max(best, 1) / row)))


def stages(sequence_length: int, tokens: int) -> tuple[StageSetting, ...]:
    """Return stages of a quarter, a half and the whole sequence length, or one stage if a quarter is too short."""
    shortest = sequence_length // STAGES[0][1]
    if shortest < SHORTEST_STAGE or sequence_length % STAGES[0][1]:
        return (StageSetting(1.0, sequence_length, tokens),)
    return tuple(StageSetting(share, sequence_length // by, tokens) for share, by in STAGES)


def pretrain_seconds(request: PlanRequest) -> float | None:
    """Return the wall-clock seconds of the pretraining run, set-up included, under a budget of hours; else None."""
    if request.pretrain_seconds is not None:
        return request.pretrain_seconds
    if request.budget.kind != "hours":
        return None
    return request.budget.value * 3600 * SPLIT["pretraining"]


def setup_seconds(request: PlanRequest) -> float:
    """Return the seconds before the first step: measured here, else as on the reference machine."""
    return SETUP_SECONDS if request.setup_seconds is None else request.setup_seconds


def too_short(request: PlanRequest, seconds: float) -> str:
    return (
        f"the time is too short: {duration(seconds)} of pretraining, of which set-up takes about "
        f"{duration(setup_seconds(request))}"
    )


def optimal_tokens(law: LossLaw, params: float) -> float:
    """Return the compute-optimal tokens of a model size, where both terms of the law fall equally fast."""
    return (law.beta * law.B * params**law.alpha / (law.alpha * law.A)) ** (1 / law.beta)


def muon_advantage(params: float) -> float:
    """Return how many times more tokens AdamW needs than Muon for the same loss."""
    (small, at_small), (large, at_large) = MUON_ADVANTAGE
    share = (math.log(params) - math.log(small)) / (math.log(large) - math.log(small))
    return at_small + min(1.0, max(0.0, share)) * (at_large - at_small)


def bpb(request: PlanRequest, setting: Setting, tokens: float) -> Range:
    """Return the range of bits per byte after `tokens` tokens."""
    weights = matmul_params(setting.model)
    worth = tokens / muon_advantage(weights) if setting.optimizer == "adamw" else tokens
    return expected_bpb(LAW, weights, max(worth, 1.0), request.unique_tokens)


def tokens_to_reach(request: PlanRequest, setting: Setting, loss: float, end: int) -> float | None:
    """Return the tokens after which the low (0), expected (1) or high (2) end of the loss reaches `loss`, or None.

    The ends are the law's own, without the widening of far extrapolation.
    """
    wanted = loss / (LAW.low, 1.0, LAW.high)[end]
    below, reached = None, None
    for step in range(12 * 8 + 1):
        tokens = 10 ** (4 + step / 8)  # 10 thousand to 10 quadrillion
        if bpb(request, setting, tokens)[1] <= wanted:
            reached = tokens
            break
        below = tokens
    if reached is None or below is None:
        return reached
    for _ in range(30):
        middle = math.sqrt(below * reached)
        if bpb(request, setting, middle)[1] <= wanted:
            reached = middle
        else:
            below = middle
    return reached


def length(request: PlanRequest, found: StepEstimate, end: int = 1) -> tuple[Range, Range] | None:
    """Return (tokens, seconds) of the pretraining run that the budget allows, or None if it allows no step or the
    requested loss is out of reach. end: the end of the loss that a budget of loss must reach."""
    setup, (slow, expected, fast) = setup_seconds(request), found.tokens_per_second
    seconds = pretrain_seconds(request)
    if seconds is not None:
        training = seconds - setup
        if training * expected < found.setting.tokens_per_step:
            return None
        return (training * slow, training * expected, training * fast), (seconds, seconds, seconds)
    tokens = _tokens(request, found.setting, end)
    if tokens is None:
        return None
    return (tokens, tokens, tokens), (setup + tokens / fast, setup + tokens / expected, setup + tokens / slow)


def candidate(
    request: PlanRequest, shape: CandidateModel, found: StepEstimate, end: int = 1
) -> Candidate | None:
    """Return the candidate of a model and its estimate, or None if the budget allows no step or nothing is learned."""
    reached = length(request, found, end)
    if reached is None:
        return None
    tokens, seconds = reached
    loss = bpb(request, found.setting, tokens[1])
    return Candidate(shape, found, tokens, seconds, loss) if loss[1] < NOTHING_LEARNED else None


def fastest(request: PlanRequest, base: Setting, free: bool = True) -> StepEstimate:
    """Return the fastest way to run a setting that fits, else the one that needs the least memory. free: activation
    checkpointing, loss chunk and sharding may be chosen; else only the micro-batch."""
    ways = _ladder(request, base) if free else [base]
    best: StepEstimate | None = None
    for way in ways:
        found = fitted(way, request.calibration, request.card.memory_bytes)
        if best is None or _rank(found) < _rank(best):
            best = found
        enough = min(ENOUGH_PASS_TOKENS, pass_sizes(way)[0])
        if best.fits == "fits" and best.setting.micro_tokens >= enough and not best.setting.sharded:
            break
    assert best is not None
    return best


def _rank(found: StepEstimate) -> tuple[int, float]:
    order = ("fits", "tight", "no").index(found.fits)
    return order, found.memory_bytes[1] if order == 2 else -found.tokens_per_second[1]


def _ladder(request: PlanRequest, base: Setting) -> Iterator[Setting]:
    """Yield ways to run a step, the fastest first. Options in the overrides stay."""
    own = request.overrides.get("compute", {})
    both = base.gpus > 1 and base.shardable and "parallel" not in request.overrides
    for sharded in (False, True) if both else (base.sharded,):
        ways = []
        for rung, chunk in LADDER:
            if "activation_checkpointing" in own and rung != own["activation_checkpointing"]:
                continue
            chunk = (
                base.loss_chunk_tokens if "loss_chunk_tokens" in own else min(chunk, base.loss_chunk_tokens)
            )
            ways.append(
                replace(base, sharded=sharded, activation_checkpointing=rung, loss_chunk_tokens=chunk)
            )
        yield from ways
        if ways[0].has_optional_cache and "weight_cache" not in request.overrides.get("precision", {}):
            yield from (replace(way, copies="use") for way in ways)


def _ways(request: PlanRequest, shape: CandidateModel, end: int, staged: bool) -> Iterator[Candidate | None]:
    """Yield a model with Muon, and with AdamW where that could be better, unless the overrides set the optimizer."""
    if "name" in request.overrides.get("optim", {}):
        yield _way(request, shape, shape.config.optim.name, end, staged)
        return
    muon = _way(request, shape, "muon", end, staged)
    yield muon
    # Without its update Muon's step could be faster by this share at most, and AdamW needs more tokens than that.
    if (
        muon is None
        or muon.estimate.step["optimizer"] / muon.estimate.step_seconds > 1 - 1 / MUON_ADVANTAGE[1][1]
    ):
        yield _way(request, shape, "adamw", end, staged)


def _way(
    request: PlanRequest, shape: CandidateModel, optimizer: OptimizerName, end: int, staged: bool
) -> Candidate | None:
    base = replace(setting_of(request, shape.config), optimizer=optimizer)
    if request.budget.kind == "loss" and _tokens(request, base, end) is None:
        return None
    by_hand = "stages" in request.overrides.get("schedule", {})
    fixed = "tokens" in request.overrides.get("batch", {})
    # The batch follows from the tokens, which follow from the speed, which hardly depends on the batch: two rounds.
    tokens = batch_tokens(1e9, request.sequence, request.gpus)
    found: StepEstimate | None = None
    for _ in range(2):
        setting = base
        if not by_hand:
            step = shape.config.batch.tokens if fixed else tokens
            one = (StageSetting(1.0, request.sequence, step),)
            setting = replace(base, stages=stages(request.sequence, step) if staged else one)
        if fixed or by_hand:
            check_shared(setting)
        largest = min(stage.tokens for stage in setting.stages) // request.gpus
        micro = base.micro_tokens if "micro_tokens" in request.overrides.get("batch", {}) else largest
        found = fastest(request, replace(setting, micro_tokens=micro))
        if found.fits == "no":
            return None
        reached = length(request, found, end)
        if fixed or by_hand:
            break
        # A budget too short for one step at this batch may do for a smaller one.
        seconds = pretrain_seconds(request)
        total = reached[0][1] if reached else None
        if total is None and seconds is not None:
            total = max(1.0, (seconds - setup_seconds(request)) * found.tokens_per_second[1])
        if total is None:
            return None
        better = batch_tokens(total, request.sequence, request.gpus)
        if better == tokens:
            break
        tokens = better
    assert found is not None
    return candidate(request, shape, found, end)


def _tokens(request: PlanRequest, setting: Setting, end: int) -> float | None:
    budget = request.budget
    if budget.kind is None:
        return optimal_tokens(LAW, matmul_params(setting.model))
    if budget.kind == "tokens":
        return budget.value
    if budget.kind == "flops":
        return budget.value / setting.flops_per_token
    return tokens_to_reach(request, setting, budget.value, end)
