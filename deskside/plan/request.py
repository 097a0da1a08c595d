"""A checked request to the planner: the card, the budget, the model if it is given, prices.

`ask` takes a `PlanQuestion`, the options of the command line, and returns a `PlanRequest` that the rest of the planner
can trust. Every error is one line. An option that was not given stays None and is left out of the plan or marked as
published; nothing is filled in silently.
"""

import contextlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal, InvalidOperation
from functools import cache
from typing import Any, Literal, get_args

import deskside.measurements.store as probe_store
from deskside.budget.format_costs import LowFormat
from deskside.budget.shape import num_params
from deskside.config import merge, presets
from deskside.config.model import ModelConfig
from deskside.config.run import RunConfig
from deskside.config.sections import PrecisionName
from deskside.facts import gpus
from deskside.facts.gpus import Gpu
from deskside.plan.calibrate import Calibration, calibrate, measured_fp8_gain
from deskside.plan.published import Gain
from deskside.utils import format
from deskside.utils.errors import UsageError
from deskside.utils.format import gib

MOST = {"hours": 1e6, "tokens": 1e16, "flops": 1e30}  # a century; many times all text that exists
UNTRAINED = 3.4  # bits per byte of a uniform guess among 32,768 tokens of 4.4 bytes
DEAREST = 1e6
SCALES = {"k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}
# Share of a card's memory that the driver keeps: a 24 GiB RTX 4090 offers 23.5, a 32 GiB RTX 5090 31.4.
DRIVER_SHARE = 0.02
DEEPEST = 128  # of the depth series: 8192 wide, 104 billion parameters
SMALLEST_SEQUENCE = 16
MOST_GPUS = 64
MENTIONED_USE = 256 * 2**20  # bytes in use by other programs that a plan mentions
# NVFP4 is planned as emulated on every card: training's native products of it (kernels/nvfp4/native.py) were compiled
# for cards that have such units, and never run on one.
TRAINED_NATIVELY: tuple[LowFormat, ...] = ("fp8",)
STAGES_DECIDE = (
    "--sequence: schedule.stages gives the tokens per row of each stage; change it there, or drop one of them"
)


# Shares of a budget of hours.
SPLIT = {"pretraining": 0.85, "sft": 0.08, "evaluation": 0.03, "margin": 0.04}


@dataclass(kw_only=True)
class PlanQuestion:
    """The options of `deskside plan`, unchecked. Counts may be text such as 3B or 1.5e9."""

    gpu: str | None = None
    here: bool = False
    hours: float | None = None
    tokens: str | float | None = None
    flops: float | None = None
    loss: float | None = None
    preset: str | None = None
    depth: int | None = None
    params: str | float | None = None
    gpus: int = 1
    precision: str | None = None
    sequence: int | None = None
    unique_tokens: str | float | None = None
    price_kwh: float | None = None
    rent_per_hour: float | None = None
    probes: str = "probes"


@dataclass(frozen=True)
class PlanBudget:
    """Limit of a pretraining run; None: no limit. kind hours: the whole budget, everything included; flops: of
    training, in the convention of `budget/shape.py`; loss: bits per byte to reach."""

    kind: Literal["hours", "tokens", "flops", "loss"] | None = None
    value: float = 0.0


@dataclass(frozen=True)
class PlanCard:
    """The GPU that is planned for.

    memory_bytes: memory that programs can use; for a card in this machine, what is free now; gpu: its row in the table,
    None if it has none; machine: set when the card is in this machine.
    """

    name: str
    memory_bytes: int
    memory_source: str
    gpu: Gpu | None
    machine: probe_store.Machine | None = None

    @property
    def is_cpu(self) -> bool:
        return self.machine is not None and self.machine.device == "cpu"

    @property
    def native(self) -> frozenset[LowFormat]:
        """Formats below 16 bits that its tensor cores have, by its data sheet, and that training has run on them."""
        if self.gpu is None:
            return frozenset()
        rates: dict[LowFormat, float | None] = {"fp8": self.gpu.fp8_flops, "nvfp4": self.gpu.fp4_flops}
        return frozenset(kind for kind in TRAINED_NATIVELY if rates[kind] is not None)


@dataclass(frozen=True)
class CandidateModel:
    """A model that could be trained. preset: the argument of `deskside train`; layers: its configuration layers, the
    command line's options last."""

    preset: str
    layers: tuple[dict[str, Any], ...]
    config: RunConfig

    @property
    def model(self) -> ModelConfig:
        return self.config.model


@dataclass(frozen=True)
class Given(CandidateModel):
    """The model that was asked about. label: as the user wrote it; own: the dotted keys that were set explicitly."""

    label: str
    own: frozenset[str]


@dataclass(frozen=True)
class PlanRequest:
    """The input of the planner.

    Attributes:
        overrides: Configuration set by the user, which takes precedence over what the planner chooses.
        refused: Why the requested number format cannot be planned, so that BF16 is planned instead.
        setup_seconds, measured_watts, measured_fp8: Measured on this card.
        pretrain_seconds: Wall-clock seconds of the pretraining run, if the caller knows them better than the split.
    """

    card: PlanCard
    calibration: Calibration
    budget: PlanBudget
    given: Given | None
    gpus: int = 1
    precision: str | None = None
    sequence_length: int | None = None
    price_kwh: float | None = None
    rent_per_hour: float | None = None
    unique_tokens: int | None = None
    overrides: Mapping[str, Any] = field(default_factory=dict)
    setup_seconds: float | None = None
    pretrain_seconds: float | None = None
    measured_watts: float | None = None
    measured_fp8: Gain | None = None
    notes: tuple[str, ...] = ()
    refused: str | None = None

    @property
    def sequence(self) -> int:
        """Tokens per row of the last (or only) stage."""
        if self.sequence_length is not None:
            return self.sequence_length
        if self.given is not None:
            return max(stage.sequence_length for stage in self.given.config.stages())
        batch = self.overrides.get("batch", {})
        return int(batch.get("sequence_length", defaults().batch.sequence_length))

    @property
    def pretrains(self) -> bool:
        """True if the model is trained from scratch. The loss law holds for such runs only."""
        return self.given is None or (self.given.config.adapter is None and self.given.config.align is None)


def ask(
    question: PlanQuestion, overrides: Mapping[str, Any] | None = None, pretrain_seconds: float | None = None
) -> PlanRequest:
    """Check a question and return the request. Raises UsageError.

    Args:
        overrides: Configuration set by the user, such as {"model": {...}, "batch": {...}}.
        pretrain_seconds: Wall-clock seconds of the pretraining run, if the caller knows them better than `SPLIT`.
    """
    q, overrides = question, dict(overrides or {})
    budget = _budget(q)
    models = [f"--{name}" for name in ("preset", "depth", "params") if getattr(q, name) is not None]
    if len(models) > 1:
        raise UsageError(f"{' and '.join(models)}: each sets the model; give only one of them")
    if not 1 <= q.gpus <= MOST_GPUS:
        raise UsageError(f"--gpus: {q.gpus} cannot be planned; give 1 to {MOST_GPUS}, all in one machine")
    if q.sequence is not None and q.sequence < SMALLEST_SEQUENCE:
        raise UsageError(
            f"--sequence: rows of {q.sequence} tokens are too short; give {SMALLEST_SEQUENCE} or more"
        )
    for name in ("price_kwh", "rent_per_hour"):
        price = getattr(q, name)
        if price is not None and not 0 <= price <= DEAREST:
            raise UsageError(
                f"--{name}: a price is a number of dollars from 0 to {DEAREST:,.0f}, not {price:g}"
            )
    unique = None if q.unique_tokens is None else int(count("--unique_tokens", q.unique_tokens))
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
        raise UsageError(STAGES_DECIDE)
    refused = None
    try:
        given = _given(q, overrides)
    except UsageError as error:
        # The question is whether the model can be trained: where only the number format excludes it, BF16 answers.
        plain = {**overrides, "precision": {"name": "bf16"}}
        with contextlib.suppress(UsageError):
            given = _given(q, plain)
            if given is not None and given.config.model.num_experts:
                refused, precision, overrides = str(error), "bf16", plain
        if refused is None:
            raise
    if given is None and "adapter" in overrides:
        raise UsageError("--adapter: needs a model; give --preset, --depth or --params")
    if budget.kind is None and given is None:
        raise UsageError(
            "no budget and no model; give --hours, --tokens, --flops or --loss, or a model with --preset"
        )
    request = PlanRequest(
        card=card,
        calibration=calibrate(card.gpu, rows),
        budget=budget,
        given=given,
        gpus=q.gpus,
        precision=precision,
        sequence_length=q.sequence,
        price_kwh=q.price_kwh,
        rent_per_hour=q.rent_per_hour,
        unique_tokens=unique,
        overrides=overrides,
        setup_seconds=max(_measured(rows, "setup_seconds"), default=None),
        pretrain_seconds=pretrain_seconds,
        measured_watts=max(_measured(rows, "watts"), default=None),
        measured_fp8=measured_fp8_gain(rows),
        notes=tuple(notes),
        refused=refused,
    )
    if budget.kind == "loss" and not request.pretrains:
        raise UsageError(
            "--loss: bits per byte are only predicted for pretraining; give --hours, --tokens or --flops"
        )
    return request


def _budget(q: PlanQuestion) -> PlanBudget:
    named = [kind for kind in ("hours", "tokens", "flops", "loss") if getattr(q, kind) is not None]
    if not named:
        return PlanBudget()
    if len(named) > 1:
        raise UsageError(f"--{' and --'.join(named)}: each is a budget on its own; give only one of them")
    kind, given = named[0], getattr(q, named[0])
    value = count(f"--{kind}", given) if kind == "tokens" else float(given)
    if not (value > 0 and math.isfinite(value)):
        raise UsageError(f"--{kind}: must be a number above zero, not {value:g}")
    if kind in MOST and value > MOST[kind]:
        raise UsageError(f"--{kind}: {value:g} is too large; give at most {MOST[kind]:g}")
    if kind == "loss" and value >= UNTRAINED:
        raise UsageError(
            f"--loss: an untrained model reaches {value:g} bits per byte; give less than {UNTRAINED:g}"
        )
    return PlanBudget(kind, value)  # type: ignore[arg-type]


@cache
def defaults() -> RunConfig:
    """Return the default configuration of `deskside train`."""
    return RunConfig()


def count(option: str, given: Any) -> float:
    """Return a whole number above zero, written as 3000000, 3M, 1.5B or 2e9. Raises UsageError."""
    text = str(given).strip().lower().replace(",", "").replace("_", "")
    scale = SCALES.get(text[-1:], 1)
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
    by_hand = overrides.get("precision", {}).get("name", "auto")
    if name is not None and name not in known:
        raise UsageError(f"--precision: {name} cannot be planned; use one of {', '.join(known)}")
    if name is not None and by_hand not in ("auto", name):
        raise UsageError(f"--precision: {name} contradicts --precision.name {by_hand}; leave one of them out")
    return name or (by_hand if by_hand in known else None)


def _card(q: PlanQuestion) -> tuple[PlanCard, list[probe_store.Row], list[str]]:
    """Return the card, its probe results, and notes about results that are not used."""
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
    found = gpus.find_device(machine.card, machine.memory_bytes) if machine.device == "cuda" else None
    notes = []
    memory, source = machine.memory_bytes, "measured: reported by this machine"
    if machine.free_bytes is not None and machine.free_bytes < memory:
        taken = memory - machine.free_bytes
        memory, source = machine.free_bytes, f"measured: free on this machine now, of {gib(memory)}"
        if taken > MENTIONED_USE:
            notes.append(
                f"{gib(taken)} of the card's {gib(machine.memory_bytes)} are in use by other programs now, and the "
                f"plan leaves them alone; close them and plan again to use it all"
            )
    card = PlanCard(machine.card, memory, source, found, machine)
    rows = store.require(machine)
    if not rows and found is None:
        what = "the CPU" if card.is_cpu else "not in the table"
        raise UsageError(
            f"{machine.card}: this is {what}, and nothing was measured on it; measure it first with: "
            f"deskside probe, or name a card with --gpu"
        )
    return card, rows, [*notes, *store.notes(machine)]


def _measured_elsewhere(store: probe_store.Store, gpu: Gpu) -> tuple[list[probe_store.Row], list[str]]:
    """Return the probe results of a named card, and notes.

    If the card is this machine's own, only results with this driver and software count. Otherwise the newest machine's
    results count, and a note names it.
    """

    def is_it(row: probe_store.Row) -> bool:
        machine = row["key"]["machine"]
        name, gib = machine.get("card"), machine.get("memory_gib")
        known = isinstance(name, str) and isinstance(gib, (int, float))
        return known and gpus.find_device(name, int(gib * 2**30)) == gpu

    rows = [row for row in store.rows() if is_it(row)]
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
        notes.append(f"{len(rows) - len(used)} older ones, of other drivers or software, are not used")
    return used, [*notes, *store.notes()]


def _given(q: PlanQuestion, overrides: Mapping[str, Any]) -> Given | None:
    if q.preset is not None:
        preset = label = q.preset
        layers = presets.layers(preset)
    elif q.depth is not None or q.params is not None:
        depth = q.depth if q.depth is not None else _nearest_depth(count("--params", q.params), str(q.params))
        if depth > DEEPEST:
            raise UsageError(
                f"--depth: {depth} is beyond what can be planned; give an even depth from 2 to {DEEPEST}"
            )
        preset = label = f"d{depth}"
        if q.depth is None:
            label = f"{preset}, the nearest on the depth series to {q.params} parameters"
        layers = [presets.depth(depth)]
    else:
        return None
    layers = [*layers, dict(overrides)] if overrides else layers
    own = frozenset(".".join(path) for path in merge.merge(layers)[1])
    config = merge.build(layers)
    if q.sequence is not None:
        if config.schedule.stages:
            raise UsageError(STAGES_DECIDE)
        layers = [*layers, longer(q.sequence, config, own)]
        config = merge.build(layers)
    return Given(preset, tuple(layers), config, label, own)


def longer(sequence: int, config: RunConfig, own: frozenset[str] = frozenset()) -> dict[str, Any]:
    """Return the configuration layer that sets the sequence length.

    It also raises max_position_embeddings if needed, and adjusts a batch that does not divide unless it was set
    explicitly (its key is in `own`).
    """
    batch: dict[str, Any] = {"sequence_length": sequence}
    layer: dict[str, Any] = {"batch": batch}
    if sequence > config.model.max_position_embeddings:
        layer["model"] = {"max_position_embeddings": sequence}
    if config.batch.tokens % sequence and "batch.tokens" not in own:
        batch["tokens"] = max(1, round(config.batch.tokens / sequence)) * sequence
    return layer


def _nearest_depth(wanted: float, written: str) -> int:
    sizes = {d: num_params(ModelConfig(**presets.depth(d)["model"])) for d in range(2, DEEPEST + 1, 2)}
    nearest = min(sizes, key=lambda d: abs(math.log(sizes[d] / wanted)))
    if not 0.5 <= sizes[nearest] / wanted <= 2:
        raise UsageError(
            f"--params: no depth has {written} parameters; sizes go from {format.count(sizes[2])} (d2) "
            f"to {format.count(sizes[DEEPEST])} (d{DEEPEST})"
        )
    return nearest


def _measured(rows: Sequence[probe_store.Row], what: str) -> list[float]:
    """Return one number of every completed probe point."""
    found = [r["result"].get(what) for r in rows if r["kind"] == "point" and r["status"] == "ok"]
    return [float(value) for value in found if isinstance(value, (int, float)) and value > 0]
