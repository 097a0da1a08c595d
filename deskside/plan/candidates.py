"""The search: models that could be trained in the budget, each with its fastest setting that fits.

A candidate is a model shape (the depth series, and the presets that only set a shape) with all other options chosen:
sequence-length stages, optimizer, activation checkpointing, loss chunk, sharding, tokens per pass and per step. Options
that only affect speed are chosen by the modelled speed. Two options also affect the loss after a number of tokens:

- The optimizer. AdamW needs more tokens than Muon for the same loss: 1.4 times as many at 0.1 billion parameters, 1.1
  times at 1.2 billion (Wen et al. 2025, arXiv 2509.02046), interpolated on a log scale.
- Sequence-length stages: a quarter, a half and the whole sequence length. They are used if a quarter is long enough,
  because attention is cheaper over shorter rows. The loss law treats their tokens alike: in 300 s on one H200, a run
  with stages ended at 1.136 bits per byte, one without at 1.151 (docs/log.md).
"""

import heapq
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any

from deskside.budget.loss import LAW, MAX_WEIGHTS_PER_TOKEN, USEFUL_EPOCHS, LossLaw, bounded, expected_bpb
from deskside.budget.scaling import batch_on_gpus, batch_token_factor, best_batch_tokens
from deskside.budget.shape import matmul_params, num_params
from deskside.budget.step_spec import Checkpointing, OptimizerName, Precision
from deskside.config import merge, presets
from deskside.config.run import RunConfig
from deskside.plan.estimate import (
    Range,
    Setting,
    StageSetting,
    StepEstimate,
    check_batch_divides,
    estimate_max_microbatch,
    pass_sizes,
    setting_from_config,
)
from deskside.plan.given_model import MAX_DEPTH, CandidateModel, sequence_length_layer
from deskside.plan.request import TIME_SHARES, PlanRequest
from deskside.utils.errors import UsageError
from deskside.utils.format import count, duration

STAGES = ((0.35, 4), (0.35, 2), (0.3, 1))  # share of the run, divisor of the sequence length
MIN_STAGE_TOKENS = 256
MIN_STEPS = 200  # the batch is chosen small enough for about this many steps
# Activation checkpointing and loss_chunk_tokens, in the order of decreasing memory and mostly decreasing speed.
LADDER: tuple[tuple[Checkpointing, int], ...] = (
    ("none", 8192),
    ("none", 2048),
    ("attention", 2048),
    ("mlp", 2048),
    ("block", 2048),
    ("block", 512),
)
MLP_CHUNK = 4096  # tokens of an MLP chunk; shorter rows need none, because a pass may be as short
ENOUGH_PASS_TOKENS = 16384  # from this pass size on, recomputation to fit larger passes does not pay
MAX_SECONDS = 365 * 86400.0  # longer runs get the verdict "no"
TOO_LONG = "that is more than a year of training: it needs more or faster cards, or a smaller goal"
TOO_SMALL = "the budget is too small: a model learns nothing from so few tokens; give more of it"
MORE_TEXT = "what helps: more text{mode}, or fine-tuning a published model (deskside sft)"
MAX_SIZE_RATIO = 3.0  # the largest stretch band, relative to the target
MUON_ADVANTAGE = ((1e8, 1.4), (1.2e9, 1.1))  # (parameters, tokens that AdamW needs / tokens that Muon needs)
UNIFORM_BPB = 8.0  # bits per byte of a uniform distribution over bytes
# Seconds before the first step if not measured. On an H200 machine they were 20 to 48 s for one stage (docs/log.md); a
# desktop's processor compiles more slowly, and three stages compile three times.
SETUP_SECONDS = 90.0


@dataclass(frozen=True)
class Candidate:
    """A model with its fastest setting that fits, and the modelled result of training it.

    tokens: of the run; seconds: of the run, including set-up. Their ranges are from the range of the speed. loss: bits
    per byte after the expected tokens by the law, which compares models; forecast: the same, bounded by the baselines
    of the text.
    """

    shape: CandidateModel
    estimate: StepEstimate
    tokens: Range
    seconds: Range
    loss: Range
    forecast: Range

    @property
    def setting(self) -> Setting:
        return self.estimate.setting

    @property
    def params(self) -> int:
        return num_params(self.setting.model)

    @property
    def weights(self) -> int:
        """Number of weights that a token is multiplied with: `params` of the loss law."""
        return matmul_params(self.setting.model)


def models(request: PlanRequest) -> Iterator[CandidateModel]:
    """Yield all models of the open search, small to large. Raises UsageError if the overrides exclude all of them."""
    explicit = frozenset(".".join(path) for path in merge.merge([request.overrides])[1])
    errors: list[UsageError] = []

    def built(named: Iterable[tuple[str, list[dict[str, Any]]]]) -> Iterator[tuple[int, CandidateModel]]:
        for preset, layers in named:
            if request.overrides:
                layers = [*layers, dict(request.overrides)]
            try:
                config = merge.build(layers)
                layer = sequence_length_layer(request.sequence, config, explicit)
                layers = [*layers, layer]
                if layer != {"batch": {"sequence_length": config.batch.sequence_length}}:
                    config = merge.build(layers)
            except UsageError as error:
                errors.append(error)
            else:
                yield matmul_params(config.model), CandidateModel(preset, tuple(layers), config)

    depth_series = built((f"d{number}", [presets.depth(number)]) for number in range(2, MAX_DEPTH + 1, 2))
    named = [(name, presets.layers(name)) for name in presets.names()]
    shaped = built(
        (name, layers) for name, layers in named if all(set(layer) == {"model"} for layer in layers)
    )
    by_size = itemgetter(0)
    # Repeated text does not suffice for a large model, and no such run was measured.
    max_weights = math.inf if request.unique_tokens is None else MAX_WEIGHTS_PER_TOKEN * request.unique_tokens
    first = True
    for weights, shape in heapq.merge(depth_series, sorted(shaped, key=by_size), key=by_size):
        if first or weights <= max_weights:
            yield shape
        first = False
    if first and errors:
        raise errors[-1]


def search(request: PlanRequest, end: int = 1, staged: bool = True) -> list[Candidate]:
    """Return the best candidate of every model, small to large.

    The search stops at models more than 2 x `MAX_SIZE_RATIO` times as large as the best one, and at the first depth
    that does not fit or exceeds the budget. end: with a budget of loss, the end of the range that must reach it: 0 low,
    1 expected, 2 high. staged: the run may have sequence-length stages.
    """
    candidates: list[Candidate] = []
    best: Candidate | None = None
    for shape in models(request):
        if best is not None and matmul_params(shape.model) > 2 * MAX_SIZE_RATIO * best.weights:
            break
        candidate = best_candidate(request, shape, end, staged)
        if candidate is not None:
            candidates.append(candidate)
            if best is None or _objective(request, candidate) < _objective(request, best):
                best = candidate
        elif shape.preset.startswith("d") and (candidates or request.budget.kind != "loss"):
            break  # only a budget of loss can exclude small models and still allow larger ones
    return candidates


def best_candidate(
    request: PlanRequest, shape: CandidateModel, end: int = 1, staged: bool = True
) -> Candidate | None:
    """Return a model's candidate with the best optimizer, None if it does not fit or the budget is too small.

    end, staged: as in `search`.
    """
    options = [c for c in _by_optimizer(request, shape, end, staged) if c is not None]
    return min(options, key=lambda c: (c.estimate.fits != "fits", c.loss[1], c.seconds[1]), default=None)


def _objective(request: PlanRequest, candidate: Candidate) -> float:
    """Return the number to minimize under this kind of budget."""
    kind = request.budget.kind
    if kind == "loss":
        return candidate.seconds[1]
    if kind == "tokens":  # the best size is the one for which this many tokens are compute-optimal
        return abs(math.log(optimal_tokens(LAW, candidate.weights) / candidate.tokens[1]))
    return candidate.loss[1]


def fits_at_all(request: PlanRequest) -> bool:
    """Return True if the smallest model fits, at least as expected."""
    return model_fits(request, next(models(request)))


def model_fits(request: PlanRequest, shape: CandidateModel) -> bool:
    """Return True if a model fits with one row per pass, at least as expected, whatever the budget."""
    setting = setting_on_card(request, shape.config)
    last_stage = stages(request.sequence, request.sequence * request.readers)[-1]
    row = replace(setting, stages=(replace(last_stage, share=1.0),), micro_tokens=request.sequence)
    return fastest_that_fits(request, row).fits != "no"


def precision(request: PlanRequest) -> Precision:
    """Return the precision of the bands: the requested one, else the default of the device."""
    if request.precision is not None:
        return request.precision  # type: ignore[return-value]
    return "fp32" if request.card.is_cpu else "bf16"


def setting_on_card(request: PlanRequest, config: RunConfig) -> Setting:
    """Return the setting of a configuration on the requested GPUs and in the requested precision."""
    return setting_from_config(
        config, request.gpus, precision(request), request.card.is_cpu, request.card.native
    )


def batch_tokens(total_tokens: float, sequence_length: int, readers: int) -> int:
    """Return the tokens per step for a run of `total_tokens`, as a power of two of rows per reader.

    readers: as in `PlanRequest.readers`.
    """
    best = best_batch_tokens(max(1.0, total_tokens))
    return batch_on_gpus(best, readers, sequence_length, total_tokens / MIN_STEPS)


def stages(sequence_length: int, tokens: int) -> tuple[StageSetting, ...]:
    """Return stages of a quarter, half and all of the sequence length, or one stage if a quarter is too short."""
    shortest = sequence_length // STAGES[0][1]
    if shortest < MIN_STAGE_TOKENS or sequence_length % STAGES[0][1]:
        return (StageSetting(1.0, sequence_length, tokens),)
    return tuple(StageSetting(share, sequence_length // divisor, tokens) for share, divisor in STAGES)


def pretrain_seconds(request: PlanRequest) -> float | None:
    """Return the wall-clock seconds of the pretraining run, set-up included, under a budget of hours; else None."""
    if request.pretrain_seconds is not None:
        return request.pretrain_seconds
    if request.budget.kind != "hours":
        return None
    return request.budget.value * 3600 * TIME_SHARES["pretraining"]


def setup_seconds(request: PlanRequest) -> float:
    """Return the seconds before the first step: measured on this machine, else `SETUP_SECONDS`."""
    return SETUP_SECONDS if request.setup_seconds is None else request.setup_seconds


def too_short(request: PlanRequest, seconds: float) -> str:
    """Return the message for a budget of hours that is too short."""
    return (
        f"the time is too short: {duration(seconds)} of pretraining, of which set-up takes about "
        f"{duration(setup_seconds(request))}"
    )


def optimal_tokens(law: LossLaw, params: float) -> float:
    """Return the compute-optimal tokens of a model size: at equal FLOPs, no other size has a lower loss."""
    return (law.beta * law.B * params**law.alpha / (law.alpha * law.A)) ** (1 / law.beta)


def muon_advantage(params: float) -> float:
    """Return the tokens that AdamW needs for a loss, divided by those that Muon needs."""
    (small, at_small), (large, at_large) = MUON_ADVANTAGE
    share = (math.log(params) - math.log(small)) / (math.log(large) - math.log(small))
    return at_small + min(1.0, max(0.0, share)) * (at_large - at_small)


def bpb(request: PlanRequest, setting: Setting, tokens: float) -> Range:
    """Return the range of bits per byte after `tokens` tokens, by the law alone."""
    return expected_bpb(LAW, *law_inputs(setting, tokens), request.unique_tokens)


def law_inputs(setting: Setting, tokens: float) -> tuple[int, float]:
    """Return (params, tokens) of the loss law. Steps beyond the best batch and AdamW are worth fewer tokens."""
    weights = matmul_params(setting.model)
    effective = tokens / batch_token_factor(setting.tokens_per_step, max(1.0, tokens))
    if setting.optimizer == "adamw":
        effective /= muon_advantage(weights)
    return weights, max(effective, 1.0)


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


def most_tokens(request: PlanRequest, setting: Setting) -> float:
    """Return the tokens of the longest run that a plan proposes: of `USEFUL_EPOCHS` epochs, but at least one step.

    It is infinite if the text's size is unknown, the user sets the tokens, or the model is fine-tuned.
    """
    if request.unique_tokens is None or request.budget.kind == "tokens" or not request.pretrains:
        return math.inf
    return max(USEFUL_EPOCHS * request.unique_tokens, setting.tokens_per_step)


def ends_early(request: PlanRequest, candidate: Candidate) -> bool:
    """Return True if the text is too small for the budget: the run ends after `most_tokens`."""
    return candidate.tokens[1] >= most_tokens(request, candidate.setting)


def takes_all_hours(request: PlanRequest, candidate: Candidate) -> bool:
    """Return True if the budget is a time and the run is not too short for it."""
    return request.budget.kind == "hours" and not ends_early(request, candidate)


def text_too_small(request: PlanRequest) -> str:
    """Return the reason why a text, not the budget, is too small for any model."""
    unique = request.unique_tokens
    assert unique is not None
    return (
        f"the text is too small: a model learns nothing from {count(unique)} tokens, which are worth reading "
        f"{USEFUL_EPOCHS} times at most (arXiv 2305.16264); {MORE_TEXT.format(mode='')}"
    )


def run_length(request: PlanRequest, step: StepEstimate, end: int = 1) -> tuple[Range, Range] | None:
    """Return (tokens, seconds) of the pretraining run that the budget allows, with their ranges. None if its hours
    allow no step or the requested loss is out of reach. end: see `search`."""
    setup, (slow, expected, fast) = setup_seconds(request), step.tokens_per_second
    seconds, limit = pretrain_seconds(request), most_tokens(request, step.setting)
    if seconds is not None:
        training = seconds - setup
        if training * expected < step.setting.tokens_per_step:
            return None
        low, middle, high = (min(training * speed, limit) for speed in (slow, expected, fast))
        ends = (min(seconds, setup + limit / speed) for speed in (fast, expected, slow))
        return (low, middle, high), tuple(ends)  # type: ignore[return-value]
    tokens = _budget_tokens(request, step.setting, end)
    if tokens is None:
        return None
    tokens = min(tokens, limit)
    return (tokens, tokens, tokens), (setup + tokens / fast, setup + tokens / expected, setup + tokens / slow)


def make_candidate(
    request: PlanRequest, shape: CandidateModel, step: StepEstimate, end: int = 1
) -> Candidate | None:
    """Return the candidate of a model and its estimate, or None if `run_length` is None or nothing is learned."""
    lengths = run_length(request, step, end)
    if lengths is None:
        return None
    tokens, seconds = lengths
    loss = bpb(request, step.setting, tokens[1])
    if loss[1] >= UNIFORM_BPB:
        return None
    # A loss to reach is one of the law, so its forecast is, too.
    forecast = loss if request.budget.kind == "loss" else bounded(loss, request.text)
    return Candidate(shape, step, tokens, seconds, loss, forecast)


def fastest_that_fits(request: PlanRequest, base: Setting) -> StepEstimate:
    """Return the fastest variant of a setting that fits, else that is expected to fit, else the one of least memory.

    Variants differ in micro-batch, activation checkpointing, activation offloading, chunks of loss and MLP, cached
    weights and sharding.
    """
    best: StepEstimate | None = None
    for setting in _ladder(request, base):
        step = estimate_max_microbatch(setting, request.calibration, request.card.memory_bytes)
        if best is not None and not step.fits_host(request.card.host_bytes):
            continue
        if best is None or _rank(step) < _rank(best):
            best = step
        enough = min(ENOUGH_PASS_TOKENS, pass_sizes(setting)[0])
        if best.fits == "fits" and best.setting.micro_tokens >= enough and not best.setting.sharded:
            break
    assert best is not None
    return best


def _rank(step: StepEstimate) -> tuple[int, float]:
    """Return a sort key: by `fits`, then the faster ones first, or the smaller ones among those that do not fit."""
    order = ("fits", "tight", "no").index(step.fits)
    return order, step.memory_bytes[1] if step.fits == "no" else -step.tokens_per_second[1]


def _ladder(request: PlanRequest, base: Setting) -> Iterator[Setting]:
    """Yield variants of a setting, mostly the fastest first. Options in the overrides are not changed."""
    explicit = request.overrides.get("compute", {})
    may_shard = base.gpus > 1 and base.shardable and "parallel" not in request.overrides
    for sharded in (False, True) if may_shard else (base.sharded,):
        variants = []
        for checkpointing, chunk in LADDER:
            if checkpointing != explicit.get("activation_checkpointing", checkpointing):
                continue
            chunk = min(chunk, base.loss_chunk_tokens)
            if "loss_chunk_tokens" in explicit:
                chunk = base.loss_chunk_tokens
            variants.append(
                replace(
                    base, sharded=sharded, activation_checkpointing=checkpointing, loss_chunk_tokens=chunk
                )
            )
        yield from variants
        uncached = []
        if variants[0].has_optional_cache and "weight_cache" not in request.overrides.get("precision", {}):
            uncached = [replace(variant, copies="use") for variant in variants]
        yield from uncached
        offloaded = []
        if "activation_offloading" not in explicit:
            offloaded = [
                replace(variant, activation_offloading=True)
                for variant in [*variants, *uncached]
                if variant.can_offload_activations
            ]
        yield from offloaded
        if "mlp_chunk_tokens" not in explicit:
            for variant in [*variants, *uncached, *offloaded]:
                if variant.can_chunk_mlps and variant.sequence_length > MLP_CHUNK:
                    yield replace(variant, mlp_chunk_tokens=MLP_CHUNK)


def _by_optimizer(
    request: PlanRequest, shape: CandidateModel, end: int, staged: bool
) -> Iterator[Candidate | None]:
    """Yield a model with Muon, and with AdamW if this could be better, unless the overrides set the optimizer."""
    if "name" in request.overrides.get("optim", {}):
        yield _with_optimizer(request, shape, shape.config.optim.name, end, staged)
        return
    muon = _with_optimizer(request, shape, "muon", end, staged)
    yield muon
    # AdamW needs at least MUON_ADVANTAGE[1][1] times the tokens. It can only win if Muon's update takes more of a step.
    if (
        muon is None
        or muon.estimate.step["optimizer"] / muon.estimate.step_seconds > 1 - 1 / MUON_ADVANTAGE[1][1]
    ):
        yield _with_optimizer(request, shape, "adamw", end, staged)


def _with_optimizer(
    request: PlanRequest, shape: CandidateModel, optimizer: OptimizerName, end: int, staged: bool
) -> Candidate | None:
    """Return the candidate of a model with this optimizer, None if it does not fit or the budget is too small."""
    base = replace(setting_on_card(request, shape.config), optimizer=optimizer)
    if request.budget.kind == "loss" and _budget_tokens(request, base, end) is None:
        return None
    grows = shape.config.schedule.batch_growth > 1
    explicit_stages = grows or "stages" in request.overrides.get("schedule", {})
    explicit_batch = "tokens" in request.overrides.get("batch", {})
    # The best batch depends on the tokens of the run, these on the speed, and the speed a little on the batch: two
    # iterations suffice.
    tokens = batch_tokens(1e9, request.sequence, request.readers)
    step: StepEstimate | None = None
    for _ in range(2):
        setting = base
        if not explicit_stages:
            step_tokens = shape.config.batch.tokens if explicit_batch else tokens
            one_stage = (StageSetting(1.0, request.sequence, step_tokens),)
            setting = replace(base, stages=stages(request.sequence, step_tokens) if staged else one_stage)
        if explicit_batch or explicit_stages:
            check_batch_divides(setting)
        largest = min(stage.tokens for stage in setting.stages) // request.readers
        micro = base.micro_tokens if "micro_tokens" in request.overrides.get("batch", {}) else largest
        step = fastest_that_fits(request, replace(setting, micro_tokens=micro))
        if step.fits == "no":
            return None
        lengths = run_length(request, step, end)
        if explicit_batch or explicit_stages:
            break
        # If the budget is too short for one step of this batch, try the batch for the tokens that it does allow.
        seconds = pretrain_seconds(request)
        total = lengths[0][1] if lengths else None
        if total is None and seconds is not None:
            total = max(1.0, (seconds - setup_seconds(request)) * step.tokens_per_second[1])
        if total is None:
            return None
        better = batch_tokens(total, request.sequence, request.readers)
        if better == tokens:
            break
        tokens = better
    assert step is not None
    return make_candidate(request, shape, step, end)


def _budget_tokens(request: PlanRequest, setting: Setting, end: int) -> float | None:
    """Return the tokens that a budget other than hours allows, or without one the compute-optimal tokens. None if the
    requested loss is out of reach."""
    budget = request.budget
    if budget.kind is None:
        return optimal_tokens(LAW, matmul_params(setting.model))
    if budget.kind == "tokens":
        return budget.value
    if budget.kind == "flops":
        return budget.value / setting.flops_per_token
    needed = tokens_to_reach(request, setting, budget.value, end)
    return None if needed is None or needed > most_tokens(request, setting) else needed
