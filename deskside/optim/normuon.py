"""NorMuon's normalization of the rows of an orthogonalized update (Li et al. 2025, arXiv 2510.05491)."""

import torch
from torch import Tensor


def normuon_factors(
    u: Tensor, row_mean_squares: Tensor | None, beta: float, dtype: torch.dtype, skip: Tensor
) -> Tensor:
    """Return the factors of NorMuon's row normalization, expanded to the shape of u; ones without row_mean_squares.

    u: (batch, long side, short side). row_mean_squares: (batch, long side), updated in place unless skip is 1.
    """
    if row_mean_squares is None:
        return torch.ones((1, 1, 1), dtype=dtype, device=u.device).expand(u.shape)
    mean = torch.linalg.vector_norm(u, dim=-1, dtype=dtype).square() / u.shape[-1]
    row_mean_squares.copy_(
        torch.where(skip > 0, row_mean_squares, torch.lerp(row_mean_squares, mean, 1 - beta))
    )
    inverse = 1 / row_mean_squares.clamp_min(1e-10)
    # Restores the Frobenius norm of each matrix.
    restore = mean.sum(dim=-1, keepdim=True) / (mean * inverse).sum(dim=-1, keepdim=True).clamp_min(1e-30)
    return (inverse * restore).sqrt()[..., None].expand(u.shape)
