"""Launches of the NVFP4 and MXFP8 kernels, to be compiled for GPUs that this machine lacks: see compile_cases.py."""

import torch
import triton.language as tl

from deskside.config.recipes import Operand
from deskside.kernels.nvfp4 import matmul, native, quantize
from deskside.kernels.nvfp4.operand import Along
from tests.kernels.compile_cases import CompileCase, signature


def _nvfp4_case() -> CompileCase:
    constants = native.TILE | {"EVEN": True, "DTYPE": tl.bfloat16}
    types = {
        "left": "*u8",
        "left_scale": "*fp8e4nv",
        "right": "*u8",
        "right_scale": "*fp8e4nv",
        "out": "*bf16",
    }
    types |= {"scale_a_ptr": "*fp32", "scale_b_ptr": "*fp32"}
    types = signature(native.nvfp4_kernel, types, constants)
    divisible = ("L", "R", "S", "pairs", "blocks")
    return CompileCase(
        "nvfp4 matmul", native.nvfp4_kernel, types, constants, native.OPTIONS, (100, 120), divisible
    )


def _fp8_case(name: str, left: str, even: bool) -> CompileCase:
    constants = native.TILE | {"LEFT": left, "RIGHT": "e4m3", "EVEN": even, "DTYPE": tl.bfloat16}
    types = {"left": "*fp8e4nv" if left == "e4m3" else "*fp8e5", "right": "*fp8e4nv", "out": "*bf16"}
    types |= {"scale_a_ptr": "*fp32", "scale_b_ptr": "*fp32"}
    types = signature(native.fp8_kernel, types, constants)
    return CompileCase(name, native.fp8_kernel, types, constants, native.OPTIONS, (120,))


NATIVE = (
    _nvfp4_case(),
    _fp8_case("fp8 matmul as MXFP8", "e4m3", even=True),
    _fp8_case("fp8 matmul as MXFP8, E5M2 gradients, ragged", "e5m2", even=False),
)


def _quantize_case(
    name: str, operand: Operand, along: Along, packed: bool = False, experts: int = 0
) -> CompileCase:
    constants = (
        quantize._constants(operand, packed)
        | quantize._tile(operand.hadamard, along)
        | _experts(experts)
        | {"INTERPRETED": False}
    )
    types = {"matrix_ptr": "*bf16", "signs_ptr": "*fp32", "amax_ptr": "*fp32", "global_scale_ptr": "*fp32"}
    types["ends_ptr"] = "*i32"
    types |= {
        "x_ptr": "*bf16",
        "values_ptr": "*u8" if packed else "*bf16",
        "block_scale_ptr": "*u8",
        "seed": "i64",
    }
    return CompileCase(
        name,
        quantize.quantize_kernel,
        signature(quantize.quantize_kernel, types, constants),
        constants,
        quantize._options(operand.hadamard),
    )


def _experts(count: int) -> dict[str, int]:
    return quantize._experts(torch.empty(count, device="meta") if count else None)


def _amax_case(name: str, hadamard: int, along: Along, experts: int = 0) -> CompileCase:
    constants = quantize._tile(hadamard, along) | _experts(experts) | {"INTERPRETED": False}
    types = {"x_ptr": "*bf16", "matrix_ptr": "*bf16", "signs_ptr": "*fp32", "amax_ptr": "*i32"}
    types["ends_ptr"] = "*i32"
    return CompileCase(
        name,
        quantize.amax_kernel,
        signature(quantize.amax_kernel, types, constants),
        constants,
        quantize._options(hadamard),
    )


_PLAIN = Operand("nvfp4", "1x16")
_EDEN = Operand("nvfp4", "1x16", hadamard=128, fresh_signs=True, rounding="eden")
# One case for each operand in the recipes of config/recipes.py, and for the packed layouts.
QUANTIZE = (
    _amax_case("nvfp4 amax", 0, "columns"),
    _amax_case("nvfp4 amax, Hadamard 16", 16, "rows"),
    _amax_case("nvfp4 amax, Hadamard 128", 128, "rows"),
    _amax_case("nvfp4 amax, Hadamard 16, experts", 16, "rows", experts=8),
    _quantize_case("nvfp4 quantise 1x16, experts", _PLAIN, "columns", experts=8),
    _quantize_case("nvfp4 quantise eden down the rows, experts", _EDEN, "rows", experts=128),
    _quantize_case("nvfp4 quantise 1x16", _PLAIN, "columns"),
    _quantize_case("nvfp4 quantise 16x16 down the rows", Operand("nvfp4", "16x16"), "rows"),
    _quantize_case("nvfp4 quantise 4/6", Operand("nvfp4", "1x16", four_over_six=True), "columns"),
    _quantize_case("nvfp4 quantise 4/6 16x16", Operand("nvfp4", "16x16", four_over_six=True), "columns"),
    _quantize_case(
        "nvfp4 quantise stochastic", Operand("nvfp4", "1x16", rounding="stochastic", scale_up=True), "columns"
    ),
    _quantize_case(
        "nvfp4 quantise stochastic, Hadamard 16",
        Operand("nvfp4", "1x16", hadamard=16, rounding="stochastic"),
        "rows",
    ),
    _quantize_case("nvfp4 quantise eden", _EDEN, "columns"),
    _quantize_case("nvfp4 quantise eden down the rows", _EDEN, "rows"),
    _quantize_case("nvfp4 quantise packed", _PLAIN, "columns", packed=True),
    _quantize_case("nvfp4 quantise packed eden down the rows", _EDEN, "rows", packed=True),
)


def _matmul_case(
    name: str, capability: tuple[int, int], layout: matmul.Layout, parts: int, targets: tuple[int, ...]
) -> CompileCase:
    tiles = matmul.tile_config(capability)
    out = "fp32" if parts > 1 else "bf16"
    options = tiles.options(torch.float32 if parts > 1 else torch.bfloat16)
    constants = tiles.constants(layout) | {"PARTS": parts, "DTYPE": tl.float32 if parts > 1 else tl.bfloat16}
    types = {
        "left": "*bf16",
        "right": "*bf16",
        "out": f"*{out}",
        "scale_a_ptr": "*fp32",
        "scale_b_ptr": "*fp32",
    }
    if not tiles.descriptors:
        constants["EVEN"] = True
        types = signature(matmul.pointer_kernel, types, constants)
        return CompileCase(name, matmul.pointer_kernel, types, constants, options, targets)
    L, R, S = tiles.L, tiles.R, tiles.S
    types["left"] = f"tensordesc<bf16[{S}, {L}]>" if layout == "tn" else f"tensordesc<bf16[{L}, {S}]>"
    types["right"] = f"tensordesc<bf16[{R}, {S}]>" if layout == "nt" else f"tensordesc<bf16[{S}, {R}]>"
    types["out"] = f"tensordesc<{out}[1, {L}, {R // 2}]>"
    types = signature(matmul.descriptor_kernel, types, constants)
    return CompileCase(name, matmul.descriptor_kernel, types, constants, options, targets)


MATMUL = (
    _matmul_case("scaled matmul nt", (9, 0), "nt", 1, (90,)),
    _matmul_case("scaled matmul nn", (9, 0), "nn", 1, (90,)),
    _matmul_case("scaled matmul tn, in parts", (9, 0), "tn", 4, (90,)),
    _matmul_case("scaled matmul nt, 10.x", (10, 0), "nt", 1, (100,)),
    _matmul_case("scaled matmul tn in parts, 10.x", (10, 0), "tn", 4, (100,)),
    _matmul_case("scaled matmul nt, pointers", (8, 9), "nt", 1, (86, 89, 120)),
    _matmul_case("scaled matmul nn, pointers", (8, 9), "nn", 1, (86, 89, 120)),
    _matmul_case("scaled matmul tn in parts, pointers", (8, 9), "tn", 4, (86, 89, 120)),
    CompileCase(
        "scaled matmul, adding parts",
        matmul.add_parts_kernel,
        {
            "parts_ptr": "*fp32",
            "out_ptr": "*bf16",
            "scale_a_ptr": "*fp32",
            "scale_b_ptr": "*fp32",
            "numel": "i32",
        }
        | {"PARTS": "constexpr", "BLOCK": "constexpr", "DTYPE": "constexpr"},
        {"PARTS": 4, "BLOCK": 1024, "DTYPE": tl.bfloat16},
    ),
)


COMPILE_CASES = (*QUANTIZE, *MATMUL, *NATIVE)
