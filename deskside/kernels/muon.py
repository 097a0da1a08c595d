"""The element-wise halves of a Muon step, before and after Newton-Schulz, for many slices of weights at once.

    look_ahead   gradient, momentum -> new momentum, and the direction that Newton-Schulz makes orthogonal
    apply        orthogonal update, its factors per row, weight -> new weight
    row_sums     update and weight -> sums over each row, for updates that depend on the length of the weights

Newton-Schulz runs on stacks of slices with one shape. `look_ahead` and `apply` read and write each tensor once and in
place: a slice is a view (experts, rows, columns) of its parameter, and its part of the stack is also a view, transposed
where the stack holds it transposed. On CUDA each function is one launch of a Triton kernel for all slices of a stack,
which reads their addresses from a table: look_ahead moves 14 bytes per weight (float32 gradient read, momentum read and
written, bfloat16 direction written), apply 10 (float16 update read, float32 weight read and written). Elsewhere the
plain torch below runs, which is also the reference for the kernels.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from deskside.kernels.functional import at_least_float32
from deskside.kernels.weights_24bit import joined, store_


class PointerTable:
    """Rows of integers on the device, copied there only if they differ from those of the last step."""

    def __init__(self) -> None:
        self._rows: list[list[int]] = []
        self._tensor: Tensor | None = None

    def on_device(self, rows: list[list[int]], device: torch.device) -> Tensor:
        """Return the rows as an int64 tensor."""
        if self._tensor is None or rows != self._rows:
            host = torch.tensor(rows, dtype=torch.int64, pin_memory=device.type == "cuda")
            self._rows, self._tensor = rows, host.to(device, non_blocking=True)
        return self._tensor


@dataclass(frozen=True)
class Direction:
    """Tensors of one slice for `look_ahead`, each (experts, rows, columns).

    m: float32 or float64, or bfloat16 with arithmetic in float32. out: may be g itself.
    """

    g: Tensor
    m: Tensor
    out: Tensor


@dataclass(frozen=True)
class Update:
    """Tensors of one slice for `apply`, each (experts, rows, columns).

    factors: a view, constant along rows or along columns (its stride there is 0). scale: of the learning rate.
    seed: of the stochastic rounding of weights in 24 bits or bfloat16 at step 0, by the element's index in this slice.
    row_factors: (2, experts, rows), of p and of u, or None. residual: of p in 24 bits, with the strides of p, or None.
    """

    p: Tensor
    u: Tensor
    factors: Tensor
    scale: float = 1.0
    seed: int = 0
    row_factors: Tensor | None = None
    residual: Tensor | None = None

    @property
    def scaled(self) -> Tensor:
        """The update before its row factors and the learning rate: scale * factors * u."""
        return self.u.to(self.factors.dtype) * self.factors * self.scale


def look_ahead(
    slices: Sequence[Direction],
    momentum: float,
    nesterov: bool,
    skip: Tensor,
    clip: Tensor | None = None,
    table: PointerTable | None = None,
) -> Tensor | None:
    """Update the momentum in place, and write the direction, with Nesterov's look-ahead if `nesterov`, to `out`.

    The slices have the same shape and types, up to a transposition. Returns the sum of the squares of each direction,
    (slices x experts,), if the kernel ran; None otherwise.

    skip: float scalar on the device; 1 leaves the momentum unchanged and keeps NaN in the gradient out of `out`.
    clip: float32 scalar on the device by which gradients are multiplied. table: run the Triton kernel with it.
    """
    if table is not None:
        from deskside.kernels.muon_triton import look_ahead as kernel

        return kernel(slices, momentum, nesterov, skip, clip, table)
    for s in slices:
        m = s.m.to(at_least_float32(s.m))
        g = s.g.to(m.dtype) if clip is None else s.g.to(m.dtype) * clip
        g = torch.where(skip > 0, m, g)
        m = torch.lerp(m, g, 1 - momentum)
        s.m.copy_(m)
        s.out.copy_(torch.lerp(g, m, momentum) if nesterov else m)
    return None


def row_sums(slices: Sequence[Update], table: PointerTable | None = None) -> Tensor:
    """Return sums over each row of p^2, p * v and v^2, where v is the scaled update: (slices, 3, experts, rows).

    rows: the largest number in a slice; the sums of missing rows are zero. table: run the Triton kernel with it.
    """
    if table is not None:
        from deskside.kernels.muon_triton import row_sums as kernel

        return kernel(slices, table)
    experts, rows = (max(s.p.shape[i] for s in slices) for i in (0, 1))
    first = slices[0].factors
    sums = torch.zeros((len(slices), 3, experts, rows), dtype=first.dtype, device=first.device)
    for s, out in zip(slices, sums, strict=True):
        p, v = joined(s.p, s.residual, first.dtype), s.scaled
        for part, product in zip(out, (p * p, p * v, v * v), strict=True):
            part[: p.shape[0], : p.shape[1]] = product.sum(dim=-1)
    return sums


def apply(
    slices: Sequence[Update],
    lr: float,
    weight_decay: float,
    cautious: bool,
    skip: Tensor,
    step: int = 0,
    table: PointerTable | None = None,
) -> None:
    """Compute p -= lr * scale * factors * u + weight_decay * p in place; skip 1 leaves p unchanged.

    With row factors a and b, it is p = a * p - lr * b * scale * factors * u - weight_decay * p.

    weight_decay: already multiplied by the learning rate. cautious: decay only where the update moves the weight
    towards zero (arXiv 2510.12402). step: added to the seeds. table: run the Triton kernel with it.
    """
    if table is not None:
        from deskside.kernels.muon_triton import apply as kernel

        kernel(slices, lr, weight_decay, cautious, skip, step, table)
        return
    for s in slices:
        p = joined(s.p, s.residual, s.factors.dtype)
        u = s.u.to(p.dtype) * s.factors
        decay = weight_decay * p
        if cautious:
            decay = torch.where(u * p >= 0, decay, 0.0)
        if s.row_factors is None:
            new = p - lr * s.scale * u - decay
        else:
            of_p, of_u = s.row_factors[..., None]
            new = of_p * p - of_u * (lr * s.scale * u) - decay
        store_(s.p, s.residual, new, skip > 0, s.seed + step)
