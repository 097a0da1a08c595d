"""The card to plan for: its memory, the formats that it trains in, and what the probe measured on it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import deskside.measurements.store as probe_store
from deskside.budget.format_costs import LowFormat
from deskside.facts import gpus
from deskside.facts.gpus import Gpu
from deskside.plan.question import PlanQuestion
from deskside.utils.errors import UsageError
from deskside.utils.format import gib
from deskside.utils.host_memory import usable_bytes

# Share of a card's memory that the driver reserves: programs can use 23.5 of 24 GiB on an RTX 4090, 31.4 of 32 GiB on
# an RTX 5090.
DRIVER_SHARE = 0.02
REPORTED_USE = 256 * 2**20  # a plan mentions memory used by other programs from this many bytes on
# NVFP4 is planned as emulated on every card: our native NVFP4 products (kernels/nvfp4/native.py) were compiled for
# cards with FP4 units, but never run on one.
TRAINED_NATIVELY: tuple[LowFormat, ...] = ("fp8",)
GROUPED_FP8 = "9.0"  # the compute capability that every build of torch has grouped products of FP8 for


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


def find_card(q: PlanQuestion, device: str) -> tuple[PlanCard, list[probe_store.Row], list[str]]:
    """Return the card, its probe results, and notes on memory in use and on results that are not used.

    device: the run's `compute.device`. In this machine, "cpu" chooses the CPU, whether or not there is a GPU.
    """
    store = probe_store.open_store(q.probes)
    if q.here and q.gpu is not None:
        raise UsageError("--gpu and --here both set the card; give only one of them")
    if not q.here and q.gpu is None:
        raise UsageError("no card; give --gpu, such as --gpu rtx4090, or --here for this machine")
    if q.gpu is not None and device == "cpu":
        raise UsageError("--compute.device: cpu contradicts --gpu; leave one of them out")
    host_bytes = _host_bytes(q.host_gib)
    if q.gpu is not None:
        gpu = gpus.find(q.gpu)
        memory = int(gpu.memory_bytes * (1 - DRIVER_SHARE))
        card = PlanCard(
            gpu.name,
            memory,
            f"published: {gpu.source}, less {DRIVER_SHARE:.0%} for the driver",
            gpu,
            host_bytes=host_bytes,
        )
        return (card, *_measured_elsewhere(store, gpu))
    machine = probe_store.this_cpu() if device == "cpu" else probe_store.this_machine()
    if device == "cuda" and machine.device == "cpu":
        raise UsageError("--compute.device: cuda is set, but this machine has no GPU; name a card with --gpu")
    if q.gpus > max(1, machine.gpus):
        raise UsageError(
            f"--gpus: {q.gpus} are more than the {machine.gpus} of this machine (CUDA_VISIBLE_DEVICES can hide some); "
            "to plan for another machine, name its card with --gpu"
        )
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
    usable = usable_bytes()
    if host_bytes is not None:
        usable = host_bytes if usable is None else min(usable, host_bytes)
    card = PlanCard(machine.card, memory, source, gpu_here, machine, usable)
    rows = store.require(machine)
    if not rows and gpu_here is None:
        what = "the CPU" if card.is_cpu else "a GPU without a data sheet here"
        raise UsageError(
            f"{machine.card}: this is {what}, so it must be measured; measure it first with: "
            f"{probe_store.probe_command(machine)}, or name a card with --gpu"
        )
    return card, rows, [*notes, *store.notes(machine)]


def _host_bytes(gib_given: float | None) -> int | None:
    """Return the bytes of `--host-gib`. Raises UsageError unless it is above zero."""
    if gib_given is None:
        return None
    if not 0 < gib_given < 1e6:
        raise UsageError(f"--host-gib: must be above zero and below a million, not {gib_given:g}")
    return int(gib_given * 2**30)


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


def with_gpu_budget(card: PlanCard, budget_gib: float | None) -> PlanCard:
    """Return the card with at most the memory of `compute.gpu_budget`."""
    if budget_gib is None:
        return card
    if card.is_cpu:
        raise UsageError("compute.gpu_budget: the plan is for a CPU; leave it out")
    budget = int(budget_gib * 2**30)
    if budget >= card.memory_bytes:
        return card
    return replace(card, memory_bytes=budget, memory_source="given: compute.gpu_budget")


def measured_values(rows: Sequence[probe_store.Row], key: str) -> list[float]:
    """Return the result `key` of every completed probe point in which it is positive."""
    values = [r["result"].get(key) for r in rows if r["kind"] == "point" and r["status"] == "ok"]
    return [float(value) for value in values if isinstance(value, (int, float)) and value > 0]
