"""Updates of Muon that depend on the norm of the weights: a floor for each row, and a radial brake.

Both are linear in a row of the weight p and of the update v, so they need no more than sums over each row
(`kernels/muon.py`), and become one factor of each:

    radial brake   the component of v that increases the norm of p is multiplied by `brake`. The new p is then scaled
                   to the norm that its component along p has: a step at a right angle to p does not change the norm.
    row floor      a row of v whose norm is below `floor` times that of the row of p is scaled up to this

Sources: modded-nanogpt PR 294 (brake), PRs 274 and 328 (floor); there, both replace weight decay.
"""

import torch
from torch import Tensor


def row_factors(sums: Tensor, lr: float, floor: float, brake: float | None) -> Tensor:
    """Return factors a and b of rows, (slices, 2, experts, rows), so that the new weights are a * p - lr * b * v.

    sums: of p^2, p * v and v^2 over rows, (slices, 3, experts, rows). floor: 0 is none. brake: None is none.
    """
    pp, pv, vv = sums.unbind(dim=1)
    # v becomes v + c * p, in each matrix.
    c = torch.zeros_like(pp[..., :1])
    if brake is not None:
        along = _total(pv) / _total(pp).clamp_min(1e-12)
        c = (brake - 1) * along.clamp_max(0.0)  # p moves by -v, so it becomes longer if they point apart
    pv, vv = pv + c * pp, vv + 2 * c * pv + c * c * pp
    lift = torch.ones_like(vv)
    if floor:
        lift = (floor * pp.sqrt() / vv.clamp_min(1e-16).sqrt()).clamp_min(1.0)
    pin = torch.ones_like(c)
    if brake is not None:
        length, moved = _total(pp).sqrt(), lr * _total(lift * lift * vv).sqrt()
        wanted = length - lr * _total(lift * pv) / length.clamp_min(1e-8)
        # At least as long as the step itself, or a matrix that begins as zero could not grow.
        wanted = torch.maximum(wanted, moved)
        reached = (length * length - 2 * lr * _total(lift * pv) + moved * moved).clamp_min(1e-16).sqrt()
        pin = wanted / reached
    return torch.stack((pin * (1 - lr * lift * c), pin * lift), dim=1)


def _total(sums: Tensor) -> Tensor:
    """Return the sum over the rows of each matrix, (..., 1)."""
    return sums.sum(dim=-1, keepdim=True)
