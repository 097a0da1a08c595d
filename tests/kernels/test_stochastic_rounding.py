"""Stochastic rounding to bfloat16: it gives one of the two neighbors, is unbiased, and is the same in the kernels."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deskside.kernels.adamw import adamw_update
from deskside.kernels.adamw_state import AdamWHyperparameters
from deskside.kernels.stochastic_rounding import (
    add_rounded_,
    random_bits,
    round_to_bfloat16,
    rounding_seed,
)
from tests.kernels.interpreter import interpreted
from tests.kernels.optimizer_cases import zeros

CPU = torch.device("cpu")


@given(st.floats(-(2.0**127), 2.0**127, width=32), st.integers(0, 2**62))
def test_the_result_is_one_of_the_two_neighbors(value: float, seed: int) -> None:
    x = torch.tensor([value], dtype=torch.float32)
    rounded = round_to_bfloat16(x, seed)
    bits = x.view(torch.int32) & -65536  # towards zero
    low = bits.view(torch.float32)
    high = (bits + 65536).view(torch.float32)
    assert rounded.float() == low or (rounded.float() == high and low != x)


def test_bfloat16_values_infinity_and_nan_are_unchanged() -> None:
    x = torch.tensor([0.0, -0.0, 1.5, -3.0, 1e-40, math.inf, -math.inf, math.nan]).bfloat16()
    for seed in range(20):
        rounded = round_to_bfloat16(x.float(), seed)
        assert torch.equal(rounded.view(torch.int16)[:-1], x.view(torch.int16)[:-1])
        assert bool(rounded[-1].isnan())


def test_rounding_is_unbiased() -> None:
    """The mean of n roundings of x differs by at most 5 standard deviations, each at most half a step / sqrt(n)."""
    n = 200_000
    for x in (1.001, -0.3, 255.9, 1e-3):
        mean = float(round_to_bfloat16(torch.full((n,), x), 11).double().mean())
        step = 2.0 ** (math.floor(math.log2(abs(x))) - 7)
        assert abs(mean - float(torch.tensor(x))) < 5 * 0.5 * step / math.sqrt(n)


def test_pieces_seeds_and_names() -> None:
    x = torch.randn(1000)
    whole = round_to_bfloat16(x, 5)
    pieces = [round_to_bfloat16(x[start : start + 256], 5, start) for start in range(0, 1000, 256)]
    assert torch.equal(torch.cat(pieces), whole)
    seeds = {rounding_seed(name, step, run) for name in "ab" for step in (0, 1, 2**31) for run in (0, 1)}
    assert len(seeds) == 12 and all(0 <= seed < 2**63 for seed in seeds)
    a, b = (
        random_bits(0, 4096, seed, CPU).double() for seed in (rounding_seed("a", 1), rounding_seed("a", 2))
    )
    assert abs(float(torch.corrcoef(torch.stack((a, b)))[0, 1])) < 0.08


def test_the_error_of_a_sum_is_bounded() -> None:
    """Each of the P - 1 additions has an error of less than one step of the
    largest partial sum, and none on average.
    """
    P, n = 32, 20_000
    generator = torch.Generator().manual_seed(0)
    addends = torch.randn(P, n, generator=generator).bfloat16()
    total = addends[0].clone()
    for number, addend in enumerate(addends[1:]):
        add_rounded_(total, addend, rounding_seed("g", number))
    exact = addends.double().sum(0)
    largest = addends.double().cumsum(0).abs().amax(0)
    errors = total.double() - exact
    assert bool((errors.abs() <= (P - 1) * largest * 2.0**-7).all())
    assert abs(float(errors.mean())) < 5 * float(errors.std()) / math.sqrt(n)
    # A step of a partial sum is at most 2^-7 of it. The variance of one rounding is at most a quarter of its square.
    assert float(errors.square().mean()) < (P - 1) / 4 * float((largest * 2.0**-7).square().mean())


def test_small_updates_add_up() -> None:
    """Each update is a thousandth of a rounding step, so rounding to nearest would drop every one of them."""
    n, steps, lr = 4096, 400, 1e-5
    hparams = AdamWHyperparameters(lr, (0.9, 0.95), 1e-8, 0.0)
    p, state = torch.ones(n).bfloat16(), zeros(n, torch.float32)
    for step in range(1, steps + 1):
        seed = rounding_seed("p", step)
        adamw_update(
            p, torch.ones(n), state, torch.tensor(float(step)), torch.tensor(0.0), hparams, False, seed=seed
        )
    expected = 1 - lr * steps
    assert abs(float(p.double().mean()) - expected) < 5 * 2.0**-8 * math.sqrt(steps * lr * 2**8) / math.sqrt(
        n
    )
    assert torch.ones(1).bfloat16() - lr == 1.0


def test_kernels_round_as_the_reference_does() -> None:
    pytest.importorskip("triton")
    found: dict[str, float] = interpreted("optimizers_interpreted", "rounded")
    assert len(found) == 5 and found["add"] == 0
    # An update may differ in its last float32 bit, which changes the rounding of one number in 2^16.
    assert max(found.values()) < 1e-3, found
