"""Newton-Schulz with symmetric products in Triton's interpreter: errors against float64."""

import torch

from deskside.kernels.newton_schulz import coefficients, orthogonalize
from deskside.kernels.newton_schulz_triton import symmetric_product
from tests.kernels.newton_schulz_cases import exact, matrices


def products() -> dict[str, float]:
    """Return the relative error of products of even and uneven sizes, and how far they are from being symmetric."""
    found = {}
    generator = torch.Generator().manual_seed(0)
    for rows, n in ((300, 200), (128, 256), (40, 16)):
        for dtype in (torch.float32, torch.float16):
            x = torch.randn(2, rows, n, generator=generator).to(dtype)
            gram, out = (torch.full((2, n, n), torch.nan, dtype=dtype) for _ in range(2))
            symmetric_product(x, x, gram, 0.01)
            expected = 0.01 * x.double().mT @ x.double()
            name = f"{rows} x {n}, {dtype}"
            found[name] = float((gram.double() - expected).norm() / expected.norm())
            found[f"{name}: mirror"] = float((gram - gram.mT).double().norm() / expected.norm())
            symmetric_product(gram, gram, out, 0.5, gram, -2.0, 3.0)
            g = gram.double()
            expected = 0.5 * g @ g - 2 * g + 3 * torch.eye(n, dtype=torch.float64)
            found[f"{name}: step"] = float((out.double() - expected).norm() / expected.norm())
    return found


def deviations() -> dict[str, float]:
    """Return, by matrix, the largest deviation of a singular value from that of the same iteration in float64."""
    polynomials = coefficients("polar_express", 5)
    names, x = matrices(80, 72)
    values = torch.linalg.svdvals(exact(x, polynomials))
    ours = torch.linalg.svdvals(orthogonalize(x.clone(), polynomials, symmetric=True).double())
    return {name: float((a - b).abs().max()) for name, a, b in zip(names, ours, values, strict=True)}


def both() -> tuple[dict[str, float], dict[str, float]]:
    """Return products and deviations, so that they run in one process."""
    return products(), deviations()
