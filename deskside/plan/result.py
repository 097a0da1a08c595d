"""The plan as data: for the text output, for programs as JSON, and for `deskside go`.

Every section names the source of its numbers: `measured` on this card, `published` by others, or `modelled`, with the
basis of the model in one line.
"""

import shlex
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from deskside.budget.loss import LAW
from deskside.budget.shape import active_params
from deskside.config import merge, presets
from deskside.config.duration import Duration
from deskside.plan.bands import Name
from deskside.plan.candidates import Candidate, precision
from deskside.plan.claim_check import ClaimFinding
from deskside.plan.costs import Cost
from deskside.plan.estimate import MEMORY_SOURCE, Range, StepEstimate, options, range_json
from deskside.plan.remedies import Remedy
from deskside.plan.request import PlanRequest
from deskside.plan.verdict import Answer

SCHEMA = 1
MODELLED = "modelled"
PLACEHOLDERS = {
    "DIR": "a directory written by deskside data prepare",
    "MODEL": "a run or a Hugging Face directory with the initial weights",
    "DATA": "the training data, such as a .jsonl file",
}


@dataclass(frozen=True)
class PlannedBand:
    """A band that can be executed. config: the configuration of `deskside train` as a plain dict for `merge.build`;
    command: the same as a command line, with PLACEHOLDERS for what a plan does not know."""

    name: Name
    why: str
    candidate: Candidate
    config: dict[str, Any]
    command: str
    cost: Cost

    @property
    def preset(self) -> str:
        return self.candidate.shape.preset

    @property
    def estimate(self) -> StepEstimate:
        return self.candidate.estimate

    @property
    def loss(self) -> Range:
        return self.candidate.loss


@dataclass(frozen=True)
class Plan:
    """The answer to a request. recommended: the name of the band to run; asked: the given model's run exactly as
    requested, None in an open search; alternatives: other precisions for the recommended band, with their speed."""

    request: PlanRequest
    verdict: Answer
    reasons: tuple[str, ...]
    bands: tuple[PlannedBand, ...]
    recommended: Name | None
    asked: StepEstimate | None
    remedies: tuple[Remedy, ...]
    findings: tuple[ClaimFinding, ...]
    alternatives: tuple[dict[str, Any], ...]
    hours: dict[str, float]
    notes: tuple[str, ...]

    @property
    def best(self) -> PlannedBand | None:
        """The recommended band."""
        return next((band for band in self.bands if band.name == self.recommended), None)

    @property
    def shown(self) -> StepEstimate | None:
        """The estimate whose memory and speed are shown: the recommended band, else the run as requested."""
        return self.asked if self.best is None else self.best.estimate

    def to_json(self) -> dict[str, Any]:
        """Return the whole plan as JSON."""
        best, shown = self.best, self.shown
        return {
            "schema_version": SCHEMA,
            "verdict": self.verdict,
            "reasons": list(self.reasons),
            "recommended": self.recommended,
            "request": _request(self.request),
            "bands": [_band(self, band) for band in self.bands],
            "memory": {} if shown is None else memory_json(self.request, shown),
            "speed": {} if shown is None else speed_json(self.request, shown),
            "cost": {} if best is None else best.cost.to_json(),
            "hours": self.hours,
            "asked": self.asked
            and {
                "memory": memory_json(self.request, self.asked),
                "speed": speed_json(self.request, self.asked),
            },
            "remedies": [remedy.to_json() for remedy in self.remedies],
            "claims": [asdict(finding) for finding in self.findings],
            "alternatives": list(self.alternatives),
            "notes": list(self.notes),
        }


def executable(request: PlanRequest, candidate: Candidate) -> tuple[dict[str, Any], str]:
    """Return (config, command) of a candidate. Raises UsageError if the configuration rejects it, which is a bug."""
    own: dict[str, Any] = options(candidate.setting, staged=bool(candidate.shape.config.schedule.stages))
    # The length of the run follows the budget: a time for hours, otherwise tokens.
    if request.pretrain_seconds is not None or request.budget.kind == "hours":
        length = str(Duration(int(candidate.seconds[1]), "seconds"))
    else:
        length = str(Duration(max(1, int(candidate.tokens[1])), "tokens"))
    own.setdefault("schedule", {})["length"] = length
    # Another precision than the request's may be what makes it fit.
    if candidate.setting.precision != precision(request) or request.precision is not None:
        own.setdefault("precision", {})["name"] = candidate.setting.precision
    positions = candidate.setting.model.max_position_embeddings
    built = merge.build([*candidate.shape.layers, own])
    config = built.model_dump(mode="json", exclude_unset=True)
    if built.align is not None:
        words = _fine_tuning(config)
    else:
        by_hand: dict[str, Any] = {}
        for layer in (request.overrides, own):
            by_hand = merge.merge([by_hand, layer])[0]
        if positions != merge.build(presets.layers(candidate.shape.preset)).model.max_position_embeddings:
            by_hand.setdefault("model", {})["max_position_embeddings"] = positions
        options_by_hand = _words(by_hand)
        words = ["train", candidate.shape.preset]
        if built.adapter is not None:  # adapters need weights to start from
            words += ["--init", "MODEL"]
        if "--data.path" not in options_by_hand:
            words += ["--data.path", "DIR"]
        words += options_by_hand
    launcher = ["torchrun", "--nproc-per-node", str(request.gpus), "-m"] if request.gpus > 1 else []
    return config, shlex.join([*launcher, "deskside", *words])


def _fine_tuning(config: Mapping[str, Any]) -> list[str]:
    """Return the words of a fine-tuning command. It takes no preset: every key is an option, the model comes with its
    weights."""
    own = {part: values for part, values in config.items() if part not in ("model", "align")}
    align = {key: value for key, value in config["align"].items() if key not in ("name", "data", "val")}
    words = [config["align"]["name"], "MODEL", "--data", *(config["align"].get("data") or ["DATA"])]
    if held_out := config["align"].get("val"):
        words += ["--val", *held_out]
    return [*words, *_words({**own, "align": align})]


def _words(given: Mapping[str, Any]) -> list[str]:
    """Options of the command line."""
    words = []
    for part, values in given.items():
        if isinstance(values, Mapping):
            for key, value in values.items():
                words += [f"--{part}.{key}", _written(value)]
        else:
            words += [f"--{part}", _written(values)]
    return words


def _written(value: Any) -> str:
    """Return a value as `deskside train` reads it: lists and tables as in TOML."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}={_written(v)}" for key, v in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(_written(v) for v in value) + "]"
    return str(value)


def memory_json(request: PlanRequest, found: StepEstimate) -> dict[str, Any]:
    return {
        "source": MODELLED,
        "basis": MEMORY_SOURCE,
        "unit": "bytes",
        "items": dict(found.memory.items),
        "peak_allocated": found.memory.allocated,
        "reserved": found.memory.reserved,
        "context": request.calibration.overhead_bytes,
        "needed": {end: int(size) for end, size in range_json(found.memory_bytes).items()},
        "capacity": found.capacity,
        "capacity_source": request.card.memory_source,
        "peak_at": found.memory.instant,
        "fits": found.fits,
    }


def speed_json(request: PlanRequest, found: StepEstimate) -> dict[str, Any]:
    setting = found.setting
    gpu = request.card.gpu
    per_second = setting.flops_per_token * found.tokens_per_second[1] / request.gpus
    return {
        "source": MODELLED,
        "calibration": request.calibration.source,
        "basis": request.calibration.basis,
        "precision": setting.precision,
        "emulated": setting.emulated,
        "tokens_per_second": range_json(found.tokens_per_second),
        "step_seconds": found.step_seconds,
        "items": dict(found.step),
        "tokens_per_step": setting.tokens_per_step,
        "micro_tokens": setting.micro_tokens,
        "accumulation": found.accumulation,
        "flops_per_token": setting.flops_per_token,
        "mfu": None if gpu is None else per_second / gpu.bf16_flops,
        "mfu_of": "data sheet, BF16 with FP32 accumulation, causal attention",
    }


def _band(plan: Plan, band: PlannedBand) -> dict[str, Any]:
    found, setting = band.candidate, band.candidate.setting
    loss = {**range_json(found.loss), "unit": "bits per byte", "source": LAW.source}
    return {
        "name": band.name,
        "recommended": band.name == plan.recommended,
        "why": band.why,
        "model": {
            "preset": band.preset,
            "params": found.params,
            "active_params": active_params(setting.model),
            "weights": found.weights,
            "layers": setting.model.num_hidden_layers,
            "hidden_size": setting.model.hidden_size,
        },
        "tokens": int(found.tokens[1]),
        "tokens_range": {"low": int(found.tokens[0]), "high": int(found.tokens[2])},
        "tokens_per_param": found.tokens[1] / found.weights,
        "epochs": None
        if plan.request.unique_tokens is None
        else found.tokens[1] / plan.request.unique_tokens,
        "steps": int(found.tokens[1] // setting.tokens_per_step),
        **({"loss": loss} if plan.request.pretrains else {}),
        "batch": {
            "tokens": setting.stages[-1].tokens,
            "micro_tokens": setting.micro_tokens,
            "accumulation": found.estimate.accumulation,
        },
        "stages": [
            {"share": s.share, "sequence_length": s.sequence_length, "tokens": s.tokens}
            for s in setting.stages
        ],
        "schedule": band.config["schedule"],
        "optimizer": setting.optimizer,
        "precision": setting.precision,
        "activation_checkpointing": setting.activation_checkpointing,
        "memory": memory_json(plan.request, found.estimate),
        "speed": speed_json(plan.request, found.estimate),
        "time": {
            "source": MODELLED,
            "pretraining_seconds": range_json(found.seconds),
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
        },
    }
