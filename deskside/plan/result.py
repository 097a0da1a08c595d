"""The plan as a data structure and as JSON. The text output and `deskside go` read it too.

Every section has the source of its numbers: `measured` on this card, `reported` by other owners of such a card,
`published` by others, or `modelled`, with the basis of the model in one line.
"""

import json
import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from deskside.budget.loss import LAW, outside_measured
from deskside.budget.shape import active_params
from deskside.config import merge, presets
from deskside.config.duration import Duration
from deskside.config.gpu_batch import build_on_gpus
from deskside.config.run import RunConfig
from deskside.plan import own_corpus
from deskside.plan.bands import BandName
from deskside.plan.candidates import Candidate, ends_early, precision
from deskside.plan.claim_check import ClaimFinding
from deskside.plan.costs import Cost
from deskside.plan.estimate import MEMORY_SOURCE, Range, StepEstimate, range_json
from deskside.plan.expected_loss import law_inputs
from deskside.plan.reasons import Reason, ReasonKind
from deskside.plan.remedies import Remedy
from deskside.plan.request import PlanRequest
from deskside.plan.setting import options
from deskside.plan.verdict import Answer

SCHEMA = 1
MODELLED = "modelled"
PLACEHOLDERS = {
    "DIR": "a directory written by deskside data prepare; plan --data.path fills it in",
    "MODEL": "a run or a Hugging Face directory with the initial weights",
    "DATA": "the training data, such as a .jsonl file",
}


@dataclass(frozen=True)
class PlannedBand:
    """A band that can be executed.

    why: reason for the choice; config: the configuration of `deskside train`, as a dict for `merge.build`; command: the
    same as a command line, with PLACEHOLDERS for files that a plan does not know; regularisation: the layer of `config`
    that a run of many epochs adds, {} for few (`plan/own_corpus.py`).
    """

    name: BandName
    why: str
    candidate: Candidate
    config: dict[str, Any]
    command: str
    cost: Cost
    regularisation: Mapping[str, Any] = field(default_factory=dict)

    @property
    def preset(self) -> str:
        return self.candidate.shape.preset

    @property
    def estimate(self) -> StepEstimate:
        return self.candidate.estimate

    @property
    def loss(self) -> Range:
        """The forecast, in bits per byte."""
        return self.candidate.forecast


@dataclass(frozen=True)
class Plan:
    """The answer to a request.

    Attributes:
        recommended: Name of the recommended band.
        requested: The given model's run exactly as requested; None in an open search.
        alternatives: Other precisions for the recommended band, with their speed.
        hours: A time budget, split into the phases of `TIME_SHARES`.
    """

    request: PlanRequest
    verdict: Answer
    reasons: tuple[Reason, ...]
    bands: tuple[PlannedBand, ...]
    recommended: BandName | None
    requested: StepEstimate | None
    remedies: tuple[Remedy, ...]
    findings: tuple[ClaimFinding, ...]
    alternatives: tuple[dict[str, Any], ...]
    hours: dict[str, float]
    notes: tuple[str, ...]

    @property
    def best(self) -> PlannedBand | None:
        """The recommended band."""
        return next((band for band in self.bands if band.name == self.recommended), None)

    def reason_texts(self, kind: ReasonKind | None = None) -> list[str]:
        """Return the reasons of one kind as texts; None: all reasons."""
        return [reason.text for reason in self.reasons if kind in (None, reason.kind)]

    @property
    def shown(self) -> StepEstimate | None:
        """The estimate whose memory and speed are shown: the recommended band, else the run as requested."""
        return self.requested if self.best is None else self.best.estimate

    def to_json(self) -> dict[str, Any]:
        """Return the whole plan as JSON."""
        best, shown = self.best, self.shown
        return {
            "schema_version": SCHEMA,
            "verdict": self.verdict,
            "reasons": self.reason_texts(),
            "recommended": self.recommended,
            "request": _request(self.request),
            "bands": [_band(self, band) for band in self.bands],
            "memory": {} if shown is None else memory_json(self.request, shown),
            "speed": {} if shown is None else speed_json(self.request, shown),
            "cost": {} if best is None else best.cost.to_json(),
            "hours": self.hours,
            "asked": self.requested
            and {
                "memory": memory_json(self.request, self.requested),
                "speed": speed_json(self.request, self.requested),
            },
            "remedies": [remedy.to_json() for remedy in self.remedies],
            "claims": [asdict(finding) for finding in self.findings],
            "alternatives": list(self.alternatives),
            "notes": list(self.notes),
        }


def executable(request: PlanRequest, candidate: Candidate) -> tuple[dict[str, Any], str, Mapping[str, Any]]:
    """Return (config, command, regularisation) of a candidate, see `PlannedBand`.

    A UsageError from the configuration is a bug of the planner.
    """
    given = candidate.shape.config
    planned: dict[str, Any] = options(candidate.setting, bool(given.schedule.stages), given)
    # A budget of hours sets the length of the run as a time, any other budget and a small text as tokens.
    timed = request.pretrain_seconds is not None or request.budget.kind == "hours"
    if timed and not ends_early(request, candidate):
        length = str(Duration(int(candidate.seconds[1]), "seconds"))
    else:
        length = str(Duration(max(1, int(candidate.tokens[1])), "tokens"))
    planned.setdefault("schedule", {})["length"] = length
    regularised: Mapping[str, Any] = {}
    if request.unique_tokens is not None and request.pretrains:
        user_options, mode = request.user_options, request.own_corpus
        regularised = own_corpus.regularisation(
            candidate, request.unique_tokens, Duration.parse(length), user_options, mode
        )
        planned = dict(merge.merge([planned, regularised])[0])
    # The candidate may fit only in a different precision from the requested one.
    if candidate.setting.precision != precision(request) or request.precision is not None:
        planned.setdefault("precision", {})["name"] = candidate.setting.precision
    built, dropped = merge.build_and_dropped([*candidate.shape.layers, planned])
    config = built.model_dump(mode="json", exclude_unset=True)
    if built.align is not None:
        arguments = _fine_tuning_arguments(config)
    else:
        arguments = _training_arguments(request, candidate, planned, built, dropped)
    if request.gpus > 1:
        arguments += ["--gpus", str(request.gpus)]
    return config, shlex.join(["deskside", *arguments]), regularised


def _training_arguments(
    request: PlanRequest,
    candidate: Candidate,
    planned: Mapping[str, Any],
    built: RunConfig,
    dropped: Sequence[merge.KeyPath],
) -> list[str]:
    """Return the arguments of `deskside train`, after checking that it accepts them and would run `built`.

    planned: the planner's choices; dropped: options of the user that these leave without effect. All of them would be
    options of one command, in which an option without effect is an error.
    """
    shape = candidate.shape
    is_trained = request.given is not None and request.given.is_trained
    below = list(shape.layers[:2]) if is_trained else presets.layers(shape.preset)  # without options
    explicit = merge.merge([*shape.layers[len(below) :], planned])[0]
    for path in dropped:
        merge.delete(explicit, path)
    accepted = build_on_gpus([*below, explicit], request.gpus)
    if accepted.model_dump() != built.model_dump():
        raise AssertionError(f"the command of {shape.preset} would not carry out its plan: {explicit}")
    arguments = ["train", *(["--init"] if is_trained else []), shape.preset]
    if built.adapter is not None and not is_trained:  # adapters need weights to start from
        arguments += ["--init", "MODEL"]
    if "path" not in explicit.get("data", {}):
        arguments += ["--data.path", "DIR"]
    return arguments + _command_options(explicit)


def _fine_tuning_arguments(config: Mapping[str, Any]) -> list[str]:
    """Return the arguments of a fine-tuning command, such as `deskside sft`.

    It takes no preset, so that every key becomes an option. The model's shape comes with its weights.
    """
    sections = {part: values for part, values in config.items() if part not in ("model", "align")}
    align = {key: value for key, value in config["align"].items() if key not in ("name", "data", "val")}
    arguments = [config["align"]["name"], "MODEL", "--data", *(config["align"].get("data") or ["DATA"])]
    if held_out := config["align"].get("val"):
        arguments += ["--val", *held_out]
    return [*arguments, *_command_options({**sections, "align": align})]


def _command_options(config: Mapping[str, Any]) -> list[str]:
    """Return a configuration as command-line options."""
    arguments = []
    for part, values in config.items():
        if isinstance(values, Mapping):
            for key, value in values.items():
                arguments += [f"--{part}.{key}", _option_text(value)]
        else:
            arguments += [f"--{part}", _option_text(values)]
    return arguments


def _option_text(value: Any) -> str:
    """Return a value as `deskside train` parses it: lists and tables in TOML syntax."""
    return value if isinstance(value, str) else _toml(value)


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{json.dumps(key)}={_toml(v)}" for key, v in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(map(_toml, value)) + "]"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else str(value)


def memory_json(request: PlanRequest, estimate: StepEstimate) -> dict[str, Any]:
    """Return the memory of an estimate as JSON, in bytes."""
    return {
        "source": MODELLED,
        "basis": MEMORY_SOURCE,
        "unit": "bytes",
        "items": dict(estimate.memory.items),
        "peak_allocated": estimate.memory.allocated,
        "reserved": estimate.memory.reserved,
        "context": request.calibration.overhead_bytes,
        "needed": {end: int(size) for end, size in range_json(estimate.memory_bytes).items()},
        "capacity": estimate.capacity,
        "capacity_source": request.card.memory_source,
        "peak_at": estimate.memory.instant,
        "fits": estimate.fits,
        "host": {
            "items": estimate.setting.host_items(request.card.host_bytes),
            "available": request.card.host_bytes,
        },
    }


def speed_json(request: PlanRequest, estimate: StepEstimate) -> dict[str, Any]:
    """Return the speed of an estimate as JSON. items: seconds of a mean step."""
    setting = estimate.setting
    gpu = request.card.gpu
    flops_per_gpu = setting.flops_per_token * estimate.tokens_per_second[1] / request.gpus
    return {
        "source": MODELLED,
        "calibration": request.calibration.source,
        "basis": request.calibration.basis,
        "precision": setting.precision,
        "emulated": setting.emulated,
        "tokens_per_second": range_json(estimate.tokens_per_second),
        "step_seconds": estimate.step_seconds,
        "items": dict(estimate.step),
        "tokens_per_step": setting.tokens_per_step,
        "micro_tokens": setting.micro_tokens,
        "accumulation": estimate.accumulation,
        "flops_per_token": setting.flops_per_token,
        "mfu": None if gpu is None else flops_per_gpu / gpu.bf16_flops,
        "mfu_of": "data sheet, BF16 with FP32 accumulation, causal attention",
    }


def _band(plan: Plan, band: PlannedBand) -> dict[str, Any]:
    candidate, setting = band.candidate, band.candidate.setting
    unique = plan.request.unique_tokens
    loss = {
        **range_json(candidate.forecast),
        "law": range_json(candidate.loss),
        "bound": plan.request.text.ceiling,
        "outside_measured": outside_measured(*law_inputs(setting, candidate.tokens[1]), unique),
        "unit": "bits per byte",
        "source": LAW.source,
    }
    return {
        "name": band.name,
        "recommended": band.name == plan.recommended,
        "why": band.why,
        "model": {
            "preset": band.preset,
            "params": candidate.params,
            "active_params": active_params(setting.model),
            "weights": candidate.weights,
            "layers": setting.model.num_hidden_layers,
            "hidden_size": setting.model.hidden_size,
        },
        "tokens": int(candidate.tokens[1]),
        "tokens_range": {"low": int(candidate.tokens[0]), "high": int(candidate.tokens[2])},
        "tokens_per_param": candidate.tokens[1] / candidate.params,
        "epochs": candidate.tokens[1] / unique if unique is not None else None,
        "steps": math.ceil(candidate.tokens[1] / setting.tokens_per_step),
        **({"loss": loss} if plan.request.pretrains else {}),
        "batch": {
            "tokens": setting.stages[-1].tokens,
            "micro_tokens": setting.micro_tokens,
            "accumulation": candidate.estimate.accumulation,
        },
        "stages": [
            {"share": s.share, "sequence_length": s.sequence_length, "tokens": s.tokens}
            for s in setting.stages
        ],
        "ends_early": ends_early(plan.request, candidate),
        "schedule": band.config["schedule"],
        "optimizer": setting.optimizer,
        "precision": setting.precision,
        "activation_checkpointing": setting.activation_checkpointing,
        "memory": memory_json(plan.request, candidate.estimate),
        "speed": speed_json(plan.request, candidate.estimate),
        "time": {
            "source": MODELLED,
            "pretraining_seconds": range_json(candidate.seconds),
        },
        "cost": band.cost.to_json(),
        "config": band.config,
        "command": band.command,
    }


def _request(request: PlanRequest) -> dict[str, Any]:
    calibration = request.calibration
    return {
        "card": request.card.name,
        "card_memory": request.card.memory_bytes,
        "card_source": "measured here" if request.card.machine else "published",
        "gpus": request.gpus,
        "budget": asdict(request.budget) if request.budget.kind else None,
        "model": None if request.given is None else request.given.label,
        "sequence_length": request.sequence,
        "precision": request.precision,
        "unique_tokens": request.unique_tokens,
        "calibration": {
            "source": calibration.source,
            "basis": calibration.basis,
            "speed_spread": calibration.speed_spread,
            "memory_spread": calibration.memory_spread,
            "reports": list(calibration.reports),
        },
    }
