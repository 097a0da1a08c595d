"""Muon's momentum in 8 bits: codes and update in float64, and the interpreted kernel against the reference."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deskside.kernels.adamw_state import BLOCK, num_blocks
from deskside.kernels.momentum_8bit import LARGEST, dequantize, look_ahead_8bit, quantize
from tests.kernels.interpreter import interpreted


@given(st.integers(1, 3 * BLOCK), st.integers(-30, 30), st.integers(0, 2**31))
def test_codes_are_the_nearest_multiples(elements: int, exponent: int, seed: int) -> None:
    x = torch.randn(elements, generator=torch.Generator().manual_seed(seed)) * 2.0**exponent
    codes, scales = quantize(x)
    assert codes.dtype == torch.int8 and scales.shape == (num_blocks(elements),)
    largest = torch.nn.functional.pad(x.double().abs(), (0, -elements % BLOCK)).view(-1, BLOCK).amax(dim=1)
    torch.testing.assert_close(scales.double(), largest / LARGEST, rtol=1e-6, atol=0)
    error = (dequantize(codes, scales).double() - x.double()).abs()
    assert bool((error <= (0.5 + 1e-4) * scales.double().repeat_interleave(BLOCK)[:elements]).all())
    assert int(codes.abs().max()) == LARGEST


def test_blocks_of_zeros_and_of_denormals_become_zero() -> None:
    for value in (0.0, 1e-40):
        codes, scales = quantize(torch.full((BLOCK,), value))
        assert bool((codes == 0).all()) and bool(torch.isfinite(scales).all())


@pytest.mark.parametrize("nesterov", [True, False])
def test_a_step_is_that_of_the_rounded_momentum(nesterov: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    codes, scales = quantize(torch.randn(700, generator=generator))
    g = torch.randn(700, generator=generator)
    old, direction = dequantize(codes, scales).double(), g.clone()
    look_ahead_8bit(direction, codes, scales, 0.9, nesterov, torch.tensor(0.0), torch.tensor(0.5))
    clipped = 0.5 * g.double()
    new = 0.9 * old + 0.1 * clipped
    expected = 0.1 * clipped + 0.9 * new if nesterov else new
    torch.testing.assert_close(direction.double(), expected, rtol=1e-5, atol=1e-6)
    error = (dequantize(codes, scales).double() - new).abs()
    assert bool((error <= 0.501 * scales.double().repeat_interleave(BLOCK)[:700]).all())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_kernel_is_the_reference(dtype: str) -> None:
    found = interpreted("momentum_8bit_interpreted", "steps", dtype)
    assert found["skipped"] == 0
    # Sums that are rounded in another order may fall on the other side of the middle between two codes.
    assert found["codes"] < 1e-3 and found["momentum"] < 1.1 / LARGEST and found["direction"] < 1.1 / LARGEST
