"""Operands in FP8 compared with ml_dtypes, and the random numbers of a step."""

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from deskside.config.recipes import RECIPES, Operand
from deskside.kernels.nvfp4.operand import Along
from deskside.precision.quantized_operand import (
    Draws,
    QuantizedOperand,
    cast_with_current_scale,
    quantize_operand,
    scale_and_inverse,
)

DTYPES = {
    "e4m3": (torch.float8_e4m3fn, ml_dtypes.float8_e4m3fn),
    "e5m2": (torch.float8_e5m2, ml_dtypes.float8_e5m2),
}
N, K = 32, 48


def matrix(seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    spread = torch.logspace(-3, 3, K)  # columns of very different sizes
    return torch.randn(N, K, generator=generator).bfloat16() * spread


def by_numpy(x: np.ndarray, scale: np.ndarray, kind: str) -> np.ndarray:  # type: ignore[type-arg]
    """Return x times scale in float32, saturated and rounded by ml_dtypes."""
    limit = float(ml_dtypes.finfo(DTYPES[kind][1]).max)
    return np.clip(x * scale, -limit, limit).astype(DTYPES[kind][1]).view(np.uint8)


@pytest.mark.parametrize("kind", DTYPES)
@pytest.mark.parametrize("scaling", ["tensor", "row"])
@pytest.mark.parametrize("along", ["columns", "rows"])
def test_fp8_is_that_of_ml_dtypes(kind: str, scaling: str, along: Along) -> None:
    """An operand summed over its rows is stored transposed, so that a row of the stored tensor is a column."""
    x = matrix()
    made = quantize_operand(x, Operand(kind, scaling), along, Draws(0), 0)  # type: ignore[arg-type]
    stored = x if along == "columns" else x.T
    assert made.transposed == (along == "rows") and made.values.is_contiguous() and made.scale is not None
    assert made.values.shape == stored.shape and made.values.dtype == DTYPES[kind][0]
    wide = stored.float().numpy()
    largest = np.abs(wide).max(axis=1 if scaling == "row" else None, keepdims=scaling == "row")
    scale = np.float32(1) / largest.astype(np.float32) * np.float32(torch.finfo(DTYPES[kind][0]).max)
    assert np.array_equal(made.values.view(torch.uint8).numpy(), by_numpy(wide, scale, kind))
    np.testing.assert_allclose(made.scale.numpy(), 1 / scale.squeeze(), rtol=1e-6)
    assert made.scale.shape == ((len(stored),) if scaling == "row" else ())


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=16, max_size=16),
    st.sampled_from(sorted(DTYPES)),
)
def test_whatever_is_cast_comes_back_within_half_a_step(values: list[float], kind: str) -> None:
    x = torch.tensor(values).view(4, 4)
    (both, inverse), info = cast_with_current_scale(x, DTYPES[kind][0]), torch.finfo(DTYPES[kind][0])
    assert torch.equal(both.columns.view(torch.uint8), both.rows.view(torch.uint8).T)
    back = both.rows.double() * inverse.double()
    largest = float(x.abs().max())
    if 1e-30 < largest < 1e30:  # for smaller values, the scale itself exceeds float32
        smallest = largest * float(info.smallest_normal) / float(info.max)
        assert torch.all((back - x).abs() <= (x.abs() / 2).clamp(min=smallest) * float(info.eps) * 1.01)
        # The largest value becomes the format's largest.
        assert float(back.abs().max()) == pytest.approx(largest, rel=1e-6)
    assert bool(both.rows.float().isfinite().all())


def test_zeros_have_a_scale_of_one() -> None:
    scale, inverse = scale_and_inverse(torch.tensor([0.0, 448.0, 1.0]), torch.float8_e4m3fn)
    assert scale.tolist() == [1.0, 1.0, 448.0]
    assert torch.equal(inverse, 1 / scale)


@pytest.mark.parametrize("scaling", ["tensor", "row", "1x16"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_comes_out_as_such(scaling: str, value: float) -> None:
    x = matrix()
    x[3, 7] = value
    operand = Operand("nvfp4" if scaling == "1x16" else "e4m3", scaling)  # type: ignore[arg-type]
    made = quantize_operand(x, operand, "columns", Draws(0), 0)
    assert made.scale is not None
    scale = made.scale[:, None] if made.scale.ndim else made.scale
    assert not bool((made.values.float() * scale).isfinite().all())


def test_bf16_is_the_tensor_itself() -> None:
    x = matrix()
    assert quantize_operand(x, Operand("bfloat16"), "rows", Draws(0), 0) == QuantizedOperand(x)


# Random numbers


def test_draws_are_a_function_of_seed_step_and_which() -> None:
    def some(seed: int, step: int) -> tuple[list[int], list[float]]:
        draws = Draws(seed)
        draws.begin(step)
        return [draws.next() for _ in range(4)], draws.signs(3, 128, torch.device("cpu")).tolist()

    assert some(1, 5) == some(1, 5)
    seen = {tuple(some(seed, step)[0]) for seed in (1, 2) for step in (1, 2, 3)}
    assert len(seen) == 6 and len({n for numbers in seen for n in numbers}) == 24
    assert some(1, 5)[1] != some(1, 6)[1]
    assert set(some(1, 5)[1]) == {-1.0, 1.0}


def test_both_operands_of_a_product_share_their_signs_and_no_other_product_does() -> None:
    draws, device = Draws(0), torch.device("cpu")
    draws.begin(1)
    first = draws.signs(0, 128, device)
    assert draws.signs(0, 128, device) is first
    assert not torch.equal(draws.signs(1, 128, device), first)


def test_a_hadamard_transform_cancels_in_the_product() -> None:
    """float64 is practically exact, so NVFP4's own noise remains. With different
    rotations, the error would be 100 %.
    """
    eden = RECIPES["nvfp4-eden"].weight_gradient.left
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(256, 64, generator=generator) for _ in range(2))
    draws = Draws(0)
    draws.begin(1)

    def product(which: int) -> Tensor:
        left, right = (quantize_operand(x, eden, "rows", draws, p) for x, p in ((a, 0), (b, which)))
        assert left.scale is not None and right.scale is not None
        return left.values.double().T @ right.values.double() * (left.scale * right.scale)

    truth = a.double().T @ b.double()
    assert float((product(0) - truth).norm() / truth.norm()) < 0.2
    assert float((product(1) - truth).norm() / truth.norm()) > 0.9


def test_each_tensor_is_rounded_with_numbers_of_its_own() -> None:
    stochastic = Operand("nvfp4", "1x16", rounding="stochastic")
    draws, x = Draws(0), matrix()
    first, second = (quantize_operand(x, stochastic, "columns", draws, 0).values for _ in range(2))
    draws.begin(0)
    again = quantize_operand(x, stochastic, "columns", draws, 0).values
    assert torch.equal(again, first) and not torch.equal(second, first)
