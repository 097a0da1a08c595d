"""Cost of number formats: the rate of their products, the bytes that conversion moves, and the weight copies.

`config/recipes.py` defines what a recipe computes. Its cost, as far as it is known:

- A product whose format the tensor cores have runs at that format's rate. Emulated, the same numbers are multiplied in
  BF16 (every code x block scale is a BF16 number), at EMULATED of BF16's rate: what that kernel was written to reach
  against the vendor's, not measured yet.
- FP8 with delayed scales is converted by the kernels that produce a tensor. What that costs in traffic is what
  published llmq runs in FP8 and BF16 need per element, 12.3 against 8.39 (facts/measurements.csv).
- FP8 with a current scale per tensor or per row needs the largest values first: a tensor is read twice and written in
  both layouts by separate kernels, OWN_SCALE_BYTES per value, counted.
- NVFP4 needs the largest value of a tensor first: it is read twice and written once for each product it enters. What a
  recipe computes beyond that multiplies the time: NVFP4_WORK, fitted to one run of each, emulated on an H200
  (`benchmarks/planner_fit.py`).

Copies of the weights are made once per optimizer step and stay until the next (`precision.weight_cache`).
"""

from functools import cache
from typing import Literal

Precision = Literal[
    "fp32", "bf16", "fp8", "fp8-tensorwise", "fp8-delayed", "fp8-rowwise",
    "nvfp4", "nvfp4-4o6", "nvfp4-unbiased", "nvfp4-eden", "fp8-nvfp4",
]  # fmt: skip
Kind = Literal["fp32", "bf16", "fp8", "nvfp4"]
LowKind = Literal["fp8", "nvfp4"]
RunsAs = Literal["fp32", "bf16", "fp8", "nvfp4", "emulated"]  # what a product's rate is

SQUARE_TILES = ("nvfp4", "nvfp4-4o6", "nvfp4-unbiased")  # a weight and its transpose are the same numbers
ALL_NATIVE: frozenset[LowKind] = frozenset({"fp8", "nvfp4"})
EMULATED = 0.8  # of BF16's rate
FP8_TRAFFIC = 1.47  # element-wise traffic against BF16's
OWN_SCALE = ("fp8-tensorwise", "fp8-rowwise")  # scales that only a pass over the tensor itself gives
OWN_SCALE_BYTES = 6.0  # per value: read for the largest, read again, written in two layouts
NVFP4_READ, NVFP4_WRITTEN = 4.0, {True: 0.5625, False: 2.0}  # bytes per value and product; native, emulated
# Time of quantizing against that of its bytes, by recipe.
NVFP4_WORK: dict[Precision, float] = {
    "nvfp4": 1.18,
    "nvfp4-unbiased": 1.18,
    "nvfp4-4o6": 1.28,
    "nvfp4-eden": 1.69,
    "fp8-nvfp4": 1.97,
}
SAVED_BF16, SAVED_FP8 = 2.0, 1.0  # bytes per value that a weight gradient needs again


@cache
def kinds(precision: Precision) -> tuple[Kind, Kind]:
    """Return the formats of the forward's product and of the backward's two."""
    if precision == "fp8-nvfp4":
        return "fp8", "nvfp4"
    for kind in ("fp32", "bf16", "fp8", "nvfp4"):
        if precision.startswith(kind):
            return kind, kind
    raise ValueError(f"precision: {precision} is none that is priced here")


def quantized(precision: Precision) -> bool:
    return kinds(precision)[1] not in ("fp32", "bf16")


def emulated(precision: Precision, native: frozenset[LowKind]) -> bool:
    """Return whether any of its products is computed in BF16 with the numbers of a lower format."""
    return quantized(precision) and not set(kinds(precision)) <= native


def runs_as(kind: Kind, native: frozenset[LowKind]) -> RunsAs:
    """Return the format whose rate a product runs at, on a device whose tensor cores have `native`."""
    return "emulated" if kind in ALL_NATIVE and kind not in native else kind


def weight_copies(precision: Precision, native: frozenset[LowKind]) -> float:
    """Return bytes per weight of the copies that the forward and the backward multiply with, each in its own layout.

    FP8 codes are a byte, also where the product is emulated; emulated NVFP4 is BF16, and one copy serves both where a
    weight is scaled in square tiles. BF16 has one copy, FP32 none.
    """
    if not quantized(precision):
        return 0.0 if precision == "fp32" else 2.0
    if precision in SQUARE_TILES and "nvfp4" not in native:
        return 2.0
    each: dict[Kind, float] = {"fp8": 1.0, "nvfp4": 0.5625 if "nvfp4" in native else 2.0}
    forward, backward = kinds(precision)
    return each[forward] + each[backward]


def saved_bytes(precision: Precision) -> float:
    """Return bytes per value of what a projection reads (a normed input, the MLP's inside), kept for its weight
    gradient: transposed FP8 codes, which the forward's cast writes at once, else 16 bits."""
    return SAVED_FP8 if kinds(precision) == ("fp8", "fp8") else SAVED_BF16


def nvfp4_bytes(native: frozenset[LowKind]) -> float:
    """Return bytes that quantizing one value for one product moves."""
    return NVFP4_READ + NVFP4_WRITTEN["nvfp4" in native]
