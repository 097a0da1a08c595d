"""The plan of `deskside go`: which model and formats train for the time that is left. go.json stores a part of it."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from deskside.budget.format_costs import quantized
from deskside.budget.loss import TYPICAL_TEXT, TextBaselines
from deskside.budget.shape import num_params
from deskside.config import merge, presets
from deskside.config.gpu_batch import build_on_gpus
from deskside.config.recipes import ALIASES
from deskside.config.run import RunConfig
from deskside.config.vocabulary import vocabulary_layer
from deskside.data.reading.index_file import is_prepared
from deskside.pipeline.checks import Result, skipped
from deskside.plan.candidates import ends_early
from deskside.plan.planner import OFFERED, make_plan
from deskside.plan.question import PlanQuestion
from deskside.plan.request import PlanRequest, make_request, text_baselines
from deskside.plan.result import Plan, PlannedBand
from deskside.run.directory import resolve_path
from deskside.utils.errors import RunError, UsageError
from deskside.utils.format import count, duration, gib

FP8_EPOCHS = 3.0  # the most that FP8 was compared with BF16 is 2.9 (docs/indicmoe.md)
EVALUATIONS_OF_SHORT_RUN = 6  # evaluations of a run of one minute to one hour


@dataclass(frozen=True)
class PipelineRequest:
    """Options of `deskside go` that determine the plan.

    Attributes:
        hours: Time budget.
        preset: Model preset; None lets the plan choose the model.
        data: Directory of the prepared data; None for the preset's own data.
        given: Configuration options from the command line, as a nested dict.
        memory_gib: Limit on the device memory that the plan may use.
        probes: Directory of the probe store.
        length: Length of the pretraining, in steps or tokens; None fills the hours.
        gpus: Processes that train.
        own_corpus: Regularize for many epochs, as the planner's own-corpus mode.
    """

    hours: float
    preset: str | None
    data: str | None
    given: Mapping[str, Any]
    memory_gib: float | None
    probes: str
    length: str | None = None
    gpus: int = 1
    own_corpus: bool = False

    @property
    def on_cpu(self) -> bool:
        """True if the run is to train on the CPU, whether or not there is a GPU."""
        layers = [] if self.preset is None else presets.for_pretraining(self.preset)
        return merge.build([*layers, self.given]).compute.device == "cpu"

    @classmethod
    def of(cls, hours: float, options: Mapping[str, Any]) -> "PipelineRequest":
        """Return the request for the options in go.json. Relative paths start at the directory where it was started."""
        preset, data, start_dir = options["preset"], options["data"], options.get("directory")
        if preset is not None and preset.endswith(".toml"):
            preset = resolve_path(preset, start_dir)
        return cls(
            hours=hours,
            preset=preset,
            data=None if data is None else resolve_path(data, start_dir),
            given=options["given"],
            memory_gib=options["gpu_budget"],
            probes=resolve_path(options["probes"], start_dir),
            length=options.get("length"),
            gpus=options.get("gpus", 1),
            own_corpus=options.get("own_corpus", False),
        )


def plan(
    request: PipelineRequest, pretrain_seconds: float, native_recipes: Collection[str] = ()
) -> tuple[Result, Plan | None]:
    """Plan a training run of `pretrain_seconds`. Return the part of the plan that go.json stores, and the whole plan.

    native_recipes: recipes below 16 bits that the doctor found right on this GPU's tensor cores. The run uses FP8 if it
    is one of them, makes the plan better, and neither the user nor the preset sets a precision.

    If no plan can be made, the phase is skipped and the preset is trained without a plan (None); without a preset, or
    in own-corpus mode, UsageError is raised. Raises RunError if the planner's verdict is "no", or if the requested
    length takes longer.
    """
    try:
        full_plan = make_plan(_plan_request(request, pretrain_seconds))
    except UsageError as error:
        if request.preset is None or request.own_corpus:
            raise
        return {**skipped(str(error)), "config": preset_config(request)}, None
    reasons: list[str] = []
    if _may_use_fp8(request, full_plan, native_recipes):
        given = merge.merge([request.given, {"precision": {"name": OFFERED}}])[0]
        in_fp8 = replace(request, given=given)
        fp8_plan = _better_in_fp8(in_fp8, pretrain_seconds, full_plan)
        if fp8_plan is not None and full_plan.best is not None:
            # The model of the plan in FP8 may be another one.
            model, told = full_plan.best.preset, full_plan.alternatives[0]["told"]
            reasons = [f"trains in FP8: for {model}, {told}; to keep BF16: --precision.name bf16"]
            request, full_plan = in_fp8, fp8_plan
    best = full_plan.best
    if full_plan.verdict == "no" or best is None:
        raise RunError("; ".join(full_plan.reason_texts("against")))
    if request.length is not None and best.candidate.seconds[1] > pretrain_seconds:
        needed = duration(best.candidate.seconds[1])
        raise RunError(
            f"training for {request.length} takes about {needed}, but only {duration(pretrain_seconds)} of the time "
            "budget remain; start again with more --hours, or with a shorter length"
        )
    bands = full_plan.bands if request.preset is None else ()
    calibration = full_plan.request.calibration
    result = {
        "status": "made",
        "verdict": full_plan.verdict,
        "reasons": [*full_plan.reason_texts(), *reasons],
        "source": f"modelled from {calibration.source} rates: {calibration.basis}",
        "bands": [_band_result(band, full_plan) for band in bands],
        **_band_result(best, full_plan),
    }
    # With the verdict "yes", the preset fits unchanged, so the planner changes it only for many epochs.
    if request.preset is not None and full_plan.verdict == "yes" and not request.own_corpus:
        result["config"] = merge.merge([preset_config(request), best.regularisation])[0]
    return result, full_plan


def _may_use_fp8(request: PipelineRequest, in_bf16: Plan, native_recipes: Collection[str]) -> bool:
    """Return True if this run may train in FP8 without being told to.

    Mixtures keep BF16, because a quick doctor does not check the products of experts.
    """
    layers = [] if request.preset is None else presets.for_pretraining(request.preset)
    chosen = "name" in merge.build([*layers, request.given]).precision.model_fields_set
    if chosen or request.own_corpus or ALIASES[OFFERED] not in native_recipes:
        return False
    dense = in_bf16.best is not None and not in_bf16.best.candidate.setting.model.num_experts
    return dense and bool(in_bf16.alternatives)


def _better_in_fp8(in_fp8: PipelineRequest, pretrain_seconds: float, in_bf16: Plan) -> Plan | None:
    """Return the plan in FP8 if it is better than that in BF16 and its loss is known to be the same.

    In runs that read their text at most FP8_EPOCHS times, FP8 was not shown to change the loss. The optimizer and the
    formats of weights and states must stay the same.
    """
    try:
        plan = make_plan(_plan_request(in_fp8, pretrain_seconds))
    except UsageError:  # a model of the search has dimensions that FP8 does not support
        return None
    if plan.best is None or in_bf16.best is None or plan.verdict != in_bf16.verdict:
        return None
    new, old = plan.best.candidate, in_bf16.best.candidate
    formats = [(c.setting.optimizer, c.setting.weights, c.setting.states) for c in (new, old)]
    speeds = [c.estimate.tokens_per_second[1] for c in (new, old)]
    # The forecast of a preset for a given length is the same in both.
    faster = speeds[0] > speeds[1] or new.forecast[1] < old.forecast[1]
    better = quantized(new.setting.precision) and new.forecast[1] <= old.forecast[1] and faster
    unique = plan.request.unique_tokens
    known = formats[0] == formats[1] and (unique is None or new.tokens[1] <= FP8_EPOCHS * unique)
    return plan if better and known else None


def preset_config(request: PipelineRequest) -> dict[str, Any]:
    """Return the configuration of the preset with the given options."""
    assert request.preset is not None
    config = build_on_gpus([*presets.for_pretraining(request.preset), given_layer(request)], request.gpus)
    return config.model_dump(mode="json", exclude_unset=True)


def given_layer(request: PipelineRequest) -> dict[str, Any]:
    """Return the configuration layer of the given options, with a vocabulary that is large enough for the data."""
    layer: dict[str, Any] = dict(request.given)
    if request.data is not None:
        layer["data"] = {**layer.get("data", {}), "path": request.data, "sources": []}
        enough = vocabulary_layer(request.preset, layer, _index(request.data).tokenizer.vocab_size)
        layer = merge.merge([layer, enough])[0]
    return layer


def unique_tokens(data: str) -> int:
    """Return the number of tokens in the training split."""
    return _index(data).splits["train"].tokens


def prepared_data(request: PipelineRequest) -> str | None:
    """Return the directory of the run's data, given or from the preset; None if it is not prepared yet."""
    data = request.data
    if data is None and request.preset is not None:
        data = merge.build([*presets.for_pretraining(request.preset), given_layer(request)]).data.path
    return data if data is not None and is_prepared(data) else None


def _text(data: str | None) -> TextBaselines:
    """Return the baselines of the validation text; those of a typical text without data."""
    return TYPICAL_TEXT if data is None else text_baselines(_index(data).splits.get("val"))


def final_config(config: Mapping[str, Any], seconds: float, length: str | None = None) -> RunConfig:
    """Return the configuration of a run that ends after `seconds` of wall-clock time, or after a given length.

    By default, a run is evaluated every ten minutes, and a run of one minute to one hour EVALUATIONS_OF_SHORT_RUN
    times. seconds: for this choice, even if a length is given.
    """
    schedule = {"length": f"{seconds!r}s", "clock": "wall"} if length is None else {"length": length}
    layers = [config, {"schedule": schedule}]
    if 60 <= seconds < 600 * EVALUATIONS_OF_SHORT_RUN:
        layers.insert(0, {"evaluate": {"every": f"{seconds / (EVALUATIONS_OF_SHORT_RUN + 1):.0f}s"}})
    return merge.build(layers)


def plan_lines(result: Mapping[str, Any]) -> list[str]:
    """Return the plan as lines of text. result: the first value that `plan` returned."""
    if result["status"] != "made":
        config = merge.build([result["config"]])
        return [
            f"plan: skipped: {result['reason']}",
            f"trains the preset without a plan: {count(num_params(config.model))} parameters, sequence "
            f"length {config.batch.sequence_length}; memory and loss are not predicted",
        ]
    text = [f"plan, {result['source']}"]
    for band in result["bands"] or [result]:
        mark = "->" if band["name"] == result["name"] else "  "
        low, expected, high = band["bpb"]
        text.append(
            f"{mark} {band['name']:<8} {band['preset']:<6} {count(band['params'])} parameters, "
            f"{count(band['tokens'][1])} tokens, {band['tokens_per_second'][1]:,.0f} tokens/s"
            + (f", {gib(band['memory_gib'][1] * 2**30)}" if "memory_gib" in band else "")
            + f", {expected:.3f} bits per byte ({low:.3f} to {high:.3f})"
        )
    return [*text, *(f"   {reason}" for reason in result["reasons"])]


def _plan_request(request: PipelineRequest, pretrain_seconds: float) -> PlanRequest:
    """Return the request to the planner: for the requested length, or for `pretrain_seconds` without one."""
    data = prepared_data(request)
    tokens = None
    if request.length is not None:
        config = final_config(preset_config(request), pretrain_seconds, request.length)
        assert config.schedule.length is not None
        value, unit = config.schedule.length.value, config.schedule.length.unit
        tokens = value * config.mean_step_tokens() if unit == "steps" else value
    question = PlanQuestion(
        here=True,
        hours=request.hours if tokens is None else None,
        tokens=tokens,
        preset=request.preset,
        # Processes on a CPU share its cores, so that they are not faster than one.
        gpus=1 if request.on_cpu else request.gpus,
        probes=request.probes,
        unique_tokens=None if data is None else unique_tokens(data),
        own_corpus=request.own_corpus,
    )
    plan_request = make_request(
        question, given_layer(request), pretrain_seconds if tokens is None else None, text=_text(data)
    )
    if request.memory_gib is not None:
        card = plan_request.card
        memory_bytes = min(card.memory_bytes, int(request.memory_gib * 2**30))
        plan_request = replace(plan_request, card=replace(card, memory_bytes=memory_bytes))
    return plan_request


def _band_result(band: PlannedBand, full_plan: Plan) -> Result:
    """Return the part of a band that go.json stores: predictions as [low, expected, high], and the configuration."""
    candidate = band.candidate
    result: Result = {
        "name": band.name,
        "preset": band.preset,
        "params": candidate.params,
        "weights": candidate.weights,
        "tokens": [float(x) for x in candidate.tokens],
        "tokens_per_second": [float(x) for x in candidate.estimate.tokens_per_second],
        "bpb": [float(x) for x in candidate.forecast],
        "fits": candidate.estimate.fits,
        "config": band.config,
    }
    early = full_plan.request.budget.kind == "hours" and ends_early(full_plan.request, candidate)
    if early:
        result["length"] = band.config["schedule"]["length"]
        result["seconds"] = float(candidate.seconds[1])
    if not full_plan.request.card.is_cpu:  # CPU memory is not modelled
        peak = candidate.estimate.memory.allocated / 2**30
        spread = full_plan.request.calibration.memory_spread
        result["memory_gib"] = [max(0.0, peak * (1 - spread)), peak, peak * (1 + spread)]
    return result


def _index(data: str) -> Any:
    from deskside.data.reading.index import read_index

    return read_index(Path(data))
