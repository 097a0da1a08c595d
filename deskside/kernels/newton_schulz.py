"""Newton-Schulz iteration: a batch of matrices with the same singular vectors and all singular values near one.

An odd polynomial of a matrix changes its singular values and keeps its singular vectors. Iterating
X <- a X + b X (X^T X) + c X (X^T X)^2 with suitable (a, b, c) moves every singular value towards one. It needs only
GEMMs, for which bfloat16 is precise enough. There are two sets of coefficients:

- `polar_express` (Amsel et al., arXiv 2505.16932, algorithm 1): each iteration uses the best polynomial for the
  interval of singular values that the previous iteration returns. The first interval is 1e-3 to 1, after division by
  the Frobenius norm.
- `quintic` (Jordan et al. 2024, kellerjordan.github.io/posts/muon): one polynomial with a steep slope at zero; the
  resulting singular values are between about 0.7 and 1.2.

One iteration is three products, X of (long, short), with G and S of (short, short):

    G = X^T X,    S = a I + b G + c G^2,    X <- X S

On a GPU, G and S come from a Triton kernel that computes the tiles of one triangle only, writes each to its mirror
image too, and adds before it rounds (`symmetric`): 3 long short^2 + short^3 FLOPs. Elsewhere, and for matrices of few
columns, they are torch's batched products: 4 long short^2 + 2 short^3 FLOPs. Torch copies the addend of a product first
(its interface to cuBLAS has one tensor for addend and result), so there is none: S is
c (G + b/2c I)^2 + (a - b^2/4c) I, with both multiples of I added to the diagonal in place.

On CUDA the matrices are in float16. Divided by their norm, they need no wider range, and the three additional bits of
precision matter: for random, low-rank and badly conditioned matrices, the largest deviation of a singular value from
the same iteration in float64 was 0.024 with torch's products and 0.007 with the others, and 0.18 in bfloat16
(tests/kernels/test_newton_schulz.py). "Gram Newton-Schulz", in which two iterations share one G, has fewer FLOPs for
tall matrices. It was no faster on an H200, and wrong by 0.025 for a matrix of rank 16.
"""

from typing import Literal

import torch
from torch import Tensor

from deskside.kernels.functional import at_least_float32

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

MIN_SYMMETRIC = 256  # columns; a smaller matrix has one tile, of which there is no half
SAFETY = 1.01
"""Margin of 1 %, because rounding may move a singular value out of the interval, where the polynomials diverge."""


def coefficients(kind: Literal["polar_express", "quintic"], steps: int) -> Coefficients:
    """Return the polynomial (a, b, c) of each of `steps` iterations."""
    if kind == "quintic":
        return (_QUINTIC,) * steps
    safe = tuple((a / SAFETY, b / SAFETY**3, c / SAFETY**5) for a, b, c in _POLAR_EXPRESS)
    return (safe + (_POLAR_EXPRESS_LIMIT,) * steps)[:steps]


def orthogonalize(
    x: Tensor, polynomials: Coefficients, symmetric: bool = False, squares: Tensor | None = None
) -> Tensor:
    """Return matrices with the same singular vectors and all singular values near one. A zero matrix stays zero.

    x: (batch, rows, columns), contiguous, with rows >= columns, so that X^T X has the smaller size. The caller
    transposes wide matrices. x in bfloat16 is iterated in float16; in any other dtype, x is overwritten.
    symmetric: compute only half of each symmetric product, which needs Triton. squares: (batch,), the sum of the
    squares of each matrix, computed if None.
    """
    if squares is None:
        squares = torch.linalg.vector_norm(x, dim=(-2, -1), dtype=at_least_float32(x)).square()
    scale = (1 / (squares.sqrt() * SAFETY + 1e-12))[:, None, None]
    dtype = torch.float16 if x.dtype == torch.bfloat16 else x.dtype
    x = torch.mul(x, scale, out=x if x.dtype == dtype else torch.empty_like(x, dtype=dtype))
    return _with_triton(x, polynomials) if symmetric else _with_torch(x, polynomials)


def _with_torch(x: Tensor, polynomials: Coefficients) -> Tensor:
    free, gram, step = torch.empty_like(x), _square(x), _square(x)
    for a, b, c in polynomials:
        torch.bmm(x.mT, x, out=gram)
        gram.diagonal(dim1=-2, dim2=-1).add_(b / (2 * c))
        torch.baddbmm(step, gram, gram, beta=0, alpha=c, out=step)
        step.diagonal(dim1=-2, dim2=-1).add_(a - b * b / (4 * c))
        x, free = torch.bmm(x, step, out=free), x
    return x


def _with_triton(x: Tensor, polynomials: Coefficients) -> Tensor:
    from deskside.kernels.newton_schulz_triton import symmetric_product

    free, gram, step = torch.empty_like(x), _square(x), _square(x)
    for a, b, c in polynomials:
        symmetric_product(x, x, gram)
        symmetric_product(gram, gram, step, c, gram, b, a)
        x, free = torch.bmm(x, step, out=free), x
    return x


def iteration_flops(rows: int, columns: int, symmetric: bool = False) -> float:
    """Return the FLOPs of one iteration of one matrix."""
    long, square = float(rows * columns**2), float(columns**3)
    return 3 * long + square if symmetric else 4 * long + 2 * square


def _square(x: Tensor) -> Tensor:
    """Return an uninitialized (batch, columns, columns) tensor for x (batch, rows, columns)."""
    return x.new_empty(x.shape[0], x.shape[2], x.shape[2])
