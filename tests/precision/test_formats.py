"""The formats compared with ml_dtypes (Google's, as used by JAX), and with
plain arithmetic over all values of a format.
"""

from collections.abc import Callable

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from deskside.precision import formats
from deskside.precision.formats import FP8

ORACLE = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}
GRIDS = {
    "e4m3": np.arange(127, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64),
    "e5m2": np.arange(124, dtype=np.uint8).view(ml_dtypes.float8_e5m2).astype(np.float64),
    "e2m1": np.arange(8, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float64),
}
anything = st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=50)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def every(dtype: torch.dtype) -> Tensor:
    """Return all 65,536 values of a 16-bit format."""
    return torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)


def random_bits(count: int, seed: int) -> Tensor:
    """Return float32 of random bits, thus of every exponent, without NaN."""
    bits = torch.randint(
        -(2**31), 2**31, (count,), dtype=torch.int64, generator=torch.Generator().manual_seed(seed)
    )
    x = bits.to(torch.int32).view(torch.float32)
    return x[~x.isnan()]


def around_ties(grid: np.ndarray) -> Tensor:
    """Return both signs of every value of a format, every midpoint, and the float32 values on either side of each."""
    middles = (grid[1:] + grid[:-1]) / 2
    points = np.concatenate([grid, middles]).astype(np.float32)
    near = np.concatenate(
        [points, np.nextafter(points, np.float32(np.inf)), np.nextafter(points, np.float32(0))]
    )
    return torch.from_numpy(np.concatenate([near, -near]))


def within(format: str) -> Callable[[Tensor], Tensor]:
    """Return values that are mostly in this format's range, which the exponents of random bits are not."""
    largest = float(GRIDS[format][-1])
    return lambda x: torch.fmod(x, largest)


def assert_fp8(x: Tensor, format: FP8) -> None:
    """Assert bitwise equality with ml_dtypes' cast of the clamped value (it gives NaN
    or infinity out of range); NaN gives NaN.
    """
    largest = formats.LARGEST[format]
    ours = formats.to_fp8(x, format)
    with np.errstate(invalid="ignore"):  # numpy warns of NaN
        wanted = x.float().numpy().clip(-largest, largest).astype(ORACLE[format])
    nan = x.isnan().numpy()
    assert bool(ours.float().isnan()[torch.from_numpy(nan)].all())
    same = ours.view(torch.uint8).numpy() == wanted.view(np.uint8)
    assert same[~nan].all(), x[torch.from_numpy(~same & ~nan)][:5]


@pytest.mark.parametrize("format", ["e4m3", "e5m2"])
def test_fp8_of_every_16_bit_value(format: FP8) -> None:
    assert formats.LARGEST[format] == GRIDS[format][-1] == torch.finfo(formats.DTYPE[format]).max
    assert_fp8(every(torch.bfloat16), format)
    assert_fp8(every(torch.float16), format)


@pytest.mark.parametrize("format", ["e4m3", "e5m2"])
def test_fp8_of_millions_of_float32(format: FP8) -> None:
    x = random_bits(2_000_000, seed=0)
    assert_fp8(x, format)
    assert_fp8(within(format)(x), format)
    # Uniform in the exponents around the smallest normal value, where subnormals begin.
    assert_fp8(torch.randn(1_000_000) * torch.exp2(torch.randint(-20, 0, (1_000_000,)).float()), format)
    assert_fp8(around_ties(GRIDS[format]), format)


@given(anything)
@settings(max_examples=200, deadline=None)
def test_fp8_of_anything(values: list[float]) -> None:
    for format in ("e4m3", "e5m2"):
        assert_fp8(torch.tensor(values), format)


def test_e4m3_up_is_the_next_value_not_below() -> None:
    grid = GRIDS["e4m3"]
    x = torch.cat([within("e4m3")(random_bits(500_000, seed=1)).abs(), around_ties(grid).abs()])
    x = torch.cat([x, torch.rand(500_000) * 460, torch.tensor([0.0, 1e-30, 448.0, 1e9, torch.inf])])
    up = formats.e4m3_up(x).double().numpy()
    wanted = grid[np.searchsorted(grid, x.double().numpy().clip(0, 448), side="left")]
    assert (up == wanted).all()
    assert formats.e4m3_up(torch.tensor([torch.nan])).float().isnan().all()


def neighbours(x: np.ndarray, grid: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    x = x.clip(0, grid[-1])
    return grid[np.searchsorted(grid, x, side="right") - 1], grid[np.searchsorted(grid, x, side="left")]


def stochastic(format: str, x: Tensor, noise: Tensor) -> Tensor:
    if format == "e4m3":
        return formats.e4m3_stochastic(x, noise).float()
    return formats.e2m1_stochastic(x, noise)


@pytest.mark.parametrize("format", ["e4m3", "e2m1"])
def test_stochastic_rounding_goes_to_a_neighbour_and_its_mean_is_the_value(format: str) -> None:
    grid = GRIDS[format]
    x = torch.cat([within(format)(random_bits(2_000, seed=2)).abs(), torch.rand(2_000) * float(grid[-1])])
    x = torch.cat([x, around_ties(grid).abs(), torch.tensor([1e4])])
    # Noise at the midpoints of n equal parts of [0, 1): the mean over it is exact to 1 / 2n of a step,
    # deterministically.
    n = 512
    noise = ((torch.arange(n) + 0.5) / n)[:, None].expand(n, len(x))
    rounded = stochastic(format, x.expand(n, -1), noise).double().numpy()
    low, high = neighbours(x.double().numpy(), grid)
    assert ((rounded == low) | (rounded == high)).all()
    error = np.abs(rounded.mean(axis=0) - x.double().numpy().clip(0, grid[-1]))
    assert (error <= (high - low) / (2 * n) * 1.001).all()


@pytest.mark.parametrize("format", ["e4m3", "e2m1"])
def test_stochastic_rounding_leaves_values_of_the_format_alone(format: str) -> None:
    grid = torch.from_numpy(GRIDS[format]).float()
    for noise in (0.0, 0.5, 1 - 2**-24):
        assert torch.equal(stochastic(format, grid, torch.full_like(grid, noise)), grid)


def assert_e2m1(x: Tensor) -> None:
    ours = formats.e2m1_nearest(x.float())
    wanted = x.float().numpy().clip(-6, 6).astype(ml_dtypes.float4_e2m1fn)
    assert (ours.numpy() == wanted.astype(np.float32)).all()
    codes = formats.e2m1_encode(ours)
    assert (codes.numpy() == wanted.view(np.uint8)).all()  # the sign of zero included
    assert torch.equal(formats.e2m1_decode(codes), ours)


def test_e2m1_of_every_bfloat16_value_and_of_millions_of_float32() -> None:
    x = every(torch.bfloat16)
    assert_e2m1(x[~x.isnan()])
    x = random_bits(1_000_000, seed=3)
    assert_e2m1(x)
    assert_e2m1(within("e2m1")(x))
    assert_e2m1(torch.randn(1_000_000) * 2)
    assert_e2m1(around_ties(GRIDS["e2m1"]))


@given(anything)
@settings(max_examples=200, deadline=None)
def test_e2m1_of_anything(values: list[float]) -> None:
    assert_e2m1(torch.tensor(values))


def test_stochastic_e2m1_is_symmetric() -> None:
    x, noise = torch.randn(10_000) * 3, torch.rand(10_000)
    assert torch.equal(formats.e2m1_stochastic(-x, noise), -formats.e2m1_stochastic(x, noise))


def test_packing_puts_the_even_position_low() -> None:
    codes = torch.randint(0, 16, (5, 32), dtype=torch.uint8)
    packed = formats.pack(codes)
    assert torch.equal(packed, codes[:, ::2] + 16 * codes[:, 1::2])
    assert torch.equal(formats.unpack(packed), codes)
