"""A checked request to the planner: the card, the budget, the model if it is given, prices.

`make_request` checks a `PlanQuestion`, the options of the command line, and returns a `PlanRequest` that the rest of
the planner relies on. Every error is one line. If an option is None because it was not given, the plan leaves the
results out that depend on it, or uses a published value and says so.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from decimal import Decimal, InvalidOperation
from functools import cache
from typing import Any, Literal, Protocol, get_args

import deskside.measurements.store as probe_store
from deskside.budget.format_costs import LowFormat
from deskside.budget.loss import TYPICAL_TEXT, UNTRAINED_BPB, TextBaselines
from deskside.budget.shape import num_params
from deskside.config import merge, presets
from deskside.config.model import ModelConfig
from deskside.config.run import RunConfig
from deskside.config.sections import BatchConfig, PrecisionName
from deskside.facts import gpus
from deskside.facts.gpus import Gpu
from deskside.measurements.reported import reported_for
from deskside.plan.calibrate import Calibration, calibrate, measured_fp8_speedup
from deskside.plan.published import Speedup
from deskside.utils import format
from deskside.utils.errors import UsageError
from deskside.utils.format import gib
from deskside.utils.host_memory import usable_bytes

MAX_BUDGET = {"hours": 1e6, "tokens": 1e16, "flops": 1e30}  # 114 years; many times the text that exists
MAX_PRICE = 1e6  # dollars per kWh or per hour
SUFFIXES = {"k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}
# Share of a card's memory that the driver reserves: programs can use 23.5 of 24 GiB on an RTX 4090, 31.4 of 32 GiB on
# an RTX 5090.
DRIVER_SHARE = 0.02
MAX_DEPTH = 128  # of the depth series: hidden size 8192, 104 billion parameters
MIN_SEQUENCE_LENGTH = 16
MAX_GPUS = 64
REPORTED_USE = 256 * 2**20  # a plan mentions memory used by other programs from this many bytes on
# NVFP4 is planned as emulated on every card: our native NVFP4 products (kernels/nvfp4/native.py) were compiled for
# cards with FP4 units, but never run on one.
TRAINED_NATIVELY: tuple[LowFormat, ...] = ("fp8",)
GROUPED_FP8 = "9.0"  # the compute capability that every build of torch has grouped products of FP8 for
STAGES_SET_LENGTH = (
    "--sequence: schedule.stages sets the sequence lengths; change them there, or leave one out"
)

# Shares of a time budget.
TIME_SHARES = {"pretraining": 0.85, "sft": 0.08, "evaluation": 0.03, "margin": 0.04}


@dataclass(kw_only=True)
class PlanQuestion:
    """The unchecked options of `deskside plan`. Counts may be text such as 3B or 1.5e9."""

    gpu: str | None = None
    here: bool = False
    hours: float | None = None
    tokens: str | float | None = None
    flops: float | None = None
    loss: float | None = None
    preset: str | None = None
    depth: int | None = None
    params: str | float | None = None
    init: str | None = None
    gpus: int = 1
    precision: str | None = None
    sequence: int | None = None
    unique_tokens: str | float | None = None
    own_corpus: bool = False
    price_kwh: float | None = None
    rent_per_hour: float | None = None
    probes: str = "probes"


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
class PlanCard:
    """The GPU to plan for.

    memory_bytes: memory that programs can use, or for a card in this machine, the memory that is free now; gpu: the
    card's data sheet, None if it is not in the table; machine: this machine if it contains the card, else None;
    host_bytes: memory of its host that programs can use now, None if unknown.
    """

    name: str
    memory_bytes: int
    memory_source: str
    gpu: Gpu | None
    machine: probe_store.Machine | None = None
    host_bytes: int | None = None

    @property
    def is_cpu(self) -> bool:
        return self.machine is not None and self.machine.device == "cpu"

    @property
    def native(self) -> frozenset[LowFormat]:
        """Formats below 16 bits that its tensor cores support and that deskside has trained with natively."""
        if self.gpu is None:
            return frozenset()
        rates: dict[LowFormat, float | None] = {"fp8": self.gpu.fp8_flops, "nvfp4": self.gpu.fp4_flops}
        native = {format for format in TRAINED_NATIVELY if rates[format] is not None}
        return frozenset(native | ({"fp8-grouped"} if self.gpu.compute_capability == GROUPED_FP8 else set()))


@dataclass(frozen=True)
class CandidateModel:
    """A model that could be trained. preset: the argument of `deskside train`; layers: its configuration layers, of
    which later ones take precedence."""

    preset: str
    layers: tuple[dict[str, Any], ...]
    config: RunConfig

    @property
    def model(self) -> ModelConfig:
        return self.config.model


@dataclass(frozen=True)
class GivenModel(CandidateModel):
    """The model that the user asks about. label: its name for messages; explicit: the dotted keys set by a layer.

    file_layers: those of `layers` that come from files of the user. is_trained: `preset` is a run, directory or hub
    model, which `deskside train` takes as --init.
    """

    label: str
    explicit: frozenset[str]
    file_layers: tuple[dict[str, Any], ...] = ()
    is_trained: bool = False


@dataclass(frozen=True)
class PlanRequest:
    """The input of the planner.

    Attributes:
        own_corpus: Regularise runs that read a small corpus many times (`plan/own_corpus.py`).
        context: GPUs that share every row (`parallel.context`).
        overrides: Configuration set by the user, which takes precedence over the planner's choices.
        setup_seconds, measured_watts, measured_fp8: Results of the probe on this card, None if it did not run.
        pretrain_seconds: Wall-clock seconds of the pretraining run, if the caller knows them better than the split.
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
                f"--{name}: a price is a number of dollars from 0 to {MAX_PRICE:,.0f}, not {price:g}"
            )
    unique = None if q.unique_tokens is None else int(count("--unique_tokens", q.unique_tokens))
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
    if q.gpu is not None and overrides.get("compute", {}).get("device") == "cpu":
        raise UsageError("--compute.device: cpu contradicts --gpu; leave one of them out")
    card, rows, notes = _card(q)
    if q.sequence is not None and overrides.get("schedule", {}).get("stages"):
        raise UsageError(STAGES_SET_LENGTH)
    given = _given(q, overrides, shape)
    parts = {part: overrides.get(part, {}) for part in ("compute", "optim", "parallel")}
    config = merge.build([parts]) if given is None else given.config
    card = _with_budget(card, config.compute.gpu_budget)
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
        setup_seconds=max(_measured(rows, "setup_seconds"), default=None),
        pretrain_seconds=pretrain_seconds,
        measured_watts=max(_measured(rows, "watts"), default=None),
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
    context, gradients = config.parallel.context, config.optim.gradients
    if gpus % context:
        raise UsageError(
            f"parallel.context: {context} GPUs share a row, so plan for a multiple of them: --gpus {context}"
        )
    if gpus > 1 and gradients != "device":
        raise UsageError(f"optim.gradients: {gradients} is for one GPU; use device, or --gpus 1")
    return context


def _with_budget(card: PlanCard, budget_gib: float | None) -> PlanCard:
    """Return the card with at most the memory of `compute.gpu_budget`."""
    if budget_gib is None:
        return card
    if card.is_cpu:
        raise UsageError("compute.gpu_budget: the plan is for a CPU; leave it out")
    budget = int(budget_gib * 2**30)
    if budget >= card.memory_bytes:
        return card
    return replace(card, memory_bytes=budget, memory_source="given: compute.gpu_budget")


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


def count(option: str, given: Any) -> float:
    """Parse a positive whole number, written as 3000000, 3M, 1.5B or 2e9. Raises UsageError."""
    text = str(given).strip().lower().replace(",", "").replace("_", "")
    scale = SUFFIXES.get(text[-1:], 1)
    try:
        value = Decimal(text[:-1] if scale > 1 else text) * scale
    except InvalidOperation:
        raise UsageError(f"{option}: '{given}' is not a count; write it as 3B, 350M or 1500000") from None
    if not value.is_finite() or value <= 0:
        raise UsageError(f"{option}: must be above zero, not {given}")
    if value.adjusted() > 18:
        raise UsageError(f"{option}: {given} is too large; give less than 1e19")
    if value != value.to_integral_value():
        raise UsageError(f"{option}: {given} is not a whole number")
    return float(value)


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


def _card(q: PlanQuestion) -> tuple[PlanCard, list[probe_store.Row], list[str]]:
    """Return the card, its probe results, and notes on memory in use and on results that are not used."""
    store = probe_store.open_store(q.probes)
    if q.here and q.gpu is not None:
        raise UsageError("--gpu and --here both set the card; give only one of them")
    if not q.here and q.gpu is None:
        raise UsageError("no card; give --gpu, such as --gpu rtx4090, or --here for this machine")
    if q.gpu is not None:
        gpu = gpus.find(q.gpu)
        memory = int(gpu.memory_bytes * (1 - DRIVER_SHARE))
        card = PlanCard(
            gpu.name, memory, f"published: {gpu.source}, less {DRIVER_SHARE:.0%} for the driver", gpu
        )
        return (card, *_measured_elsewhere(store, gpu))
    machine = probe_store.this_machine()
    gpu_here = gpus.find_device(machine.card, machine.memory_bytes) if machine.device == "cuda" else None
    notes = []
    memory, source = machine.memory_bytes, "measured: reported by this machine"
    if machine.free_bytes is not None and machine.free_bytes < memory:
        in_use = memory - machine.free_bytes
        memory, source = machine.free_bytes, f"measured: free on this machine now, of {gib(memory)}"
        if in_use > REPORTED_USE:
            notes.append(
                f"{gib(in_use)} of the card's {gib(machine.memory_bytes)} are in use by other programs, so the plan "
                f"does not use them; close these programs and plan again to use all of the memory"
            )
    card = PlanCard(machine.card, memory, source, gpu_here, machine, usable_bytes())
    rows = store.require(machine)
    if not rows and gpu_here is None:
        what = "the CPU" if card.is_cpu else "a GPU without a data sheet here"
        raise UsageError(
            f"{machine.card}: this is {what}, so it must be measured; measure it first with: deskside probe, or name a "
            f"card with --gpu"
        )
    return card, rows, [*notes, *store.notes(machine)]


def _measured_elsewhere(store: probe_store.Store, gpu: Gpu) -> tuple[list[probe_store.Row], list[str]]:
    """Return the probe results of a card given by name, and notes.

    If the card is in this machine, only results with the current driver and software count. Otherwise the results of
    the last measured machine count, and a note names it.
    """

    def is_this_card(row: probe_store.Row) -> bool:
        machine = row["key"]["machine"]
        name, gib = machine.get("card"), machine.get("memory_gib")
        valid = isinstance(name, str) and isinstance(gib, (int, float))
        return valid and gpus.find_device(name, int(gib * 2**30)) == gpu

    rows = [row for row in store.rows() if is_this_card(row)]
    if not rows:
        return [], store.notes()
    machine = probe_store.this_machine()
    if machine.device == "cuda" and gpus.find_device(machine.card, machine.memory_bytes) == gpu:
        return store.require(machine), store.notes(machine)
    newest = rows[-1]["key"]["machine"]
    used = [row for row in rows if row["key"]["machine"] == newest]
    notes = [
        f"{len(used)} probe results of {gpu.name} from {store.folder} are used; they were measured on another "
        f"machine, with driver {newest.get('driver')} and torch {newest.get('torch')}"
    ]
    if len(used) < len(rows):
        notes.append(f"{len(rows) - len(used)} older results with other drivers or software are not used")
    return used, [*notes, *store.notes()]


def _given(q: PlanQuestion, overrides: Mapping[str, Any], shape: ModelConfig | None) -> GivenModel | None:
    """Return the model set by --preset, --init, --depth or --params; None in an open search."""
    files: list[dict[str, Any]] = []
    if q.preset is not None:
        preset = label = q.preset
        layers, files = presets.layers(preset), presets.file_layers(preset)
    elif q.init is not None:
        assert shape is not None
        preset = label = q.init
        layers = merge.resolved_layers("model", shape.model_dump(mode="json"))
        if shape.max_position_embeddings < BatchConfig().sequence_length:
            layers.append({"batch": {"sequence_length": shape.max_position_embeddings}})
    elif q.depth is not None or q.params is not None:
        depth = q.depth if q.depth is not None else _nearest_depth(count("--params", q.params), str(q.params))
        if depth > MAX_DEPTH:
            raise UsageError(
                f"--depth: {depth} is beyond what can be planned; give an even depth from 2 to {MAX_DEPTH}"
            )
        preset = label = f"d{depth}"
        if q.depth is None:
            label = f"{preset}, the depth with the nearest size to {q.params} parameters"
        layers = [presets.depth(depth)]
    else:
        return None
    layers = [*layers, dict(overrides)] if overrides else layers
    explicit = frozenset(".".join(path) for path in merge.merge(layers)[1])
    config = merge.build(layers)
    if q.sequence is not None:
        if config.schedule.stages:
            raise UsageError(STAGES_SET_LENGTH)
        layers = [*layers, sequence_length_layer(q.sequence, config, explicit)]
        config = merge.build(layers)
    return GivenModel(preset, tuple(layers), config, label, explicit, tuple(files), q.init is not None)


def sequence_length_layer(
    sequence: int, config: RunConfig, explicit: frozenset[str] = frozenset()
) -> dict[str, Any]:
    """Return the configuration layer that sets the sequence length.

    It also raises max_position_embeddings if needed, and rounds batch.tokens to a multiple of the sequence length
    unless `explicit` contains that key.
    """
    batch: dict[str, Any] = {"sequence_length": sequence}
    layer: dict[str, Any] = {"batch": batch}
    if sequence > config.model.max_position_embeddings:
        layer["model"] = {"max_position_embeddings": sequence}
    if config.batch.tokens % sequence and "batch.tokens" not in explicit:
        batch["tokens"] = max(1, round(config.batch.tokens / sequence)) * sequence
    return layer


def _nearest_depth(params: float, text: str) -> int:
    """Return the depth with the nearest number of parameters. text: the number as the user wrote it."""
    sizes = {d: num_params(ModelConfig(**presets.depth(d)["model"])) for d in range(2, MAX_DEPTH + 1, 2)}
    nearest = min(sizes, key=lambda d: abs(math.log(sizes[d] / params)))
    if not 0.5 <= sizes[nearest] / params <= 2:
        raise UsageError(
            f"--params: no depth has about {text} parameters; give a size from {format.count(sizes[2])} (d2) "
            f"to {format.count(sizes[MAX_DEPTH])} (d{MAX_DEPTH})"
        )
    return nearest


def _measured(rows: Sequence[probe_store.Row], key: str) -> list[float]:
    """Return the result `key` of every completed probe point in which it is positive."""
    values = [r["result"].get(key) for r in rows if r["kind"] == "point" and r["status"] == "ok"]
    return [float(value) for value in values if isinstance(value, (int, float)) and value > 0]
