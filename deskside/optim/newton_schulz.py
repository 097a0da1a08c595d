"""Orthogonalisation by matrix multiplications alone: the nearest matrix whose singular values are all one.

An odd polynomial of a matrix changes its singular values and keeps its singular vectors. Iterating
X <- a X + b X (X^T X) + c X (X^T X)^2 with suited (a, b, c) drives every singular value towards one, and needs only
GEMMs, in which bfloat16 is good enough. Two sets of polynomials:

- `polar_express` (Amsel et al., arXiv 2505.16932, algorithm 1): each iteration uses the best polynomial for the
  interval that the one before left, for singular values from 1e-3 of the largest up.
- `quintic` (Jordan et al. 2024, kellerjordan.github.io/posts/muon): one polynomial, steepest at zero; singular values
  end between about 0.7 and 1.2 rather than at one.
"""

from typing import Literal

import torch
from torch import Tensor

Coefficients = tuple[tuple[float, float, float], ...]

_POLAR_EXPRESS: Coefficients = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
    (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
)
_POLAR_EXPRESS_LIMIT = (1.875, -1.25, 0.375)
_QUINTIC = (3.4445, -4.775, 2.0315)

SAFETY = 1.01
"""Rounding may push a singular value above the interval, where the polynomials grow without bound: room for 1 %."""


def coefficients(kind: Literal["polar_express", "quintic"], steps: int) -> Coefficients:
    """The polynomial (a, b, c) of each of `steps` iterations."""
    if kind == "quintic":
        return (_QUINTIC,) * steps
    safe = tuple((a / SAFETY, b / SAFETY**3, c / SAFETY**5) for a, b, c in _POLAR_EXPRESS)
    return (safe + (_POLAR_EXPRESS_LIMIT,) * steps)[:steps]


def orthogonalize(x: Tensor, polynomials: Coefficients) -> Tensor:
    """(batch, rows >= columns) -> the same shape and dtype, singular values near one. A zero matrix stays zero.

    Tall, so that the products X^T X are of the smaller size; the caller transposes wide matrices.
    """
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    norm = torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True, dtype=wide)
    x = x * (1 / (norm * SAFETY + 1e-12)).to(x.dtype)
    for a, b, c in polynomials:
        gram = x.mT @ x
        step = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, x, step, beta=a)
    return x
