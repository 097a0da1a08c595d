"""Weights from INT8 and FP8 codes: the reference compared with float64, the kernels with the reference."""

import pytest
import torch
from torch import Tensor

from deskside.kernels.stored_weights import dequantize_rows, linear_from_codes
from tests.kernels.interpreter import interpreted

SHAPES = [(1, 1), (16, 1024), (19, 700)]  # one number, whole tiles, tiles that end within a row


def codes_and_scales(rows: int, columns: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows)
    codes = torch.randint(-127, 128, (rows, columns), generator=generator).to(torch.int8)
    return codes, torch.rand(rows, generator=generator) / 127 + 1e-4


@pytest.mark.parametrize(("dtype", "error"), [(torch.float32, 2**-24), (torch.bfloat16, 2**-8 * 1.001)])
def test_a_weight_is_its_code_times_its_rows_scale_rounded_once(dtype: torch.dtype, error: float) -> None:
    codes, scale = codes_and_scales(19, 700)
    expected = codes.double() * scale.double()[:, None]
    got = dequantize_rows(codes, scale, dtype)
    assert got.dtype == dtype
    assert bool(((got.double() - expected).abs() <= error * expected.abs()).all())


@pytest.fixture(scope="module")
def of_codes() -> tuple[dict[str, float | None], dict[str, float]]:
    pytest.importorskip("triton")
    dequantized, products = interpreted("fused_interpreted", "of_codes")
    return dequantized, products


def test_the_kernel_equals_the_reference(
    of_codes: tuple[dict[str, float | None], dict[str, float]],
) -> None:
    found = of_codes[0]
    assert len(found) == 2 * len(SHAPES)
    for name, error in found.items():
        # The interpreter truncates bfloat16 where hardware rounds.
        assert error is not None and error <= (2**-7 if "bfloat16" in name else 0.0), name


def test_products_with_few_rows_equal_float64(
    of_codes: tuple[dict[str, float | None], dict[str, float]],
) -> None:
    found = of_codes[1]
    assert len(found) == 18 and max(found.values()) < 1e-6, found


def test_products_of_fp8_codes() -> None:
    """On a CPU, and for many rows, the product uses the dequantized weight."""
    codes, scale = codes_and_scales(19, 700)
    stored, x = (codes / 3).to(torch.float8_e4m3fn), torch.randn(2, 3, 700)
    truth = x.double() @ (stored.double() * scale.double()[:, None]).T
    torch.testing.assert_close(linear_from_codes(x, stored, scale).double(), truth, atol=1e-4, rtol=1e-4)
