"""The NVFP4 kernels in Triton's interpreter, and their differences from the reference: see test_nvfp4_kernels.py."""

import torch
from torch import Tensor

from deskside.config.recipes import Operand
from deskside.kernels.nvfp4 import matmul, quantize
from deskside.kernels.nvfp4.operand import Along
from deskside.precision import formats, nvfp4
from tests.kernels.nvfp4_cases import LAYOUTS, OPERANDS, PRODUCTS, data, oriented, uniform

SEED = 0x1234_5678_9ABC_DEF0


Case = tuple[str, torch.dtype]
NARROW: list[Case] = [("gauss", torch.bfloat16), ("outliers", torch.bfloat16), ("grid", torch.float32)]
# The interpreter reads bfloat16's subnormals wrongly; tests/gpu covers them.
WIDE: list[Case] = [
    *NARROW,
    ("lognormal", torch.bfloat16),
    ("tiny", torch.float32),
    ("zeros", torch.bfloat16),
    ("constant", torch.bfloat16),
]


def quantized(name: str, kind: str, along: Along, dtype: torch.dtype) -> dict[str, float]:
    """Return how many values, codes and scales differ from the reference with the same noise."""
    operand = OPERANDS[name]
    x = data(kind, (80, 192) if operand.hadamard < 128 else (128, 256)).to(dtype)
    signs = None
    if operand.fresh_signs:
        signs = torch.randint(0, 2, (128,), generator=torch.Generator().manual_seed(1)).float() * 2 - 1
    expected = nvfp4.quantize(x, operand, along, signs=signs, noise=noise(operand, x, along))
    made = quantize.quantize(x, operand, along, signs=signs, seed=SEED)
    packed = quantize.quantize_packed(x, operand, along, signs=signs, seed=SEED)
    codes, scale = expected.codes, expected.block_scale.float()
    if along == "rows":
        codes, scale = codes.T, scale.T
    return {
        "values": differing(made.values, expected.emulated),
        "codes": differing(packed.codes, formats.pack(codes)),
        "block scales": differing(packed.block_scale.float(), scale),
        "global scale": float((made.global_scale / expected.global_scale - 1).abs()),
    }


def by_expert(name: str, along: Along) -> dict[str, float]:
    """Return the differences from the reference if each expert's rows are quantized separately."""
    operand, ends = OPERANDS[name], [128, 384, 512]
    x = torch.cat([data("gauss", (n, 128)) * factor for n, factor in ((128, 1.0), (256, 1e-6), (128, 1e4))])
    x[500:] = 0.0  # padding
    signs = None
    if operand.fresh_signs:
        signs = torch.randint(0, 2, (128,), generator=torch.Generator().manual_seed(1)).float() * 2 - 1
    drawn = noise(operand, x, along)
    made = quantize.quantize(
        x, operand, along, signs=signs, seed=SEED, ends_E=torch.tensor(ends, dtype=torch.int32)
    )
    found = {"values": 0.0, "global scale": 0.0}
    for expert, (start, end) in enumerate(zip([0, *ends], ends, strict=False)):
        part = None if drawn is None else drawn[start * len(drawn) // len(x) : end * len(drawn) // len(x)]
        expected = nvfp4.quantize(x[start:end], operand, along, signs=signs, noise=part)
        found["values"] += differing(made.values[start:end], expected.emulated)
        error = float((made.global_scale[expert] / expected.global_scale - 1).abs())
        found["global scale"] = max(found["global scale"], error)
    return found


def noise(operand: Operand, x: Tensor, along: Along) -> Tensor | None:
    N, K = x.shape
    if operand.rounding == "stochastic":
        return uniform((N, K), SEED)
    if operand.rounding == "eden":
        return uniform((N, K // 16) if along == "columns" else (N // 16, K), SEED)
    return None


def differing(a: Tensor, b: Tensor) -> int:
    assert a.shape == b.shape, f"{a.shape} is not {b.shape}"
    return int((a != b).sum())


def product(layout: matmul.Layout, sizes: tuple[int, int, int], descriptors: bool) -> dict[str, float]:
    """Return the error of the BF16 product in float32, relative to the largest result, and the number of its parts."""
    tiles = matmul.TileConfig(32, 64, 32, warps=4, stages=1, descriptors=descriptors, group=2)
    matmul._card = lambda device: (tiles, 4)  # type: ignore[assignment]
    L, R, S = sizes
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randn(n, S, generator=generator).bfloat16().float() for n in (L, R))
    alpha, second = torch.tensor(0.75), torch.tensor(-2.0)
    a, b = oriented(left, right, layout)
    made = matmul.scaled_matmul(a, b, alpha, layout, scale_b=second, dtype=torch.float32)
    exact = -1.5 * (left.double() @ right.double().T)
    count = -(-L // 32) * -(-R // 64)
    return {
        "error": float((made - exact).abs().max() / exact.abs().max()),
        "parts": matmul.num_parts(count, -(-S // 32), 4),
    }


def main(kinds: str) -> dict[str, dict[str, float]]:
    """Return the differences in each case, for "some kinds" or "every kind" of tensor."""
    narrow, wide = (NARROW, WIDE) if kinds == "every kind" else (NARROW[1:2], NARROW[1:])
    found: dict[str, dict[str, float]] = {}
    for name in OPERANDS:
        for along in ("columns", "rows"):
            for kind, dtype in wide if name in ("plain", "4/6") else narrow:
                key = f"{name}, {along}, {kind}, {str(dtype)[6:]}"
                found[key] = quantized(name, kind, along, dtype)
            found[f"{name}, {along}, by expert"] = by_expert(name, along)
    for layout in LAYOUTS:
        for sizes in PRODUCTS:
            for descriptors in (False, True):
                found[f"product {layout}, {sizes}, {descriptors}"] = product(layout, sizes, descriptors)
    return found
