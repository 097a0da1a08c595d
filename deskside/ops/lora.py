"""Adapters beside frozen weights, and the rows of a frozen table that train (LoRA, Hu et al. 2021, arXiv 2106.09685).

An `Adapter` belongs to one `Linear`, which may stack several projections, and has a pair of matrices for each *logical*
projection it adapts: a fused weight changes nothing in what is learned, merged or exported. The pairs are computed
together, y + scale (x A^T) B^T with all A below each other and all B on a diagonal: two small products, and one pass
over y. What A and B hold is float32; the products are in x's dtype, as those of the weight beside them.

`TrainedRows` are the rows of tokens that a frozen embedding or head has to learn, float32 beside a table in 16 bits.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Rows(Protocol):
    """Rows `start:stop` of a weight, under a projection's name. `ops.linear.Slice` is one."""

    @property
    def name(self) -> str: ...
    @property
    def start(self) -> int: ...
    @property
    def stop(self) -> int: ...


class Adapter(nn.Module):
    """(x, y) -> y + scale (x A^T) B^T. x: (..., in), y: (..., rows of the whole weight).

    a: projection -> (rank, in); b: projection -> (its rows, rank). A is uniform as a Linear's weight is by default, B
    zero, so that an adapter begins without effect. While `active` is False it has none.
    """

    role = "adapter"

    def __init__(
        self,
        in_features: int,
        rows: int,
        slices: Sequence[Rows],
        rank: int,
        scale: float,
        dropout: float = 0.0,
        device: torch.device | None = None,
    ):
        super().__init__()
        self.rows, self.adapted, self.rank = rows, tuple(slices), rank
        self.scale, self.dropout, self.active = scale, dropout, True
        a = {s.name: torch.empty(rank, in_features, device=device) for s in slices}
        b = {s.name: torch.zeros(s.stop - s.start, rank, device=device) for s in slices}
        self.a = nn.ParameterDict({name: nn.Parameter(values) for name, values in a.items()})
        self.b = nn.ParameterDict({name: nn.Parameter(values) for name, values in b.items()})

    @torch.no_grad()
    def reset(self, generator: torch.Generator) -> None:
        """Initial values, drawn on the CPU: the same on every device."""
        for s in self.adapted:
            a, b = self.a[s.name], self.b[s.name]
            bound = a.shape[1] ** -0.5
            a.copy_(torch.empty(a.shape).uniform_(-bound, bound, generator=generator))
            b.zero_()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        if not self.active:
            return y
        # Evaluation runs without gradients and leaves the model's mode as it is.
        if self.dropout and self.training and torch.is_grad_enabled():
            x = F.dropout(x, self.dropout)
        a, b = self._joined(x.dtype)
        inner_NR = x.flatten(0, -2) @ a.T
        return torch.addmm(y.flatten(0, -2), inner_NR, b.T, alpha=self.scale).view(y.shape)

    def delta(self, name: str) -> Tensor:
        """What merging adds to the rows of one projection: scale B A, float32."""
        return (self.b[name].detach().float() @ self.a[name].detach().float()).mul_(self.scale)

    def _joined(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """All A (ranks, in), and all B (rows, ranks) with zeros where a projection's rows meet another's ranks."""
        if len(self.adapted) == 1 and self.adapted[0].stop - self.adapted[0].start == self.rows:
            name = self.adapted[0].name
            return self.a[name].to(dtype), self.b[name].to(dtype)
        a = torch.cat([self.a[s.name] for s in self.adapted]).to(dtype)
        blocks, row = [], 0
        for number, s in enumerate(self.adapted):
            after = len(self.adapted) - 1 - number
            b = F.pad(self.b[s.name], (number * self.rank, after * self.rank, s.start - row, 0))
            blocks.append(b)
            row = s.stop
        blocks[-1] = F.pad(blocks[-1], (0, 0, 0, self.rows - row))
        return a, torch.cat(blocks).to(dtype)

    def extra_repr(self) -> str:
        names = ", ".join(s.name for s in self.adapted)
        return f"{names}, rank={self.rank}, scale={self.scale:g}" + (
            f", dropout={self.dropout}" if self.dropout else ""
        )


class TrainedRows(nn.Module):
    """Rows that stand in the place of those of a frozen table. rows: (n, D) float32; ids: (n,) int64.

    Begins with the table's own rows, which it goes back to while `active` is False.
    """

    role = "rows"
    ids: Tensor
    place: Tensor  # (V,): which row of `rows` an entry of the table has, -1 for its own

    def __init__(self, table_VD: Tensor, ids: Sequence[int]):
        super().__init__()
        index = torch.tensor(ids, dtype=torch.int64, device=table_VD.device)
        place = torch.full((table_VD.shape[0],), -1, dtype=torch.int64, device=table_VD.device)
        place[index] = torch.arange(len(ids), device=table_VD.device)
        self.register_buffer("ids", index, persistent=False)
        self.register_buffer("place", place, persistent=False)
        self.rows = nn.Parameter(table_VD.detach()[index].to(torch.float32, copy=True))
        self.active = True

    def forward(self, tokens: Tensor, x: Tensor) -> Tensor:
        """x (*tokens' shape, D), what the table gave for them, with these rows where they have them."""
        if not self.active:
            return x
        place = self.place[tokens]
        return torch.where((place >= 0)[..., None], self.rows[place.clamp(min=0)].to(x.dtype), x)

    def into(self, table_VD: Tensor) -> Tensor:
        """A copy of the table with these rows in it, differentiable in both."""
        return table_VD.index_copy(0, self.ids, self.rows.to(table_VD.dtype)) if self.active else table_VD

    def logits(self, hidden: Tensor, logits: Tensor) -> Tensor:
        """Logits (..., V) of the table, with those of these rows in their place."""
        if not self.active:
            return logits
        own = F.linear(hidden, self.rows.to(hidden.dtype))
        return logits.index_copy(-1, self.ids, own)

    @property
    def pair(self) -> tuple[Tensor, Tensor] | None:
        """(ids, rows), as `linear_cross_entropy` takes them; None while they are off."""
        return (self.ids, self.rows) if self.active else None

    def extra_repr(self) -> str:
        return f"{len(self.ids)} of {len(self.place)}"


def is_adapted(model: nn.Module) -> bool:
    """Whether adapters or single rows are what trains in this model."""
    return any(isinstance(module, Adapter | TrainedRows) for module in model.modules())


@contextlib.contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """The model as it was before any of its adapters learned: DPO's and GRPO's reference."""
    found = [module for module in model.modules() if isinstance(module, Adapter | TrainedRows)]
    before = [module.active for module in found]
    for module in found:
        module.active = False
    try:
        yield
    finally:
        for module, active in zip(found, before, strict=True):
            module.active = active
