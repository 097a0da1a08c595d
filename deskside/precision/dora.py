"""DoRA: trained magnitudes of the rows of an adapted weight. Liu et al. 2024, arXiv 2402.09353.

    y = g * (x W^T + scale (x A^T) B^T) + bias        g = m / |W + scale B A|

m is a trained number for each row, initialized to |W|, the norm of the row. As in the paper (section 4.3) and in PEFT,
the norm that divides m is a constant for the gradient.

The norm is not computed from the sum, which would be a float32 copy of the weight in every pass:

    |W + s B A|^2 = |W|^2 + 2 s (B . W A^T) + s^2 (B A A^T . B)        . : product of rows

|W|^2 never changes, and W A^T is the frozen layer's own product with the rows of A as inputs.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from deskside.ops.linear import Slice

# Of a row of zeros, so that its magnitude 0 divided by it is 0 and not NaN.
SMALLEST_NORM = torch.finfo(torch.float32).tiny


def row_norms(weight: Tensor) -> Tensor:
    """Return the norm of each row in float32, at least SMALLEST_NORM. (..., rows, in) -> (..., rows)."""
    return torch.linalg.vector_norm(weight, dim=-1, dtype=torch.float32).clamp_min(SMALLEST_NORM)


class Magnitudes(nn.Module):
    """The magnitudes of the adapted projections of one weight.

    values: by projection, (rows of the projection,) float32, trained. square: |W|^2 of each row of the whole weight.
    """

    square: Tensor

    def __init__(self, slices: Sequence[Slice], weight: Tensor):
        super().__init__()
        norm = torch.linalg.vector_norm(weight.detach(), dim=-1, dtype=torch.float32)
        self.adapted = tuple(slices)
        self.values = nn.ParameterDict({s.name: nn.Parameter(norm[s.start : s.stop].clone()) for s in slices})
        self.register_buffer("square", norm.square(), persistent=False)

    def forward(self, y: Tensor, gain: Tensor, bias: Tensor | None) -> Tensor:
        """Return y with its rows scaled, but not its bias. y: (..., rows), the product with the bias added."""
        if bias is None:
            return y * gain.to(y.dtype)
        return torch.addcmul(((1 - gain) * bias).to(y.dtype), y, gain.to(y.dtype))

    def gain(
        self,
        a: nn.ParameterDict,
        b: nn.ParameterDict,
        scale: float,
        product: Callable[[Tensor], Tensor],
        dtype: torch.dtype,
    ) -> Tensor:
        """Return g (rows,) float32; 1 for rows without an adapter. product: x -> x W^T without bias, in `dtype`."""
        parts, row = [], 0
        for s in self.adapted:
            parts.append(self.square.new_ones(s.start - row))
            with torch.no_grad():
                a_RI, b_OR = a[s.name].detach(), b[s.name].detach()
                cross_OR = product(a_RI.to(dtype))[:, s.start : s.stop].T.float()
                change = (b_OR * (2 * scale * cross_OR + scale**2 * (b_OR @ (a_RI @ a_RI.T)))).sum(dim=1)
                norm = (self.square[s.start : s.stop] + change).clamp_min(0).sqrt().clamp_min(SMALLEST_NORM)
            parts.append(self.values[s.name] / norm)
            row = s.stop
        parts.append(self.square.new_ones(len(self.square) - row))
        return torch.cat(parts)

    def extra_repr(self) -> str:
        return ", ".join(s.name for s in self.adapted)
