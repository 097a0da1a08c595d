"""Table of GPUs with corrected data-sheet values, read from `gpus.csv` in this folder, one row per card.

Rates are dense and with FP32 accumulation, which PyTorch's BF16 matrix products use, never the sparse or
FP16-accumulate rates from marketing material. An RTX 4090 has 165 TFLOP/s, not 330, because GeForce cards accumulate in
FP32 at half rate (512 FLOP per multiprocessor and clock). The notes mention wrong figures that circulate.
`measured_bf16_flops` is the rate that others measured with a large BF16 matmul. Desktop GeForce cards reach 91
to 113 % of their data sheet, since most boost above their specified clock; workstation and data centre cards reach 50
to 87 %.

A name consists of the model and, if the model has several variants, the variant: "4090", "rtx4090" and
"NVIDIA GeForce RTX 4090" name the same card, "5090 laptop" is not "5090", and "h100" is refused as ambiguous because
PCIe and SXM differ by almost a third. A card that is not in the table is never replaced by a similar one.
"""

import difflib
import re
from dataclasses import dataclass
from functools import cache, cached_property

from deskside.facts.data_files import csv_rows
from deskside.utils.errors import UsageError

# Accepted range of (memory that the driver reports) / (memory in the table). The driver reserves a few per cent.
REPORTED_MEMORY_RATIO = (0.93, 1.02)
# Transfers per second and lane (PCI-SIG).
PCIE_TRANSFERS = {"4.0": 16e9, "5.0": 32e9}
# Names of the machine that runs the command, for which a plan has an option of its own.
THIS_MACHINE = ("cpu", "cuda", "auto", "here", "local", "this", "mine")
# The similarity of two names from which one may be a misspelling of the other. That of gtx1080 and rtx5080 is 0.71.
SIMILAR = 0.8
# Words that a name may contain and that do not distinguish cards.
IGNORED_WORDS = ("nvidia", "geforce", "amd", "instinct", "quadro", "rtx", "gpu", "graphics", "card")
# (column, factor) of the fields that have another name or unit in the table.
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
    """One row of the table. Rates are dense, in FLOP/s; bandwidths are in bytes/s.

    Attributes:
        memory_gb: Memory as sold.
        visible_mib: Visible memory, if it is much less: L4 and L40S lose 1/16 to ECC, and GB10's 128 GB are decimal.
        bandwidth: Memory bandwidth.
        bf16_flops, fp8_flops, fp4_flops: Rates with FP32 accumulation. None: the tensor cores lack the format.
        fp16_accumulate_flops: Rate with FP16 inputs and FP16 accumulation.
        half_rate_fp32_accumulate: FP32 accumulation halves the rate of FP16 inputs. None: unknown.
        measured_bf16_flops, measured_source: Rate of a large matrix product, and who measured it.
        watts: Power limit.
        msrp_usd: List price when the card was new.
        certainty: "high", "medium" or "low". Laptops are low: their rates depend on the power limit that the maker set.
        note: Known errors of other sources.
        flops_per_clock: BF16 FLOPs per multiprocessor and clock. multiprocessors x boost_hz x flops_per_clock is
            bf16_flops within 9 % (GeForce 3 %).
        pcie: Generation and lanes, such as "4.0 x16".
        fabric_bandwidth: NVLink or Infinity Fabric to all other cards of a machine in total, per direction. None: the
            cards communicate over PCIe. Optional NVLink bridges between two cards are not included.
        link_source: Source of pcie and fabric_bandwidth.
        must, may: Words that `find` accepts. `must` has one or more sets of words, separated by "|"; a name of the
            card contains every word of one set, and may also contain words of `may`. Words are separated by spaces.
        device_names: Names that drivers report, separated by "|".
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
        """Memory in bytes, including what the driver reserves. Most vendors' GB are GiB."""
        return int(self.visible_mib * 2**20 if self.visible_mib else float(self.memory_gb) * 2**30)

    @property
    def pcie_bandwidth(self) -> float:
        """Bytes/s between card and host, per direction."""
        generation, _, lanes = self.pcie.partition(" x")
        # A transfer is one bit per lane; the 128b/130b line code sends 130 bits for 128 bits of data.
        return PCIE_TRANSFERS[generation] * int(lanes) * 128 / 130 / 8

    @property
    def geforce(self) -> bool:
        """True for NVIDIA consumer cards, laptops included."""
        return self.half_rate_fp32_accumulate is True

    @property
    def rocm(self) -> bool:
        """True for AMD cards, which need ROCm."""
        return self.compute_capability.startswith("gfx")

    @property
    def laptop(self) -> bool:
        return "Laptop" in self.name

    def is_named(self, text: str) -> bool:
        """Return True if `text` names this card: all its required words and any of the optional ones, in any order,
        each at most once.

        Args:
            text: A name in lower-case letters and digits, without spaces.
        """
        optional = frozenset([*self.may.split(), *IGNORED_WORDS, f"{self.memory_gb}gb", f"{self.memory_gb}g"])
        return any(_consists_of(text, frozenset(words.split()), optional) for words in self.must.split("|"))


@cache
def gpus() -> tuple[Gpu, ...]:
    """Return all cards of the table."""
    return csv_rows("gpus.csv", Gpu, COLUMNS)


@cache
def find(name: str) -> Gpu:
    """Return the card with this name. Case, spaces, hyphens, the order of the words and the vendor's name do
    not matter; a memory size ("4060 ti 16gb") or a form factor ("a100 80gb sxm") distinguishes variants.

    Raises UsageError if no card matches, with those of the same number or spelled almost like it, or if several do,
    with all of them.
    """
    text = re.sub(r"[^a-z0-9]", "", name.lower()).replace("mobile", "laptop").replace("notebook", "laptop")
    matches = [gpu for gpu in gpus() if gpu.is_named(text)]
    if len(matches) == 1:
        return matches[0]
    if matches:
        raise UsageError(
            f"{name}: matches several cards: {', '.join(gpu.name for gpu in matches)}; write the full name"
        )
    if not text:
        raise UsageError("the name of the card is empty; write a name such as rtx4090")
    if text in THIS_MACHINE:
        raise UsageError(
            f"{name}: is not a card of the table; for this machine, with or without a GPU, give --here"
        )
    names = {re.sub(r"[^a-z0-9]", "", gpu.name.lower()): gpu.name for gpu in gpus()}
    number = re.search(r"[a-wyz]?\d{3,}", text)  # of the model, such as h100 or the 4090 of 2x4090
    same_number = [key for key in names if number is not None and number[0] in key]
    similar = difflib.get_close_matches(text, names, n=3, cutoff=SIMILAR)
    near = difflib.get_close_matches(text, {*same_number, *similar}, n=3, cutoff=0.0)
    hint = f"did you mean {' or '.join(names[key] for key in near)}? " if near else ""
    raise UsageError(
        f"{name}: no such card in the table; {hint}`deskside plan --gpu list` shows all, and `deskside probe` can "
        f"measure a card that is not in it"
    )


def find_device(name: str, memory_bytes: int) -> Gpu | None:
    """Return the card that torch or NVML reports as `name` with this memory.

    Returns None if the name is not in the table (a MIG slice, an H100 NVL) or the memory differs from the table's.
    """
    text = name.strip().casefold().removeprefix("nvidia ")
    low, high = REPORTED_MEMORY_RATIO
    matches = [
        gpu
        for gpu in gpus()
        if text in gpu.device_names.casefold().split("|") and low <= memory_bytes / gpu.memory_bytes <= high
    ]
    return matches[0] if len(matches) == 1 else None


def _consists_of(text: str, required: frozenset[str], optional: frozenset[str]) -> bool:
    """Return True if `text` is a concatenation of all required words and some optional ones, each used once."""
    if not text:
        return not required
    return any(
        text.startswith(word) and _consists_of(text[len(word) :], required - {word}, optional - {word})
        for word in required | optional
    )
