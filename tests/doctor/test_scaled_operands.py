"""FP8, MXFP8 and NVFP4 operands against ml_dtypes, and scale layouts against a
kernel written from their documentation.
"""

from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from deskside.doctor import check_gemm
from deskside.doctor import scaled_operands as formats
from deskside.doctor.scaled_operands import FORMATS, Format, ScaledOperand

CPU = torch.device("cpu")


def random(rows: int, columns: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, columns, generator=generator) * torch.exp2(
        8 * torch.rand(rows, 1, generator=generator) - 4
    )


@pytest.mark.parametrize("name", ["fp8_tensor", "fp8_row"])
@pytest.mark.parametrize("gradient", [False, True])
def test_fp8_codes_are_those_of_ml_dtypes(name: str, gradient: bool) -> None:
    x = random(48, 64)
    operand = FORMATS[name].quantize(x, gradient)
    kind = ml_dtypes.float8_e5m2 if gradient else ml_dtypes.float8_e4m3fn
    scaled = (x / operand.scales[0]).numpy()
    expected = scaled.astype(kind).view(np.uint8)
    np.testing.assert_array_equal(operand.codes.view(torch.uint8).numpy(), expected)
    assert np.isfinite(operand.dequantize().numpy()).all()
    rows = operand.dequantize().abs().amax(dim=1)
    if name == "fp8_row":  # every row uses the whole range, so its largest value is exact
        torch.testing.assert_close(rows, x.abs().amax(dim=1).double(), rtol=1e-6, atol=0)


@settings(max_examples=50)
@given(st.integers(0, 10**6), st.floats(-30, 30))
def test_mx_scale_is_the_smallest_power_of_two_that_fits(seed: int, exponent: float) -> None:
    x = random(3, 64, seed) * 2.0**exponent
    operand = formats.quantize_mx(x, False)
    blocks = x.view(3, 2, 32).abs().amax(dim=2)
    steps = operand.steps_RB
    assert bool((torch.log2(steps) == torch.log2(steps).round()).all())
    assert bool((blocks / steps <= 448).all())
    assert bool((blocks / (steps / 2) > 448).all())
    # The byte that the kernel reads encodes the same power of two.
    bytes_RB = unswizzle(operand.scales[0].view(torch.uint8).numpy(), 3, 2)
    np.testing.assert_array_equal(
        bytes_RB.view(ml_dtypes.float8_e8m0fnu).astype(np.float32), steps.numpy().astype(np.float32)
    )


def test_mx_and_nv_take_blocks_of_zeros() -> None:
    x = random(4, 64)
    x[1, :32] = 0
    for name in ("mxfp8", "nvfp4"):
        decoded = FORMATS[name].quantize(x, False).dequantize()
        assert not decoded[1, :32].any() and decoded[1, 32:].any()
        assert bool(torch.isfinite(decoded).all())


@given(st.integers(1, 300), st.integers(1, 11))
@settings(max_examples=30)
def test_swizzle_puts_every_scale_where_cublas_looks(rows: int, blocks: int) -> None:
    scales = torch.arange(rows * blocks, dtype=torch.int64).remainder(251).add(1).to(torch.uint8)
    scales = scales.view(rows, blocks)
    flat = formats.swizzle(scales.view(torch.float8_e4m3fn)).view(torch.uint8)
    assert flat.is_contiguous() and flat.dim() == 1
    assert flat.numel() == -(-rows // 128) * 128 * -(-blocks // 4) * 4
    np.testing.assert_array_equal(unswizzle(flat.numpy(), rows, blocks), scales.numpy())


def unswizzle(flat: np.ndarray, rows: int, blocks: int) -> np.ndarray:
    """Return the scales in plain order, element by element, following cuBLAS's description of its 128 x 4 tiles."""
    tiles_along = -(-blocks // 4)
    out = np.empty((rows, blocks), dtype=flat.dtype)
    for r in range(rows):
        for b in range(blocks):
            tile = (r // 128) * tiles_along + b // 4
            out[r, b] = flat[tile * 512 + (r % 32) * 16 + (r % 128 // 32) * 4 + b % 4]
    return out


def emulated(operand: ScaledOperand) -> np.ndarray:
    """Return the values that a kernel reads from an operand's bytes, using ml_dtypes' formats and the layout above."""
    if operand.codes.dtype == torch.float4_e2m1fn_x2:
        packed = operand.codes.view(torch.uint8).numpy()
        codes = np.stack((packed & 15, packed >> 4), axis=-1).reshape(packed.shape[0], -1)
        values = codes.astype(np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float64)
        kind, block, overall = ml_dtypes.float8_e4m3fn, 16, float(operand.scales[1])
    else:
        values = operand.codes.view(torch.uint8).numpy().view(ml_dtypes.float8_e4m3fn).astype(np.float64)
        kind, block, overall = ml_dtypes.float8_e8m0fnu, 32, 1.0
    rows, columns = values.shape
    raw = unswizzle(operand.scales[0].view(torch.uint8).numpy(), rows, columns // block)
    scales = raw.view(kind).astype(np.float64) * overall
    return values * np.repeat(scales, block, axis=1)


def emulated_product(a: ScaledOperand, b: ScaledOperand, gradient: bool) -> Tensor:
    return torch.from_numpy(emulated(a) @ emulated(b).T).to(torch.bfloat16)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_gemm, "SIZES", {"cpu": 128})
    monkeypatch.setattr(check_gemm, "SMALLEST_TIMED", 128)


@pytest.mark.parametrize("name", ["mxfp8", "nvfp4"])
def test_block_formats_with_a_kernel_made_from_their_definition(name: str, small: None) -> None:
    form = FORMATS[name]
    result = check_gemm.check_format(Format(form.quantize, emulated_product, form.tolerance), CPU)
    assert result["verdict"] == "works", result["reason"]
    # These errors contain the rounding of the format, and those below only the rounding of the result.
    assert all(0.01 < error < form.tolerance / 1.5 for error in result["errors"].values())
    exact = result["details"]["errors_against_rounded_operands"]
    assert all(error < 3e-3 for error in exact.values())
    assert set(result["errors"]) == {"output", "input gradient", "weight gradient"}


@pytest.mark.parametrize("name", ["mxfp8", "nvfp4"])
def test_scales_in_plain_order_are_wrong_numbers(
    name: str, small: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    form = FORMATS[name]
    swizzle = formats.swizzle

    def unordered(scales_RB: Tensor) -> Tensor:
        flat: Any = torch.zeros_like(swizzle(scales_RB).view(torch.uint8))
        flat[: scales_RB.numel()] = scales_RB.view(torch.uint8).flatten()
        return flat.view(scales_RB.dtype)

    monkeypatch.setattr(formats, "swizzle", unordered)
    result = check_gemm.check_format(Format(form.quantize, emulated_product, form.tolerance), CPU)
    assert result["verdict"] == "wrong numbers"
    assert "output" in result["reason"] and "gradient" in result["reason"]


@pytest.mark.parametrize("name", ["mxfp8", "nvfp4"])
def test_torch_refuses_block_formats_on_a_cpu_in_its_own_words(name: str) -> None:
    """They are therefore reported as unsupported and not as wrong. On a GPU, tests/gpu runs them."""
    operand = FORMATS[name].quantize(random(128, 128), False)
    with pytest.raises((ValueError, RuntimeError, NotImplementedError)):
        FORMATS[name].multiply(operand, operand, False)
