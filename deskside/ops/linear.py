"""Linear, Embedding and HeadLoss: the modules that hold or use two-dimensional weights.

A fused projection (q, k, v in one weight) is one `Linear` with named logical slices. Code that processes weights, such
as initialization, Muon and export, uses the slices and never the fused matrix, so fusing changes only the speed.

The activations determine the dtype of a computation, starting with `Embedding.output_dtype`; weights are cast to it
where they are used. `Linear` and `HeadLoss` have a `forward_override`: another implementation, set from outside, or
None.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deskside.kernels.cross_entropy import (
    FutureTargets,
    LossOptions,
    ReplacementRows,
    linear_cross_entropy,
    multi_token_cross_entropy,
)
from deskside.kernels.stored_weights import embedding


@dataclass(frozen=True)
class Slice:
    """Rows `start:stop` of a weight, with the name of the unfused projection."""

    name: str
    start: int
    stop: int


class _Table(nn.Module):
    """A module whose weight may be the output head, (vocabulary, hidden)."""

    weight: nn.Parameter

    @property
    def table(self) -> Tensor:
        """The weight with `replaced_rows` applied."""
        return self.weight

    @property
    def replaced_rows(self) -> ReplacementRows | None:
        """(ids, rows) that replace rows of `weight`; always None in this package."""
        return None


class Linear(_Table):
    """y = x W^T + b, where W stacks one or more named projections along its rows.

    weight: (sum of rows, in_features); bias: (sum of rows,) or None. `role` is "matrix" for block weights and "head"
    for the output projection. `forward_override`, x (N, in) -> (N, rows), replaces the product without the bias.
    """

    def __init__(
        self,
        in_features: int,
        outputs: Sequence[tuple[str, int]],
        bias: bool = False,
        role: Literal["matrix", "head"] = "matrix",
    ):
        super().__init__()
        self.in_features = in_features
        self.role = role
        self.slices = make_slices(outputs)
        self.out_features = self.slices[-1].stop
        self.weight = nn.Parameter(torch.empty(self.out_features, in_features))
        self.bias = nn.Parameter(torch.zeros(self.out_features)) if bias else None
        self.forward_override: Callable[[Tensor], Tensor] | None = None

    def forward(self, x: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.to(x.dtype)
        if self.forward_override is not None:
            y = self.forward_override(x.flatten(0, -2)).view(*x.shape[:-1], self.out_features)
            return y if bias is None else y + bias
        return F.linear(x, self.weight.to(x.dtype), bias)

    def extra_repr(self) -> str:
        names = ", ".join(f"{s.name}={s.stop - s.start}" for s in self.slices)
        return f"in={self.in_features}, {names}, bias={self.bias is not None}"


class Embedding(_Table):
    """A table lookup. weight: (entries, hidden_size); tokens of any shape -> (*shape, hidden_size).

    `output_dtype` (None: the weight's dtype) becomes the dtype of the residual stream and of the whole forward pass.
    `role` is "embedding" for tokens and "position" for learned positions.
    """

    def __init__(self, entries: int, hidden_size: int, role: Literal["embedding", "position"] = "embedding"):
        super().__init__()
        self.role = role
        self.output_dtype: torch.dtype | None = None
        self.weight = nn.Parameter(torch.empty(entries, hidden_size))

    def forward(self, tokens: Tensor) -> Tensor:
        return embedding(tokens, self.weight, self.output_dtype or self.weight.dtype)

    def logits(self, hidden: Tensor) -> Tensor:
        """Apply the weight as a tied head: (..., hidden_size) -> (..., entries)."""
        return F.linear(hidden, self.weight.to(hidden.dtype))


class LossOverride(Protocol):
    """Another implementation of `linear_cross_entropy`, and of `multi_token_cross_entropy` as `multi_token`."""

    @property
    def multi_token(self) -> Callable[..., tuple[Tensor, Tensor]]: ...
    @property
    def __call__(self) -> Callable[..., Tensor]: ...


class HeadLoss(nn.Module):
    """Summed cross-entropy of a linear head, as one operator that materializes the logits of one chunk at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.forward_override: LossOverride | None = None

    def forward(
        self,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        targets_N: Tensor,
        options: LossOptions,
        rows: ReplacementRows | None = None,
    ) -> Tensor:
        """See `linear_cross_entropy`. An override that does not support `rows` raises TypeError if they are given."""
        more = {} if rows is None else {"rows": rows}
        loss = self.forward_override or linear_cross_entropy
        return loss(hidden_ND, weight_VD, targets_N, options, **more)

    def multi_token(
        self,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        targets_N: Tensor,
        future: FutureTargets,
        options: LossOptions,
        rows: ReplacementRows | None = None,
    ) -> tuple[Tensor, Tensor]:
        """See `multi_token_cross_entropy`. An override without `rows` raises TypeError as in `forward`."""
        more = {} if rows is None else {"rows": rows}
        override = self.forward_override
        loss = multi_token_cross_entropy if override is None else override.multi_token
        return loss(hidden_ND, weight_VD, targets_N, future, options, **more)


def make_slices(outputs: Sequence[tuple[str, int]]) -> tuple[Slice, ...]:
    """Return the slices of stacked rows: (("q", 768), ("k", 192)) gives Slice("q", 0, 768), Slice("k", 768, 960)."""
    slices, start = [], 0
    for name, rows in outputs:
        slices.append(Slice(name, start, start + rows))
        start += rows
    return tuple(slices)
