"""Cost of number formats: the rate of matrix products, the memory traffic of conversion, and the copies of weights.

`config/recipes.py` defines what a recipe computes. Its cost is modelled as follows:

- If the tensor cores support the format of a product, it runs at the rate of this format. If not, it is emulated: the
  same numbers are multiplied in BF16 (code x block scale is always a BF16 number), at EMULATED_RATE_SHARE of BF16's
  rate. This share is the target that the emulating kernel was written for; it has not been measured.
- FP8 with delayed scales: the kernel that produces a tensor also converts it. FP8_TRAFFIC is the ratio of the bytes per
  element of published llmq runs in FP8 and in BF16, 12.3 / 8.39 (facts/measurements.csv).
- FP8 with current scales (per tensor or per row) needs the largest absolute values first: separate kernels read a
  tensor twice and write it in both layouts, CURRENT_SCALING_BYTES per value, counted from the code.
- NVFP4 needs the largest absolute value of a tensor first: for each product that it enters, a tensor is read twice and
  written once. NVFP4_WORK multiplies the time of these bytes by the additional arithmetic of a recipe. It was fitted
  to one run of each recipe, emulated on an H200 (docs/planner-accuracy.md).

Experts have the same FP8 operands in every FP8 recipe (`config/recipes.py`). Their grouped products run natively where
the device supports "fp8-grouped", and NVFP4 is always emulated for experts. Kernels write FP8 instead of BF16, a byte
less, and the backward transposes inputs and gradients for the weight gradient, two bytes more: together
EXPERT_FP8_TRANSPOSED bytes more per value. The byte less in the forward is left out. An emulated product reads the
codes and writes them in BF16. GROUPED_FP8_RATE is the rate of native grouped products in FP8 relative to those in BF16,
both relative to dense ones: 1,080 TFLOP/s on an H200 (docs/data/2026-11-23-experts/profile-4-layers-fp8.json).

By default, weights are converted once per optimizer step and the copies are kept (`precision.weight_cache`).
"""

from functools import cache
from typing import Literal

Precision = Literal[
    "fp32", "bf16", "fp8", "fp8-tensorwise", "fp8-delayed", "fp8-rowwise",
    "nvfp4", "nvfp4-4o6", "nvfp4-unbiased", "nvfp4-eden", "fp8-nvfp4",
]  # fmt: skip
Format = Literal["fp32", "bf16", "fp8", "nvfp4"]
LowFormat = Literal["fp8", "nvfp4", "fp8-grouped"]  # the last one: FP8 in the grouped products of experts
RunsAs = Literal["fp32", "bf16", "fp8", "nvfp4", "emulated"]  # which rate a product runs at

SQUARE_TILES = ("nvfp4", "nvfp4-4o6", "nvfp4-unbiased")  # a weight and its transpose have the same codes
ALL_NATIVE: frozenset[LowFormat] = frozenset({"fp8", "nvfp4", "fp8-grouped"})
EMULATED_RATE_SHARE = 0.8  # rate of an emulated product, relative to BF16
FP8_TRAFFIC = 1.47  # element-wise traffic, relative to BF16
CURRENT_SCALING = ("fp8-tensorwise", "fp8-rowwise")  # FP8 recipes whose scales come from the tensor itself
CURRENT_SCALING_BYTES = 6.0  # per value: read for the maximum, read again, written in two layouts
EXPERT_FP8_TRANSPOSED, EXPERT_FP8_EMULATED = 1.0, 3.0  # bytes per value
GROUPED_FP8_RATE = 0.81
NVFP4_READ, NVFP4_WRITTEN = 4.0, {True: 0.5625, False: 2.0}  # bytes per value and product; keys: native
# Time of quantizing relative to the time of its memory traffic, by recipe.
NVFP4_WORK: dict[Precision, float] = {
    "nvfp4": 1.18,
    "nvfp4-unbiased": 1.18,
    "nvfp4-4o6": 1.28,
    "nvfp4-eden": 1.69,
    "fp8-nvfp4": 1.97,
}
SAVED_BF16, SAVED_FP8 = 2.0, 1.0  # bytes per input value that is saved for the weight gradient


@cache
def product_formats(precision: Precision) -> tuple[Format, Format]:
    """Return the format of the forward product and the format of both backward products."""
    if precision == "fp8-nvfp4":
        return "fp8", "nvfp4"
    for format in ("fp32", "bf16", "fp8", "nvfp4"):
        if precision.startswith(format):
            return format, format
    raise ValueError(f"precision: the planner has no cost model for {precision}")


def quantized(precision: Precision) -> bool:
    """Return True if some products have operands below 16 bits, emulated or not."""
    return product_formats(precision)[1] not in ("fp32", "bf16")


def emulated(precision: Precision, native: frozenset[LowFormat]) -> bool:
    """Return True if some products are computed in BF16 with the numbers of a lower format."""
    return quantized(precision) and not set(product_formats(precision)) <= native


def expert_native(native: frozenset[LowFormat]) -> frozenset[LowFormat]:
    """Return the formats that grouped products support on a device whose tensor cores support the formats `native`."""
    return frozenset({"fp8"}) if "fp8-grouped" in native else frozenset()


def runs_as(format: Format, native: frozenset[LowFormat]) -> RunsAs:
    """Return which rate a product in `format` runs at on a device whose tensor cores support the formats `native`."""
    return "emulated" if format in ALL_NATIVE and format not in native else format


def weight_copies(precision: Precision, native: frozenset[LowFormat]) -> float:
    """Return the bytes per weight of the converted copies: one for the forward and one for the backward layout.

    FP8 codes take one byte, even if the product is emulated. Emulated NVFP4 is stored in BF16, and with square scaling
    tiles one copy serves both layouts. BF16 has one copy, FP32 none.
    """
    if not quantized(precision):
        return 0.0 if precision == "fp32" else 2.0
    if precision in SQUARE_TILES and "nvfp4" not in native:
        return 2.0
    copy_bytes: dict[Format, float] = {"fp8": 1.0, "nvfp4": 0.5625 if "nvfp4" in native else 2.0}
    forward, backward = product_formats(precision)
    return copy_bytes[forward] + copy_bytes[backward]


def saved_input_bytes(precision: Precision) -> float:
    """Return the bytes per value of a projection's input, as saved for the weight gradient: transposed FP8 codes if
    forward and backward are FP8, else 16 bits."""
    return SAVED_FP8 if product_formats(precision) == ("fp8", "fp8") else SAVED_BF16


def nvfp4_bytes(native: frozenset[LowFormat]) -> float:
    """Return the bytes of memory traffic to quantize one value for one product."""
    return NVFP4_READ + NVFP4_WRITTEN["nvfp4" in native]
