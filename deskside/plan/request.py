"""A checked request to the planner: the card, the budget, the model if it is given, prices.

`make_request` checks a `PlanQuestion`, the options of the command line, and returns a `PlanRequest` that the rest of
the planner relies on. Every error is one line. If an option is None because it was not given, the plan leaves out the
results that depend on it, or uses a published value and says so.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, Literal, Protocol, get_args

from deskside.budget.loss import TYPICAL_TEXT, UNTRAINED_BPB, TextBaselines
from deskside.config import merge
from deskside.config.gpu_batch import check_gradients
from deskside.config.model import ModelConfig
from deskside.config.run import RunConfig
from deskside.config.sections import PrecisionName
from deskside.measurements.reported import reported_for
from deskside.plan.calibrate import Calibration, calibrate, measured_fp8_speedup
from deskside.plan.card import PlanCard, find_card, measured_values, with_gpu_budget
from deskside.plan.given_model import STAGES_SET_LENGTH, GivenModel, given_model
from deskside.plan.published import Speedup
from deskside.plan.question import PlanQuestion, count
from deskside.utils.errors import UsageError

MAX_BUDGET = {"hours": 1e6, "tokens": 1e16, "flops": 1e30}  # 114 years; many times the text that exists
MAX_PRICE = 1e6  # dollars per kWh or per hour
MIN_SEQUENCE_LENGTH = 16
MAX_GPUS = 64

# Shares of a time budget.
TIME_SHARES = {"pretraining": 0.85, "sft": 0.08, "evaluation": 0.03, "margin": 0.04}


class SplitBaselines(Protocol):
    """The part of a split's index entry that the planner reads. It does not import `data`."""

    @property
    def unigram_bpb(self) -> float | None: ...

    @property
    def gzip_bpb(self) -> float | None: ...


@dataclass(frozen=True)
class PlanBudget:
    """Limit of a run. kind None: no limit; "hours": for all of `TIME_SHARES`; "flops": training FLOPs by the convention
    of `budget/shape.py`; "loss": bits per byte to reach."""

    kind: Literal["hours", "tokens", "flops", "loss"] | None = None
    value: float = 0.0


@dataclass(frozen=True)
class PlanRequest:
    """The input of the planner.

    Attributes:
        own_corpus: Regularize runs that read a small corpus many times (`plan/own_corpus.py`).
        context: GPUs that share every row (`parallel.context`).
        overrides: Configuration set by the user, which takes precedence over the planner's choices.
        setup_seconds, measured_watts, measured_fp8: Results of the probe on this card, None if it did not run.
        pretrain_seconds: Wall-clock seconds of the pretraining run, if the caller knows them better than `TIME_SHARES`.
        text: Baselines of the validation text, which bound the forecast of the loss.
    """

    card: PlanCard
    calibration: Calibration
    budget: PlanBudget
    given: GivenModel | None
    gpus: int = 1
    context: int = 1
    precision: str | None = None
    sequence_length: int | None = None
    price_kwh: float | None = None
    rent_per_hour: float | None = None
    unique_tokens: int | None = None
    own_corpus: bool = False
    overrides: Mapping[str, Any] = field(default_factory=dict)
    setup_seconds: float | None = None
    pretrain_seconds: float | None = None
    measured_watts: float | None = None
    measured_fp8: Speedup | None = None
    notes: tuple[str, ...] = ()
    text: TextBaselines = TYPICAL_TEXT

    @property
    def readers(self) -> int:
        """The number of GPUs that read different rows; those that share rows (`parallel.context`) count once."""
        return self.gpus // self.context

    @property
    def user_options(self) -> dict[str, Any]:
        """Configuration set by the user, in a file or by `overrides`."""
        files = () if self.given is None else self.given.file_layers
        return merge.merge([*files, self.overrides])[0]

    def with_options(self, options: Mapping[str, Any]) -> "PlanRequest":
        """Return the request with other options in place of the user's, but the same GPUs that share rows."""
        shared = {"parallel": {"context": self.context}} if self.context > 1 else {}
        return replace(self, overrides={**options, **shared})

    @property
    def sequence(self) -> int:
        """Tokens per row of the longest stage."""
        if self.sequence_length is not None:
            return self.sequence_length
        if self.given is not None:
            return max(stage.sequence_length for stage in self.given.config.stages())
        batch = self.overrides.get("batch", {})
        return int(batch.get("sequence_length", defaults().batch.sequence_length))

    @property
    def pretrains(self) -> bool:
        """True if the model is trained from scratch. Only then does the loss law apply."""
        return self.given is None or (self.given.config.adapter is None and self.given.config.align is None)


def text_baselines(split: SplitBaselines | None) -> TextBaselines:
    """Return the baselines of a validation split of prepared data; `TYPICAL_TEXT` if they were not measured."""
    if split is None or split.unigram_bpb is None:
        return TYPICAL_TEXT
    return TextBaselines(split.unigram_bpb, split.gzip_bpb)


def make_request(
    question: PlanQuestion,
    overrides: Mapping[str, Any] | None = None,
    pretrain_seconds: float | None = None,
    shape: ModelConfig | None = None,
    text: TextBaselines = TYPICAL_TEXT,
) -> PlanRequest:
    """Return the checked request for a question. Raises UsageError.

    Args:
        overrides: Configuration set by the user, such as {"model": {...}, "batch": {...}}.
        pretrain_seconds: Wall-clock seconds of the pretraining run, if the caller knows them better than `TIME_SHARES`.
        shape: Configuration of the model that `question.init` names.
        text: Baselines of the validation text.
    """
    q, overrides = question, dict(overrides or {})
    budget = _budget(q)
    models = [f"--{name}" for name in ("preset", "depth", "params", "init") if getattr(q, name) is not None]
    if len(models) > 1:
        raise UsageError(f"{' and '.join(models)} each set the model; give only one of them")
    if not 1 <= q.gpus <= MAX_GPUS:
        raise UsageError(f"--gpus: {q.gpus} cannot be planned; give 1 to {MAX_GPUS}, all in one machine")
    if q.sequence is not None and q.sequence < MIN_SEQUENCE_LENGTH:
        raise UsageError(
            f"--sequence: rows of {q.sequence} tokens are too short; give {MIN_SEQUENCE_LENGTH} or more"
        )
    for name in ("price_kwh", "rent_per_hour"):
        price = getattr(q, name)
        if price is not None and not 0 <= price <= MAX_PRICE:
            raise UsageError(
                f"--{name.replace('_', '-')}: a price is a number of dollars from 0 to {MAX_PRICE:,.0f}, not {price:g}"
            )
    unique = None if q.unique_tokens is None else int(count("--unique-tokens", q.unique_tokens))
    if q.own_corpus and unique is None:
        raise UsageError(
            "--own-corpus: needs the size of the text; give prepared data with --data.path, or --unique-tokens"
        )
    precision = _precision(q.precision, overrides)
    if precision is not None:
        overrides["precision"] = {**overrides.get("precision", {}), "name": precision}
    for key in ("length", "hours", "steps", "tokens"):
        if key in overrides.get("schedule", {}):
            raise UsageError(
                f"--schedule.{key}: the plan's budget sets the length of the run; give --hours or --tokens instead"
            )
    if q.sequence is not None and overrides.get("schedule", {}).get("stages"):
        raise UsageError(STAGES_SET_LENGTH)
    given = given_model(q, overrides, shape)
    if given is not None and given.config.align is not None and given.config.align.name == "grpo":
        raise UsageError(
            "align.name: grpo cannot be planned, because the time and the memory of its sampling are not modelled; "
            "deskside grpo itself finds passes that fit"
        )
    parts = {part: overrides.get(part, {}) for part in ("compute", "optim", "parallel")}
    config = merge.build([parts]) if given is None else given.config
    card, rows, notes = find_card(q, config.compute.device)
    card = with_gpu_budget(card, config.compute.gpu_budget)
    if precision == "fp32" and card.gpu is None and not card.is_cpu:  # a probe measures products in BF16 only
        raise UsageError(
            f"--precision: fp32 cannot be planned for {card.name}, which is not in the table of GPUs; use bf16"
        )
    if given is None and "adapter" in overrides:
        raise UsageError("--adapter: needs a model; give --preset, --init, --depth or --params")
    if budget.kind is None and given is None:
        raise UsageError(
            "no budget and no model; give --hours, --tokens, --flops or --loss, or a model with --preset"
        )
    request = PlanRequest(
        card=card,
        calibration=calibrate(card.gpu, rows, () if card.gpu is None else reported_for(card.gpu.name)),
        budget=budget,
        given=given,
        gpus=q.gpus,
        context=_context(q.gpus, config),
        precision=precision,
        sequence_length=q.sequence,
        price_kwh=q.price_kwh,
        rent_per_hour=q.rent_per_hour,
        unique_tokens=unique,
        own_corpus=q.own_corpus,
        overrides=overrides,
        setup_seconds=max(measured_values(rows, "setup_seconds"), default=None),
        pretrain_seconds=pretrain_seconds,
        measured_watts=max(measured_values(rows, "watts"), default=None),
        measured_fp8=measured_fp8_speedup(rows),
        notes=tuple(notes),
        text=text,
    )
    if budget.kind == "loss" and budget.value >= text.ceiling:
        raise UsageError(
            f"--loss: token frequencies alone give {text.unigram:.3f} bits per byte on this text; give less"
        )
    if q.own_corpus and not request.pretrains:
        raise UsageError("--own-corpus: is for pretraining; leave it out")
    if budget.kind == "loss" and not request.pretrains:
        raise UsageError(
            "--loss: bits per byte are only predicted for pretraining; give --hours, --tokens or --flops"
        )
    return request


def _context(gpus: int, config: RunConfig) -> int:
    """Return the number of GPUs that share every row. Raises UsageError for options that these GPUs cannot have."""
    context = config.parallel.context
    if gpus % context:
        raise UsageError(
            f"parallel.context: {context} GPUs share a row, so plan for a multiple of them: --gpus {context}"
        )
    check_gradients(config, gpus)
    return context


def _budget(q: PlanQuestion) -> PlanBudget:
    named = [kind for kind in ("hours", "tokens", "flops", "loss") if getattr(q, kind) is not None]
    if not named:
        return PlanBudget()
    if len(named) > 1:
        raise UsageError(f"--{' and --'.join(named)} each set the budget; give only one of them")
    kind, given = named[0], getattr(q, named[0])
    value = count(f"--{kind}", given) if kind == "tokens" else float(given)
    if not (value > 0 and math.isfinite(value)):
        raise UsageError(f"--{kind}: must be a number above zero, not {value:g}")
    if kind in MAX_BUDGET and value > MAX_BUDGET[kind]:
        raise UsageError(f"--{kind}: {value:g} is too large; give at most {MAX_BUDGET[kind]:g}")
    if kind == "loss" and value >= UNTRAINED_BPB:
        raise UsageError(
            f"--loss: an untrained model has {value:g} bits per byte already; give less than {UNTRAINED_BPB:g}"
        )
    return PlanBudget(kind, value)  # type: ignore[arg-type]


@cache
def defaults() -> RunConfig:
    """Return the default configuration of `deskside train`."""
    return RunConfig()


def _precision(name: str | None, overrides: Mapping[str, Any]) -> str | None:
    """Return the precision set by --precision or --precision.name, None if neither is given."""
    known = [known for known in get_args(PrecisionName) if known != "auto"]
    override = overrides.get("precision", {}).get("name", "auto")
    if name is not None and name not in known:
        raise UsageError(f"--precision: {name} cannot be planned; use one of {', '.join(known)}")
    if name is not None and override not in ("auto", name):
        raise UsageError(
            f"--precision: {name} contradicts --precision.name {override}; leave one of them out"
        )
    return name or (override if override in known else None)
