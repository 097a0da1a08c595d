"""The arguments of attention besides q, k and v, and the registry of its backends."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import lru_cache
from importlib import metadata
from typing import Any

import torch
from torch import Tensor

from deskside.config.model import ModelConfig
from deskside.kernels.attention.ranks import ContextRanks
from deskside.utils.errors import UsageError

DeviceType = str  # "cpu" or "cuda"


@dataclass(frozen=True)
class AttentionContext:
    """Mask and backend of attention.

    window: number of tokens that a query sees up to and including itself; None: all.
    cu_seqlens: int32, document boundaries over the flattened B * T tokens, first 0 and last B * T, padded to a fixed
        length by repeating B * T; the start of every row is a boundary. None: each row is one document.
    max_seqlen: length of the longest document, or any upper bound (None: T). A constant of the compiled graph.
    scale: factor of the scores; None is 1 / sqrt(head_dim). softcap: scores, after the scale, become
        softcap * tanh(score / softcap), as in Gemma 2; None: they stay as they are.
    sinks_H: a score per head, float32, that takes part in the softmax of every query and has no value, as in gpt-oss.
    backend, window_backend: names in `BACKENDS`; window_backend is for layers with a window (None: `backend`).
    ranks: the processes that share the rows, for the backends of shared rows; q, k and v are then this process's
        tokens, and cu_seqlens has the boundaries of the whole rows. None: this process holds whole rows.
    prepared: the backend's precomputed data, set by `prepare`.
    """

    causal: bool = True
    scale: float | None = None
    softcap: float | None = None
    sinks_H: Tensor | None = None
    window: int | None = None
    cu_seqlens: Tensor | None = None
    max_seqlen: int | None = None
    backend: str = "reference"
    window_backend: str | None = None
    ranks: ContextRanks | None = None
    prepared: Any = None

    def for_window(self, window: int | None) -> "AttentionContext":
        """Return the context of a layer with this window."""
        backend = self.backend if window is None else (self.window_backend or self.backend)
        return replace(self, window=window, backend=backend)


PLAIN = AttentionContext()  # causal attention over whole rows

AttentionFunction = Callable[[Tensor, Tensor, Tensor, AttentionContext], Tensor]
Saved = tuple[Any, ...]  # what a forward saves for its backward


@dataclass(frozen=True)
class FwdBwd:
    """A kernel's forward and backward as plain functions, for code that writes its gradients by hand.

    forward: (q_BTHC, k_BTKC, v_BTKC, prepared context) -> (o_BTHC, saved).
    backward: (saved, grad_o_BTHC, the same context) -> (dq_BTHC, dk_BTKC, dv_BTKC).
    """

    forward: Callable[[Tensor, Tensor, Tensor, AttentionContext], tuple[Tensor, Saved]]
    backward: Callable[[Saved, Tensor, AttentionContext], tuple[Tensor, Tensor, Tensor]]


@dataclass(frozen=True)
class Requirements:
    """An attention problem. `tokens` is T, `head_dim` is C; `documents`: rows may hold several documents.

    shared_rows: processes share the rows (`AttentionContext.ranks`), and `tokens` are those of one process.
    softcap: the scores are capped. sinks: there are attention sinks.
    """

    batch: int
    tokens: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device
    window: int | None = None
    documents: bool = False
    causal: bool = True
    shared_rows: bool = False
    softcap: bool = False
    sinks: bool = False

    @staticmethod
    def of_model(
        model: ModelConfig, batch: int, tokens: int, dtype: torch.dtype, device: torch.device, **masks: Any
    ) -> "Requirements":
        """Return the problem of a layer of this model. masks: the fields from `window` to `shared_rows`."""
        heads = (model.num_attention_heads, model.num_key_value_heads, model.head_dim)
        softcap = model.attn_logit_softcapping is not None
        sinks = model.attention_sinks
        return Requirements(batch, tokens, *heads, dtype, device, softcap=softcap, sinks=sinks, **masks)

    @staticmethod
    def from_tensors(q_BTHC: Tensor, k_BTKC: Tensor, context: AttentionContext) -> "Requirements":
        """Return the problem of these tensors and this context."""
        B, T, H, C = q_BTHC.shape
        masks = (context.window, context.cu_seqlens is not None, context.causal, context.ranks is not None)
        shape = (B, T, H, k_BTKC.shape[2], C)
        scores = (context.softcap is not None, context.sinks_H is not None)
        return Requirements(*shape, q_BTHC.dtype, q_BTHC.device, *masks, *scores)


def no_preparation(context: AttentionContext, batch: int, tokens: int, device: torch.device) -> Any:
    """Return None: the default for backends that need no precomputed data."""
    return None


@dataclass(frozen=True)
class AttentionBackend:
    """An attention kernel and the features that it declares; `choose` checks that it computes them correctly.

    grouped: supports fewer key-value heads than query heads. shared_rows: for rows that processes share, and only for
    them. supports_noncausal: supports attention that is not causal. softcap: supports capped scores. sinks: supports
    attention sinks. on_request: devices on which `choose` tries it only if it is among the candidates. for_masks: worth
    trying, and compiling, only for windows, documents, capped scores or sinks; `choose` skips it otherwise. prepare:
    computes `AttentionContext.prepared`. start_seconds: what its first use takes on a machine without compiled kernels,
    if that is long; `choose` tries it last. pair: its explicit forward and backward (None: `manual_backward.py` runs
    `function` under autograd). package: the optional distribution that it needs, which is also the name of deskside's
    extra.
    """

    name: str
    function: AttentionFunction
    devices: frozenset[DeviceType]
    dtypes: frozenset[torch.dtype]
    window: bool = False
    documents: bool = False
    grouped: bool = True
    supports_noncausal: bool = False
    shared_rows: bool = False
    softcap: bool = False
    sinks: bool = False
    max_head_dim: int = 256
    on_request: frozenset[DeviceType] = field(default_factory=frozenset)
    for_masks: bool = False
    prepare: Callable[[AttentionContext, int, int, torch.device], Any] = no_preparation
    start_seconds: float = 0.0
    pair: FwdBwd | None = None
    package: str | None = None

    def unsupported_reason(self, need: Requirements) -> str | None:
        """Return the first unsupported requirement as a message, or None if the backend supports all."""
        if need.device.type not in self.devices:
            return f"runs on {' and '.join(sorted(self.devices))}, not on {need.device.type}"
        if need.dtype not in self.dtypes:
            return f"does not take {str(need.dtype).removeprefix('torch.')}"
        if need.window is not None and not self.window:
            return "has no sliding window"
        if need.documents and not self.documents:
            return "has no document boundaries"
        if need.heads != need.kv_heads and not self.grouped:
            return "has no grouped-query attention"
        if not need.causal and not self.supports_noncausal:
            return "is causal only"
        if need.shared_rows != self.shared_rows:
            return "needs whole rows" if need.shared_rows else "is for rows that processes share"
        if need.softcap and not self.softcap:
            return "has no soft cap of the scores"
        if need.sinks and not self.sinks:
            return "has no attention sinks"
        if need.head_dim > self.max_head_dim:
            return f"supports head_dim up to {self.max_head_dim}, not {need.head_dim}"
        if self.package is not None and not _installed(self.package):
            return f"needs the package {self.package}: pip install 'deskside[{self.package}]'"
        return None


@lru_cache(maxsize=8)
def _installed(distribution: str) -> bool:
    """Return True if the distribution is installed, without importing it, which can take seconds."""
    try:
        metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return False
    return True


BACKENDS: dict[str, AttentionBackend] = {}


def register(backend: AttentionBackend) -> None:
    """Add a backend under its name. The modules of this package register theirs when the package is imported."""
    BACKENDS[backend.name] = backend


def backend_named(name: str) -> AttentionBackend:
    """Return the backend of this name. Raises UsageError for an unknown name."""
    if name not in BACKENDS:
        raise UsageError(
            f"attention backend '{name}' does not exist; use one of {', '.join(sorted(BACKENDS))}"
        )
    return BACKENDS[name]


def prepare(context: AttentionContext, need: Requirements) -> AttentionContext:
    """Check that the backend supports this problem, and set `prepared`, which compiled blocks must not compute.

    Called once per forward for each distinct window. Raises UsageError, naming the backend and the missing feature.
    """
    backend = backend_named(context.backend)
    reason = backend.unsupported_reason(need)
    if reason is not None:
        raise UsageError(
            f"attention backend '{backend.name}' {reason}; use 'reference' or let deskside choose"
        )
    return replace(context, prepared=backend.prepare(context, need.batch, need.tokens, need.device))


def document_ids(cu_seqlens: Tensor, batch: int, tokens: int) -> Tensor:
    """Return the number of each token's document in the batch, from 1, (B, T) int64."""
    index = torch.arange(batch * tokens, dtype=cu_seqlens.dtype, device=cu_seqlens.device)
    return torch.searchsorted(cu_seqlens, index, right=True).view(batch, tokens)


def document_positions(cu_seqlens: Tensor, batch: int, tokens: int) -> Tensor:
    """Return the position of each token within its document, (B, T) int64."""
    index = torch.arange(batch * tokens, dtype=cu_seqlens.dtype, device=cu_seqlens.device)
    document = torch.searchsorted(cu_seqlens, index, right=True) - 1
    return (index - cu_seqlens[document]).long().view(batch, tokens)
