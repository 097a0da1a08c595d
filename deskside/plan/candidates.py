"""The search: models that could be trained in the budget, each with its fastest setting that fits.

A candidate is a model shape (the depth series, and the presets that only set a shape) with all other options chosen:
sequence-length stages, optimizer, activation checkpointing, loss chunk, sharding, tokens per pass and per step. Options
that only affect speed are chosen by the modelled speed (`fastest_fit.py`). The optimizer also affects the loss
(`expected_loss.py`), and so do the tokens that the budget allows (`run_length.py`).
"""

import heapq
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any

from deskside.budget.loss import LAW, MAX_WEIGHTS_PER_TOKEN, bounded
from deskside.budget.shape import matmul_params, num_params
from deskside.budget.step_spec import OptimizerName, Precision
from deskside.config import merge, presets
from deskside.config.depth_series import of_depth
from deskside.config.recipes import default_precision
from deskside.config.run import RunConfig
from deskside.plan.estimate import Range, StepEstimate
from deskside.plan.expected_loss import MUON_ADVANTAGE, bpb, optimal_tokens
from deskside.plan.fastest_fit import fastest_that_fits
from deskside.plan.given_model import MAX_DEPTH, CandidateModel, sequence_length_layer
from deskside.plan.request import PlanRequest
from deskside.plan.run_length import (
    batch_tokens,
    budget_tokens,
    most_tokens,
    pretrain_seconds,
    run_length,
    setup_seconds,
    stages,
)
from deskside.plan.setting import Setting, StageSetting, check_batch_divides, setting_from_config
from deskside.utils.errors import UsageError

MAX_SIZE_RATIO = 3.0  # the largest stretch band, relative to the target
UNIFORM_BPB = 8.0  # bits per byte of a uniform distribution over bytes


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

    depth_series = built((f"d{number}", [of_depth(number)]) for number in range(2, MAX_DEPTH + 1, 2))
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
    last_stage = stages(request, request.sequence * request.readers)[-1]
    row = replace(setting, stages=(replace(last_stage, share=1.0),), micro_tokens=request.sequence)
    step = fastest_that_fits(request, row)
    return step.fits != "no" and step.fits_host(request.card.host_bytes)


def precision(request: PlanRequest) -> Precision:
    """Return the precision of the bands: the requested one, else the default of the device."""
    if request.precision is not None:
        return request.precision  # type: ignore[return-value]
    return default_precision(request.card.is_cpu)


def setting_on_card(request: PlanRequest, config: RunConfig) -> Setting:
    """Return the setting of a configuration on the requested GPUs and in the requested precision."""
    return setting_from_config(
        config, request.gpus, precision(request), request.card.is_cpu, request.card.native
    )


def ends_early(request: PlanRequest, candidate: Candidate) -> bool:
    """Return True if the text is too small for the budget: the run ends after `most_tokens`."""
    return candidate.tokens[1] >= most_tokens(request, candidate.setting)


def takes_all_hours(request: PlanRequest, candidate: Candidate) -> bool:
    """Return True if the budget is a time and the run is not too short for it."""
    return request.budget.kind == "hours" and not ends_early(request, candidate)


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
    if request.budget.kind == "loss" and budget_tokens(request, base, end) is None:
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
            setting = replace(base, stages=stages(request, step_tokens) if staged else one_stage)
        if explicit_batch or explicit_stages:
            check_batch_divides(setting)
        largest = min(stage.tokens for stage in setting.stages) // request.readers
        micro = base.micro_tokens if "micro_tokens" in request.overrides.get("batch", {}) else largest
        step = fastest_that_fits(request, replace(setting, micro_tokens=micro))
        if step.fits == "no" or not step.fits_host(request.card.host_bytes):
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
