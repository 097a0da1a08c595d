"""A checked request to the planner: the card, the budget, the model if it is given, prices.

`ask` takes the options of the command line (or of `deskside go`) and returns a `PlanRequest` that the rest of the
planner can trust. Every error is one line. An option that was not given stays None and is left out of the plan or
marked as published; nothing is filled in silently.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal, InvalidOperation
from functools import cache
from typing import Any, Literal, get_args

import deskside.measurements.store as probe_store
from deskside.budget.format_costs import LowKind
from deskside.budget.loss import LAW, LossLaw
from deskside.budget.shape import num_params
from deskside.config import merge, presets
from deskside.config.model import ModelConfig
from deskside.config.run import RunConfig
from deskside.config.sections import PrecisionName
from deskside.facts import gpus
from deskside.facts.gpus import Gpu
from deskside.plan.calibrate import Calibration, calibrate, measured_fp8_gain
from deskside.plan.published import Gain
from deskside.utils.errors import UsageError
from deskside.utils.format import gib

Kind = Literal["hours", "tokens", "flops", "loss"]
MOST: dict[str, float] = {
    "hours": 1e6,
    "tokens": 1e16,
    "flops": 1e30,
}  # a century; many times all text that exists
UNTRAINED = 3.4  # bits per byte of a uniform guess among 32,768 tokens of 4.4 bytes
DEAREST = 1e6
SCALES = {"k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}
# Share of a card's memory that the driver keeps: a 24 GiB RTX 4090 offers 23.5, a 32 GiB RTX 5090 31.4.
DRIVER_SHARE = 0.02
DEEPEST = 128  # of the depth dial: 8192 wide, 104 billion parameters
SMALLEST_SEQUENCE = 16
MOST_GPUS = 64
MENTIONED_USE = 256 * 2**20  # bytes in use by other programs that a plan mentions
# NVFP4 is planned as emulated on every card: training's native products of it (kernels/nvfp4/native.py) were compiled
# for cards that have such units, and never run on one.
TRAINED_NATIVELY: tuple[LowKind, ...] = ("fp8",)
STAGES_DECIDE = (
    "--sequence: schedule.stages gives the tokens per row of each stage; change it there, or drop one of them"
)


@dataclass(frozen=True)
class PlanBudget:
    """Limit of a pretraining run. kind hours: the whole budget, everything included; flops: of training, in the
    convention of `budget/shape.py`; loss: bits per byte to reach."""

    kind: Kind
    value: float


@dataclass(frozen=True)
class Split:
    """Shares of a budget of hours, which sum to one."""

    pretraining: float = 0.85
    sft: float = 0.08
    evaluation: float = 0.03
    margin: float = 0.04

    def __post_init__(self) -> None:
        total = self.pretraining + self.sft + self.evaluation + self.margin
        if min(self.pretraining, self.sft, self.evaluation, self.margin) < 0 or abs(total - 1) > 1e-9:
            raise ValueError(f"the shares of a budget must be at least 0 and sum to 1, not {total}")


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
    def native(self) -> frozenset[LowKind]:
        """Formats below 16 bits that its tensor cores have, by its data sheet, and that training has run on them."""
        if self.gpu is None:
            return frozenset()
        rates: dict[LowKind, float | None] = {"fp8": self.gpu.fp8_flops, "nvfp4": self.gpu.fp4_flops}
        return frozenset(kind for kind in TRAINED_NATIVELY if rates[kind] is not None)


@dataclass(frozen=True)
class Given:
    """The model that was asked about.

    label: as the user wrote it; preset: the argument of `deskside train`; layers: configuration layers, the command
    line's options last; own: the dotted keys that were set explicitly.
    """

    label: str
    preset: str
    layers: tuple[dict[str, Any], ...]
    config: RunConfig
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
    budget: PlanBudget | None
    given: Given | None
    gpus: int = 1
    precision: str | None = None
    sequence_length: int | None = None
    price_kwh: float | None = None
    rent_per_hour: float | None = None
    unique_tokens: int | None = None
    overrides: Mapping[str, Any] = field(default_factory=dict)
    split: Split = Split()
    law: LossLaw = LAW
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
        """Whether the model is trained from scratch. The loss law holds for such runs only."""
        return self.given is None or (self.given.config.adapter is None and self.given.config.align is None)


def ask(
    *,
    gpu: str | None = None,
    here: bool = False,
    hours: float | None = None,
    tokens: str | float | None = None,
    flops: float | None = None,
    loss: float | None = None,
    preset: str | None = None,
    depth: int | None = None,
    params: str | float | None = None,
    gpus_count: int = 1,
    precision: str | None = None,
    sequence: int | None = None,
    price_kwh: float | None = None,
    rent_per_hour: float | None = None,
    unique_tokens: str | float | None = None,
    probes: str = "probes",
    overrides: Mapping[str, Any] | None = None,
    law: LossLaw = LAW,
    split: Split = Split(),
    pretrain_seconds: float | None = None,
) -> PlanRequest:
    """Check the options and return the request. Counts may be written 3B or 1.5e9.

    overrides: configuration set by the user ({"model": {...}, "batch": {...}}). Raises UsageError, one line.
    """
    budgets = {"hours": hours, "tokens": tokens, "flops": flops, "loss": loss}
    named = [name for name, value in budgets.items() if value is not None]
    if len(named) > 1:
        raise UsageError(f"--{' and --'.join(named)}: each is a budget on its own; give only one of them")
    models = [
        f"--{n}" for n, v in (("preset", preset), ("depth", depth), ("params", params)) if v is not None
    ]
    if len(models) > 1:
        raise UsageError(f"{' and '.join(models)}: each sets the model; give only one of them")
    budget = None
    if named:
        kind: Kind = named[0]  # type: ignore[assignment]
        given_value = budgets[kind]
        value = count(f"--{kind}", given_value) if kind == "tokens" else positive(f"--{kind}", given_value)
        _bounded(kind, value)
        budget = PlanBudget(kind, value)
    if not 1 <= gpus_count <= MOST_GPUS:
        raise UsageError(f"--gpus: {gpus_count} cannot be planned; give 1 to {MOST_GPUS}, all in one machine")
    if sequence is not None and sequence < SMALLEST_SEQUENCE:
        raise UsageError(
            f"--sequence: rows of {sequence} tokens are too short; give {SMALLEST_SEQUENCE} or more"
        )
    for name, price in (("price_kwh", price_kwh), ("rent_per_hour", rent_per_hour)):
        if price is not None and not 0 <= price <= DEAREST:
            raise UsageError(
                f"--{name}: a price is a number of dollars from 0 to {DEAREST:,.0f}, not {price:g}"
            )
    unique = None if unique_tokens is None else int(count("--unique_tokens", unique_tokens))
    overrides = dict(overrides or {})
    precision = _precision(precision, overrides)
    if precision is not None:
        overrides["precision"] = {**overrides.get("precision", {}), "name": precision}
    _fitting(overrides, gpu)
    card, rows, notes = _card(gpu, here, probes)
    if sequence is not None and overrides.get("schedule", {}).get("stages"):
        raise UsageError(STAGES_DECIDE)
    refused = None
    try:
        given = _given(preset, depth, params, overrides, sequence)
    except UsageError as error:
        # The question is whether the model can be trained: where only the number format excludes it, BF16 answers.
        plain = {**overrides, "precision": {"name": "bf16"}}
        given = _in_bf16(preset, depth, params, plain, sequence)
        if given is None or not given.config.model.num_experts:
            raise
        refused, precision, overrides = str(error), "bf16", plain
    _fine_tuned(budget, given, overrides)
    if budget is None and given is None:
        raise UsageError(
            "no budget and no model; give --hours, --tokens, --flops or --loss, or a model with --preset"
        )
    return PlanRequest(
        card=card,
        calibration=calibrate(card.gpu, rows),
        budget=budget,
        given=given,
        gpus=gpus_count,
        precision=precision,
        sequence_length=sequence,
        price_kwh=price_kwh,
        rent_per_hour=rent_per_hour,
        unique_tokens=unique,
        overrides=overrides,
        split=split,
        law=law,
        setup_seconds=max(_measured(rows, "setup_seconds"), default=None),
        pretrain_seconds=pretrain_seconds,
        measured_watts=max(_measured(rows, "watts"), default=None),
        measured_fp8=measured_fp8_gain(rows),
        notes=tuple(notes),
        refused=refused,
    )


def _in_bf16(*model: Any) -> Given | None:
    """Return the model in BF16, or None if something else is wrong with it."""
    try:
        return _given(*model)
    except UsageError:
        return None


def _fine_tuned(budget: PlanBudget | None, given: Given | None, overrides: Mapping[str, Any]) -> None:
    """Raise UsageError if a fine-tuning run is requested through options that only pretraining has.

    The search chooses models by the bits per byte that pretraining gives them.
    """
    if given is None and "adapter" in overrides:
        raise UsageError("--adapter: needs a model; give --preset, --depth or --params")
    tunes = given is not None and (given.config.adapter is not None or given.config.align is not None)
    if tunes and budget is not None and budget.kind == "loss":
        raise UsageError(
            "--loss: bits per byte are only predicted for pretraining; give --hours, --tokens or --flops"
        )


def _bounded(kind: Kind, value: float) -> None:
    """Raise UsageError for a budget that is out of range."""
    if kind in MOST and value > MOST[kind]:
        raise UsageError(f"--{kind}: {value:g} is too large; give at most {MOST[kind]:g}")
    if kind == "loss" and value >= UNTRAINED:
        raise UsageError(
            f"--loss: an untrained model reaches {value:g} bits per byte; give less than {UNTRAINED:g}"
        )


def _fitting(overrides: Mapping[str, Any], gpu: str | None) -> None:
    """Raise UsageError for overrides that contradict the plan's own options."""
    for key in ("length", "hours", "steps", "tokens"):
        if key in overrides.get("schedule", {}):
            raise UsageError(
                f"--schedule.{key}: the plan's budget sets the length of the run; give --hours or --tokens instead"
            )
    device = overrides.get("compute", {}).get("device")
    if gpu is not None and device == "cpu":
        raise UsageError("--compute.device: cpu contradicts --gpu; leave one of them out")


@cache
def defaults() -> RunConfig:
    """Return the default configuration of `deskside train`."""
    return RunConfig()


def positive(option: str, value: Any) -> float:
    """Return a finite number above zero. Raises UsageError."""
    if not (float(value) > 0 and math.isfinite(float(value))):
        raise UsageError(f"{option}: must be a number above zero, not {value:g}")
    return float(value)


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


def _card(name: str | None, here: bool, folder: str) -> tuple[PlanCard, list[probe_store.Row], list[str]]:
    """Return the card, its probe results, and notes about results that are not used."""
    store = probe_store.open_store(folder)
    if here and name is not None:
        raise UsageError("--gpu and --here both set the card; give only one of them")
    if not here and name is None:
        raise UsageError("no card; give --gpu, such as --gpu rtx4090, or --here for this machine")
    if name is not None:
        gpu = gpus.find(name)
        memory = int(gpu.memory_bytes * (1 - DRIVER_SHARE))
        card = PlanCard(
            gpu.name, memory, f"published: {gpu.source}, less {DRIVER_SHARE:.0%} for the driver", gpu
        )
        return (card, *_measured_elsewhere(store, gpu))
    machine = probe_store.this_machine()
    found = gpus.of_device(machine.card, machine.memory_bytes) if machine.device == "cuda" else None
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
        return known and gpus.of_device(name, int(gib * 2**30)) == gpu

    rows = [row for row in store.rows() if is_it(row)]
    if not rows:
        return [], store.notes()
    machine = probe_store.this_machine()
    if machine.device == "cuda" and gpus.of_device(machine.card, machine.memory_bytes) == gpu:
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


def _given(
    preset: str | None,
    depth: int | None,
    params: str | float | None,
    overrides: Mapping[str, Any],
    sequence: int | None,
) -> Given | None:
    if preset is not None:
        layers, label = presets.layers(preset), preset
    elif depth is not None:
        if depth > DEEPEST:
            raise UsageError(
                f"--depth: {depth} is beyond what can be planned; give an even depth from 2 to {DEEPEST}"
            )
        preset = f"d{depth}"
        layers, label = [presets.depth(depth)], preset
    elif params is not None:
        depth = _nearest_depth(count("--params", params), str(params))
        preset = f"d{depth}"
        layers, label = (
            [presets.depth(depth)],
            f"{preset}, the nearest on the depth dial to {params} parameters",
        )
    else:
        return None
    layers = [*layers, dict(overrides)] if overrides else layers
    _, origins = merge.merge(layers)
    own = frozenset(".".join(path) for path in origins)
    if sequence is not None:
        if merge.build(layers).schedule.stages:
            raise UsageError(STAGES_DECIDE)
        layers = [*layers, longer(sequence, merge.build(layers), own)]
    return Given(label, preset, tuple(layers), merge.build(layers), own)


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
            f"--params: no depth has {written} parameters; sizes go from {sizes[2] / 1e6:.1f}M (d2) "
            f"to {sizes[DEEPEST] / 1e9:.0f}B (d{DEEPEST})"
        )
    return nearest


def _measured(rows: Sequence[probe_store.Row], what: str) -> list[float]:
    """Return one number of every completed probe point."""
    found = [r["result"].get(what) for r in rows if r["kind"] == "point" and r["status"] == "ok"]
    return [float(value) for value in found if isinstance(value, (int, float)) and value > 0]
