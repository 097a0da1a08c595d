"""Linear and Embedding: the two places where weights of two dimensions live.

A fused projection (q, k, v in one weight) is one `Linear` that knows its logical slices. Muon, initialisation, LoRA and
export work on the slices, never on the fused block, so that fusing changes speed and nothing else.

The model knows no precision: activations carry the dtype, the weight is cast to it where it is used. A precision
recipe replaces `Linear` modules (sharing their weights) and sets `Embedding.output_dtype`. Where weights are frozen,
`adapter` and `trained` are what trains beside them (`ops/lora.py`); `precision/adapters.py` sets them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deskside.kernels.embedding import embedding
from deskside.ops.lora import Adapter, TrainedRows


@dataclass(frozen=True)
class Slice:
    """Rows `start:stop` of a weight, under the name that the unfused projection would have."""

    name: str
    start: int
    stop: int


class Linear(nn.Module):
    """y = x W^T + b, where W stacks one or more named projections along its rows.

    weight: (sum of rows, in_features); bias: (sum of rows,) or None. `role` is "matrix" for block weights and "head"
    for the output projection, which optimisers treat apart. `execution` is set by a precision recipe: x (N, in) ->
    (N, rows), in place of the product; None is the product in x's dtype.
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
        self.adapter: Adapter | None = None
        self.trained: TrainedRows | None = None  # of a head; who computes logits asks for it

    def forward(self, x: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.to(x.dtype)
        if self.forward_override is not None:
            y = self.forward_override(x.flatten(0, -2)).view(*x.shape[:-1], self.out_features)
            return y if bias is None else y + bias
        y = F.linear(x, self.weight.to(x.dtype), bias)
        return y if self.adapter is None else self.adapter(x, y)

    def extra_repr(self) -> str:
        names = ", ".join(f"{s.name}={s.stop - s.start}" for s in self.slices)
        return f"in={self.in_features}, {names}, bias={self.bias is not None}"


class Embedding(nn.Module):
    """Rows of a table. weight: (entries, hidden_size); tokens of any shape -> (*shape, hidden_size).

    `output_dtype` (None: the weight's) starts the stream of activations, so it decides the dtype of the whole forward.
    `role` is "embedding" for tokens and "position" for learned positions.
    """

    def __init__(self, entries: int, hidden_size: int, role: Literal["embedding", "position"] = "embedding"):
        super().__init__()
        self.role = role
        self.output_dtype: torch.dtype | None = None
        self.weight = nn.Parameter(torch.empty(entries, hidden_size))
        self.trained: TrainedRows | None = None

    def forward(self, tokens: Tensor) -> Tensor:
        x = embedding(tokens, self.weight, self.output_dtype or self.weight.dtype)
        return x if self.trained is None else self.trained(tokens, x)


def make_slices(outputs: Sequence[tuple[str, int]]) -> tuple[Slice, ...]:
    """(("q_proj", 768), ("k_proj", 192)) -> Slice(q_proj, 0, 768), Slice(k_proj, 768, 960)."""
    slices, start = [], 0
    for name, rows in outputs:
        slices.append(Slice(name, start, start + rows))
        start += rows
    return tuple(slices)
