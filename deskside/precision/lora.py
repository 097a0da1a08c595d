"""LoRA adapters for frozen weights, and trainable rows of a frozen vocabulary table.

`attach_adapters` freezes a model and adds adapters to its projections. A `Linear` that gets an adapter becomes an
`AdaptedLinear` in place. Its parameters and its name in the model stay the same.

An `Adapter` belongs to one `Linear` or to one weight of `Experts`, which may stack several projections (q, k and v). It
has one pair of matrices A, B for each adapted projection, so what is learned, merged and exported does not depend on
how projections are stacked:

    y = x W^T + scale * (x A^T) B^T        A: the A of all pairs, stacked: (ranks, in)
                                           B: the B of all pairs on a block diagonal: (rows, ranks)

These are two small GEMMs and one pass over y. A and B are stored in float32, and the products run in the dtype of x.
The experts of a layer have an A and a B each, (E, rank, in) and (E, rows, rank), and their products are grouped.

`TrainedRows` are trainable float32 copies of the rows of a few tokens in an embedding or head that is frozen in BF16.
With them, a model learns new special tokens without training its whole vocabulary.

Whole tables may be trained too (`modules_to_save` of PEFT); they are float32 then.

LoRA: Hu et al. 2021, arXiv 2106.09685. DoRA: precision/dora.py.
"""

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deskside.config.sections import AdapterConfig
from deskside.kernels.cross_entropy import ReplacementRows
from deskside.kernels.stored_weights import embedding
from deskside.ops.grouped import grouped_linear
from deskside.ops.linear import Embedding, Linear, Slice
from deskside.ops.moe import Experts
from deskside.precision.dora import Magnitudes, row_norms
from deskside.precision.row_adapters import RowAdapters


class Adapter(nn.Module):
    """(x, y) -> y + scale (x A^T) B^T. x: (..., in), y: (..., rows of the whole weight).

    `a` maps each projection to its A (rank, in), and `b` to its B (rows of the projection, rank). `reset` initializes A
    like the weight of nn.Linear and B with zeros, so that a new adapter has no effect.

    shape: that of the adapted weight, (rows, in). For experts it is (E, rows, in); then each A and B has a leading E
    too, and x and y are rows that are sorted by expert.
    """

    role = "adapter"

    def __init__(
        self,
        shape: Sequence[int],
        slices: Sequence[Slice],
        rank: int,
        scale: float,
        dropout: float = 0.0,
        device: torch.device | None = None,
    ):
        super().__init__()
        *experts, self.rows, in_features = shape
        self.adapted, self.rank = tuple(slices), rank
        self.scale, self.dropout = scale, dropout
        a = {s.name: torch.empty(*experts, rank, in_features, device=device) for s in slices}
        b = {s.name: torch.zeros(*experts, s.stop - s.start, rank, device=device) for s in slices}
        self.magnitudes: Magnitudes | None = None
        self.a = nn.ParameterDict({name: nn.Parameter(values) for name, values in a.items()})
        self.b = nn.ParameterDict({name: nn.Parameter(values) for name, values in b.items()})

    @torch.no_grad()
    def reset(self, generator: torch.Generator) -> None:
        """Set initial values. They are drawn on the CPU, so that they do not depend on the device."""
        for s in self.adapted:
            a, b = self.a[s.name], self.b[s.name]
            bound = a.shape[-1] ** -0.5
            a.copy_(torch.empty(a.shape).uniform_(-bound, bound, generator=generator))
            b.zero_()

    def forward(self, x: Tensor, y: Tensor, ends_E: Tensor | None = None) -> Tensor:
        """ends_E: the first row after each expert's, for an adapter of experts."""
        # Evaluation does not switch the model to eval mode, but it runs without gradients.
        if self.dropout and self.training and torch.is_grad_enabled():
            x = F.dropout(x, self.dropout)
        a, b = self.joined(x.dtype)
        if ends_E is not None:
            change = grouped_linear(grouped_linear(x, a, ends_E), b, ends_E)
            return torch.add(y, change, alpha=self.scale)
        inner_NR = x.flatten(0, -2) @ a.T
        return torch.addmm(y.flatten(0, -2), inner_NR, b.T, alpha=self.scale).view(y.shape)

    def output(
        self, x: Tensor, y: Tensor, product: Callable[[Tensor], Tensor], bias: Tensor | None
    ) -> Tensor:
        """Return the output of an adapted layer. y: that of its frozen weight, with the bias. product: x -> x W^T."""
        y = self(x, y)
        if self.magnitudes is None:
            return y
        return self.magnitudes(y, self.magnitudes.gain(self.a, self.b, self.scale, product, x.dtype), bias)

    @torch.no_grad()
    def merge(self, weight: Tensor) -> None:
        """Merge the adapter into a float32 weight of the adapted shape, in place."""
        for s in self.adapted:
            rows = weight[..., s.start : s.stop, :]
            rows += (self.b[s.name].float() @ self.a[s.name].float()).mul_(self.scale).to(weight.device)
            if self.magnitudes is not None:
                rows *= (self.magnitudes.values[s.name].to(weight.device) / row_norms(rows))[:, None]

    def joined(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return all A stacked (ranks, in), and all B on a block diagonal (rows, ranks); for experts, of each."""
        if len(self.adapted) == 1 and self.adapted[0].stop - self.adapted[0].start == self.rows:
            name = self.adapted[0].name
            return self.a[name].to(dtype), self.b[name].to(dtype)
        a = torch.cat([self.a[s.name] for s in self.adapted], dim=-2).to(dtype)
        # Rows of projections without an adapter are zero.
        blocks, row = [], 0
        for number, s in enumerate(self.adapted):
            left, right = number * self.rank, (len(self.adapted) - 1 - number) * self.rank
            blocks.append(F.pad(self.b[s.name], (left, right, s.start - row, 0)))
            row = s.stop
        blocks[-1] = F.pad(blocks[-1], (0, 0, 0, self.rows - row))
        return a, torch.cat(blocks, dim=-2).to(dtype)

    def extra_repr(self) -> str:
        names = ", ".join(s.name for s in self.adapted)
        dropout = f", dropout={self.dropout}" if self.dropout else ""
        return f"{names}, rank={self.rank}, scale={self.scale:g}{dropout}"


class TrainedRows(nn.Module):
    """Trainable replacements for rows of a frozen table (V, D), initialized with the table's rows.

    rows: (n, D) float32; ids: (n,) int64, the tokens they belong to.
    """

    role = "rows"
    ids: Tensor
    row_of: Tensor  # (V,): index into `rows` for each token, -1 if its row is not replaced

    def __init__(self, table_VD: Tensor, ids: Sequence[int]):
        super().__init__()
        tokens = torch.tensor(ids, dtype=torch.int64, device=table_VD.device)
        row_of = torch.full((table_VD.shape[0],), -1, dtype=torch.int64, device=table_VD.device)
        row_of[tokens] = torch.arange(len(ids), device=table_VD.device)
        self.register_buffer("ids", tokens, persistent=False)
        self.register_buffer("row_of", row_of, persistent=False)
        self.rows = nn.Parameter(table_VD.detach()[tokens].to(torch.float32, copy=True))

    def forward(self, tokens: Tensor, x: Tensor) -> Tensor:
        """Replace the embeddings x (*tokens.shape, D) of the tokens that have a trained row."""
        row = self.row_of[tokens]
        return torch.where((row >= 0)[..., None], self.rows[row.clamp(min=0)].to(x.dtype), x)

    def into(self, table_VD: Tensor) -> Tensor:
        """Return a copy of the table with the trained rows in place, differentiable in both."""
        return table_VD.index_copy(0, self.ids, self.rows.to(table_VD.dtype))

    def logits(self, hidden: Tensor, logits: Tensor) -> Tensor:
        """Replace the logits (..., V) of the tokens that have a trained row. hidden: (..., D)."""
        return logits.index_copy(-1, self.ids, F.linear(hidden, self.rows.to(hidden.dtype)))

    @property
    def pair(self) -> tuple[Tensor, Tensor]:
        """(ids, rows), in the form that `linear_cross_entropy` takes."""
        return self.ids, self.rows

    def extra_repr(self) -> str:
        return f"{len(self.ids)} of {len(self.row_of)}"


class AdaptedLinear(Linear):
    """A `Linear` with an adapter or, for a head, with trained rows. Made by `add_adapter` and `add_trained_rows`."""

    # These have no default values, because class attributes would hide the submodules of the same names.
    adapter: Adapter | RowAdapters | None
    trained: TrainedRows | None

    def forward(self, x: Tensor) -> Tensor:
        bias, weight = None if self.bias is None else self.bias.to(x.dtype), self.weight.to(x.dtype)
        y = F.linear(x, weight, bias)
        if self.trained is not None:
            return self.trained.logits(x, y)
        return (
            y if self.adapter is None else self.adapter.output(x, y, lambda a: F.linear(a, weight), self.bias)
        )

    @property
    def replaced_rows(self) -> ReplacementRows | None:
        return None if self.trained is None else self.trained.pair

    @property
    def table(self) -> Tensor:
        return self.weight if self.trained is None else self.trained.into(self.weight)


class AdaptedExperts(Experts):
    """Experts with an adapter for one or both of their weights. Made by `attach_adapters`."""

    adapters: nn.ModuleDict  # by the name of the weight

    def product(self, name: str, x: Tensor, ends_E: Tensor) -> Tensor:
        y = super().product(name, x, ends_E)
        return self.adapters[name](x, y, ends_E) if name in self.adapters else y


class AdaptedEmbedding(Embedding):
    """An `Embedding` with trained rows. Made by `add_trained_rows`."""

    trained: TrainedRows

    def forward(self, tokens: Tensor) -> Tensor:
        return self.trained(tokens, embedding(tokens, self.weight, self.output_dtype or self.weight.dtype))

    def logits(self, hidden: Tensor) -> Tensor:
        return self.trained.logits(hidden, super().logits(hidden))

    @property
    def replaced_rows(self) -> ReplacementRows | None:
        return self.trained.pair

    @property
    def table(self) -> Tensor:
        return self.trained.into(self.weight)


def add_adapter(linear: Linear, adapter: Adapter | RowAdapters) -> None:
    """Add an adapter to a layer in place. A `FrozenLinear` keeps its class, because it applies adapters itself."""
    linear.adapter = adapter
    if type(linear) is Linear:
        linear.register_module("trained", None)
        linear.__class__ = AdaptedLinear


def add_expert_adapters(experts: Experts, adapters: Mapping[str, Adapter]) -> None:
    """Add adapters, by the names of their weights, in place. `FrozenExperts` keep their class: see `add_adapter`."""
    experts.adapters = nn.ModuleDict(adapters)
    if type(experts) is Experts:
        experts.__class__ = AdaptedExperts


def add_trained_rows(module: Embedding | Linear, ids: Sequence[int]) -> None:
    """Make the rows `ids` of a token embedding or a head trainable, in place."""
    module.trained = TrainedRows(module.weight, ids)
    if isinstance(module, Embedding):
        module.__class__ = AdaptedEmbedding
    else:
        module.register_module("adapter", None)
        module.__class__ = AdaptedLinear


def adapters_of(module: nn.Module) -> dict[str, Adapter]:
    """Return the adapters of a layer by the names of its weights: "weight", or those of `Experts`."""
    if isinstance(module, Experts):
        found = dict(getattr(module, "adapters", nn.ModuleDict()).items())
    else:
        found = {"weight": getattr(module, "adapter", None)}
    return {name: adapter for name, adapter in found.items() if isinstance(adapter, Adapter)}


def trained_rows_of(module: nn.Module | None) -> TrainedRows | None:
    """Return the trainable rows of an embedding or a head, or None."""
    rows = getattr(module, "trained", None)
    return rows if isinstance(rows, TrainedRows) else None


def is_adapted(model: nn.Module) -> bool:
    """Return True if this model trains adapters or single rows instead of its weights."""
    return any(isinstance(module, Adapter | TrainedRows) for module in model.modules())


def saved_tables(model: nn.Module, config: AdapterConfig) -> list[Embedding | Linear]:
    """Return the tables of a model that train completely, in addition to its adapters."""
    roles = {"embed_tokens": "embedding", "lm_head": "head"}
    wanted = {roles[name] for name in config.modules_to_save}
    return [m for m in model.modules() if isinstance(m, Embedding | Linear) and m.role in wanted]


def num_trained_parameters(model: nn.Module) -> int:
    """Return the number of trainable parameters."""
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
