"""The data sheets of graphics cards, corrected: `gpus.csv` beside this file, one row per card.

What marketing prints is not what training gets. The columns hold dense rates with FP32 accumulation, which is what
PyTorch's BF16 matrix products use: an RTX 4090 makes 165 TFLOP/s, not the 330 of FP16 accumulation, because GeForce
cards accumulate in FP32 at half rate (512 FLOP per multiprocessor and clock). Sparse rates are nowhere. The notes
keep the wrong figures that circulate. `measured` is what somebody's large BF16 matrix product reached: GeForce cards
reach their sheet or pass it, since they boost above the nameplate clock; data centre cards reach half to 87 %.

A card is named by its model and, where several were sold under it, by the variant: "4090", "rtx4090" and
"NVIDIA GeForce RTX 4090" are one card, "5090 laptop" is another one than "5090", and "h100" is refused because PCIe
and SXM differ by a third. A card that is not in the table is never taken for its neighbour.
"""

import difflib
import re
from dataclasses import dataclass
from functools import cache, cached_property

from deskside.facts.data_files import csv_rows
from deskside.utils.errors import UsageError

# How far the memory that a driver reports may be from the table: it keeps up to 3 % back, ECC is in the table.
REPORTED_SHARE = (0.93, 1.02)
# Transfers per second and lane (PCI-SIG).
PCIE_TRANSFERS = {"4.0": 16e9, "5.0": 32e9}
# Words that a person may write and that tell no card from another.
NOISE = ("nvidia", "geforce", "amd", "instinct", "quadro", "rtx", "gpu", "graphics", "card")
# Field -> (column, factor), where the table has another name or unit.
COLUMNS = {
    "boost_hz": ("boost_mhz", 1e6),
    "bandwidth": ("bandwidth_gb_s", 1e9),
    "bf16_flops": ("bf16_tflops", 1e12),
    "fp16_accumulate_flops": ("fp16_accumulate_tflops", 1e12),
    "fp8_flops": ("fp8_tflops", 1e12),
    "fp4_flops": ("fp4_tflops", 1e12),
    "measured_bf16_flops": ("measured_bf16_tflops", 1e12),
    "flops_per_clock": ("bf16_flop_per_sm_clock", 1),
    "fabric_bandwidth": ("fabric_gb_s", 1e9),
}


@dataclass(frozen=True)
class Gpu:
    """One card as its corrected data sheet has it. SI units: FLOP/s, bytes, bytes/s, watts, hertz.

    memory_gb: as sold; visible_mib: what can be seen, where it is much less: L4 and L40S lose 1/16 to ECC, and
    GB10's 128 GB are decimal. bf16_flops: dense, FP32 accumulation. fp16_accumulate_flops: FP16 inputs and FP16
    accumulation. fp8_flops: FP32 accumulation. None: the card has no such unit, or nothing is known
    (laptops). flops_per_clock: of one multiprocessor, BF16; bf16_flops is multiprocessors x boost_hz x
    flops_per_clock within 9 % (GeForce 3 %). half_rate_fp32_accumulate: FP32 accumulation runs at half of the
    FP16 rate; None where it is not known. measured_bf16_flops: a large matrix product as others timed it,
    measured_source says who. certainty: high, medium or low (laptops: their power limit decides, so only a
    measurement is good). note: traps. fabric_bandwidth: to all other cards of a machine together, each way, over
    NVLink or Infinity Fabric, None where cards exchange over PCIe. NVLink bridges between two cards are extras, left
    out. must, may: the words that a name must have, in one of several sets, and those that it may have; device_names:
    what drivers call it.
    """

    name: str
    architecture: str
    compute_capability: str
    multiprocessors: int
    boost_hz: float
    memory_gb: str
    visible_mib: float | None
    bandwidth: float
    bf16_flops: float
    fp16_accumulate_flops: float | None
    fp8_flops: float | None
    fp4_flops: float | None
    half_rate_fp32_accumulate: bool | None
    measured_bf16_flops: float | None
    measured_source: str
    watts: float
    msrp_usd: float | None
    source: str
    certainty: str
    note: str
    flops_per_clock: int | None
    pcie: str
    fabric_bandwidth: float | None
    link_source: str
    must: str
    may: str
    device_names: str

    @cached_property
    def memory_bytes(self) -> int:
        """Memory in bytes, GiB as NVIDIA and AMD sell it. The driver keeps up to 3 % more for itself."""
        return int(self.visible_mib * 2**20 if self.visible_mib else float(self.memory_gb) * 2**30)

    @property
    def pcie_bandwidth(self) -> float:
        """Bytes/s to the host, each way, of a link such as "4.0 x16", less the 128b/130b coding."""
        generation, _, lanes = self.pcie.partition(" x")
        return PCIE_TRANSFERS[generation] * int(lanes) * 128 / 130 / 8

    @property
    def geforce(self) -> bool:
        """A consumer card of NVIDIA, laptops included."""
        return self.half_rate_fp32_accumulate is True

    @property
    def rocm(self) -> bool:
        """A card of AMD, whose software is ROCm."""
        return self.compute_capability.startswith("gfx")

    @property
    def laptop(self) -> bool:
        return "Laptop" in self.name

    def is_named(self, text: str) -> bool:
        """Return whether `text` (letters and digits only) is made of this card's words, in any order, each at most
        once."""
        may = frozenset([*self.may.split(), *NOISE, f"{self.memory_gb}gb", f"{self.memory_gb}g"])
        return any(_spells(text, frozenset(words.split()), may) for words in self.must.split("|"))


@cache
def gpus() -> tuple[Gpu, ...]:
    """Return every card of the table."""
    return csv_rows("gpus.csv", Gpu, COLUMNS)


@cache
def find(name: str) -> Gpu:
    """Return the card with this name. Case, spaces, hyphens, the order of the words and the vendor's name do
    not matter; a memory size ("4060 ti 16gb") or a form ("a100 80gb sxm") tells variants apart.

    Raises UsageError with the nearest names when there is none, with all that it could be when there are several.
    """
    text = re.sub(r"[^a-z0-9]", "", name.lower()).replace("mobile", "laptop").replace("notebook", "laptop")
    found = [gpu for gpu in gpus() if gpu.is_named(text)]
    if len(found) == 1:
        return found[0]
    if found:
        raise UsageError(f"{name}: which one: {', '.join(gpu.name for gpu in found)}? Write the whole name")
    plain = {re.sub(r"[^a-z0-9]", "", gpu.name.lower()): gpu.name for gpu in gpus()}
    near = difflib.get_close_matches(text, plain, n=3, cutoff=0.0)
    if not text:
        raise UsageError("the name of the card is empty; write for example rtx4090")
    raise UsageError(
        f"{name}: no such card in the table; the nearest are "
        f"{', '.join(plain[key] for key in near)}. A card that is not in it can be measured with `deskside probe`"
    )


def of_device(name: str, memory_bytes: int) -> Gpu | None:
    """Return the card that torch or NVML calls `name`, with the memory that it reports. None when it is not surely one
    of the table: another name (a slice of a card, an H100 NVL), or another memory size than the one that is known."""
    text = name.strip().casefold().removeprefix("nvidia ")
    low, high = REPORTED_SHARE
    found = [
        gpu
        for gpu in gpus()
        if text in gpu.device_names.casefold().split("|") and low <= memory_bytes / gpu.memory_bytes <= high
    ]
    return found[0] if len(found) == 1 else None


def _spells(text: str, must: frozenset[str], may: frozenset[str]) -> bool:
    if not text:
        return not must
    return any(
        text.startswith(word) and _spells(text[len(word) :], must - {word}, may - {word})
        for word in must | may
    )
