"""Orthogonalization compared with the singular value decomposition in float64, and with torch's own quintic."""

import pytest
import torch
from torch.optim import _muon

from deskside.kernels.newton_schulz import SAFETY, coefficients, orthogonalize
from tests.kernels.interpreter import interpreted
from tests.kernels.newton_schulz_cases import exact, matrices


def polar(x: torch.Tensor) -> torch.Tensor:
    u, _, v = torch.linalg.svd(x, full_matrices=False)
    return u @ v


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize(("steps", "error"), [(5, 0.15), (6, 0.03), (7, 2e-3), (9, 1e-9)])
def test_polar_express_brings_singular_values_to_one(steps: int, error: float) -> None:
    """The singular values span the promised three decades, in float64."""
    u, _, v = torch.linalg.svd(random(4, 60, 30), full_matrices=False)
    x = u @ torch.diag(torch.logspace(-2.3, 0, 30, dtype=torch.float64)) @ v
    result = orthogonalize(x.clone(), coefficients("polar_express", steps))
    values = torch.linalg.svdvals(result)
    assert (values - 1).abs().max() < error
    if steps == 9:
        torch.testing.assert_close(result, u @ v, atol=1e-7, rtol=0)


def test_each_polynomial_keeps_the_interval() -> None:
    """For singular values from 1e-3 to 1, the iteration never leaves the region where it converges."""
    s = torch.logspace(-3, 0, 20001, dtype=torch.float64) / SAFETY
    for number, (a, b, c) in enumerate(coefficients("polar_express", 9)):
        s = a * s + b * s**3 + c * s**5
        assert s.min() > 0
        assert s.max() < 2.1, number
    assert (s - 1).abs().max() < 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_low_precision_stays_near_the_polar_factor(dtype: torch.dtype) -> None:
    x = random(3, 96, 64, seed=1)
    result = orthogonalize(x.to(dtype, copy=True), coefficients("polar_express", 7)).double()
    error = torch.linalg.matrix_norm(result - polar(x)) / 8
    assert error.max() < (2e-2 if dtype == torch.float32 else 6e-2)


def test_quintic_agrees_with_torch() -> None:
    x = random(64, 48, seed=2).float()
    theirs = _muon._zeropower_via_newtonschulz(x, (3.4445, -4.775, 2.0315), 5, 1e-7).float()
    ours = orthogonalize(x[None].clone(), coefficients("quintic", 5))[0]
    # torch iterates in bfloat16, and normalizes without our margin of 1 %.
    torch.testing.assert_close(ours, theirs, atol=0.03, rtol=0)
    assert 0.6 < torch.linalg.svdvals(ours).min() < torch.linalg.svdvals(ours).max() < 1.3


def test_a_batch_is_its_matrices_and_zero_stays_zero() -> None:
    x = random(5, 40, 24, seed=3).float()
    x[2] = 0
    together = orthogonalize(x.clone(), coefficients("polar_express", 5))
    alone = torch.cat([orthogonalize(one[None].clone(), coefficients("polar_express", 5)) for one in x])
    torch.testing.assert_close(together, alone, atol=1e-5, rtol=1e-5)
    assert (together[2] == 0).all()


def check_deviations(found: dict[str, float], within: float) -> None:
    """In bfloat16, with a separate G for every X, the largest deviation for the same matrices is 0.18."""
    assert len(found) >= 7
    for name, deviation in found.items():
        assert deviation <= (0.0 if name.startswith("zero") else within), name


def test_bfloat16_is_iterated_in_float16() -> None:
    names, x = matrices(160, 136)
    polynomials = coefficients("polar_express", 5)
    result = orthogonalize(x, polynomials)
    assert result.dtype == torch.float16
    ours, values = torch.linalg.svdvals(result.double()), torch.linalg.svdvals(exact(x, polynomials))
    check_deviations(
        {name: float((a - b).abs().max()) for name, a, b in zip(names, ours, values, strict=True)}, 0.03
    )


@pytest.fixture(scope="module")
def both() -> tuple[dict[str, float], dict[str, float]]:
    pytest.importorskip("triton")
    products, deviations = interpreted("newton_schulz_interpreted", "both")
    return products, deviations


def test_symmetric_products_in_the_interpreter(both: tuple[dict[str, float], dict[str, float]]) -> None:
    found = both[0]
    assert len(found) == 18
    for name, error in found.items():
        assert error < (1e-6 if "float32" in name else 1e-3), name


def test_iterations_with_symmetric_products_in_the_interpreter(
    both: tuple[dict[str, float], dict[str, float]],
) -> None:
    check_deviations(both[1], 0.01)
