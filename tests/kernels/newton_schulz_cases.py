"""Matrices to orthogonalize, easy and hard ones, and the iteration written out in float64."""

import torch
from torch import Tensor

from deskside.kernels.newton_schulz import SAFETY, Coefficients


def matrices(rows: int, columns: int) -> tuple[list[str], Tensor]:
    """Return names, and matrices (names, rows, columns) in bfloat16."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    gaussian = random(rows, columns)
    u, _, v = torch.linalg.svd(gaussian, full_matrices=False)
    found = {
        "random": gaussian,
        "rank 16": random(rows, 16) @ random(16, columns),
        "singular values 1 to 1e-6": u @ torch.diag(torch.logspace(-6, 0, columns)) @ v,
        "singular values 1e-6 to 1e-9": 1e-6 * u @ torch.diag(torch.logspace(-3, 0, columns)) @ v,
        "singular values 1 / k": u @ torch.diag(1 / torch.arange(1, columns + 1)) @ v,
        "one large singular value": gaussian + 100 * torch.outer(random(rows), random(columns)),
        "zero": torch.zeros(rows, columns),
    }
    return list(found), torch.stack(list(found.values())).bfloat16()


def exact(x: Tensor, polynomials: Coefficients) -> Tensor:
    """Run the iteration in float64."""
    x = x.double()
    x = x / (torch.linalg.matrix_norm(x, keepdim=True) * SAFETY + 1e-12)
    for a, b, c in polynomials:
        gram = x.mT @ x
        x = a * x + x @ (b * gram + c * gram @ gram)
    return x
