"""The decoder-only transformer that a ModelConfig describes.

`loss` computes the loss from the hidden states in chunks of tokens, and only the logits of one chunk exist at a time.
Other implementations of a computation are attached from outside, by `forward_override` or by wrapping a forward.
"""

import functools
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn

from deskside.budget.shape import kv_bytes_per_token
from deskside.config.model import ModelConfig
from deskside.kernels.attention import AttentionContext, Requirements, prepare
from deskside.kernels.cross_entropy import (
    CHUNK_TOKENS,
    FutureTargets,
    LossOptions,
    ReplacementRows,
    token_losses,
)
from deskside.model.block import (
    DEFAULT_BLOCKS,
    Block,
    CachedBlocks,
    LayerCache,
    Rotation,
    hidden_norm,
)
from deskside.model.cache import KVCache
from deskside.ops.composite import AddNormLinear
from deskside.ops.linear import Embedding, HeadLoss, Linear
from deskside.ops.logical import logical_tensors
from deskside.ops.moe import RouterStatistics
from deskside.ops.rope import rope_table
from deskside.utils.errors import UsageError

PARAM_GROUPS = ("embedding", "position", "attention", "mlp", "norm", "head")


class Transformer(nn.Module):
    """A decoder-only transformer. Its parameters are uninitialized: call `initialize` (init.py) or load weights.

    dropout: function of the embedding before the first block, set from outside (dropout.py); None is no function.
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        self.dropout: Callable[[Tensor], Tensor] | None = None
        self.embed = Embedding(config.vocab_size, config.hidden_size)
        self.position: Embedding | None = None
        if config.position_embedding == "learned":
            self.position = Embedding(config.max_position_embeddings, config.hidden_size, role="position")
        self.layers = nn.ModuleList(Block(config, layer) for layer in range(config.num_hidden_layers))
        # The output of the last block is normalized, wherever the norms of the blocks are.
        position: Literal["pre", "post"] = "post" if config.norm_position == "post" else "pre"
        self.final = AddNormLinear(hidden_norm(config), nn.ModuleList(), position)
        self.head: Linear | None = None
        if not config.tie_word_embeddings:
            self.head = Linear(config.hidden_size, [("lm_head", config.vocab_size)], role="head")
        self.head_loss = HeadLoss()
        self.rope_cos: Tensor | None
        self.rope_sin: Tensor | None
        self.local_rope_cos: Tensor | None
        self.local_rope_sin: Tensor | None
        for name in ("rope_cos", "rope_sin", "local_rope_cos", "local_rope_sin"):
            self.register_buffer(name, None, persistent=False)
        self.reset_buffers()

    def reset_buffers(self) -> None:
        """Compute the rotary tables in float32 on the device of the weights."""
        config, device = self.config, self.embed.weight.device
        size = (config.max_position_embeddings, config.rotary_dim)
        if config.position_embedding == "rope":
            self.rope_cos, self.rope_sin = rope_table(*size, config.rope_theta, device, config.rope_scaling)
        if config.rope_local_base_freq is not None:
            self.local_rope_cos, self.local_rope_sin = rope_table(*size, config.rope_local_base_freq, device)

    def rope_tables(self, rope: str | None) -> tuple[Tensor, Tensor] | None:
        """Return cos and sin of all positions, (positions, c) float32 each, for an `Attention.rope`; None without RoPE.

        c is half the number of rotated channels of a head.
        """
        cos, sin = self.rope_cos, self.rope_sin
        if rope == "local":
            cos, sin = self.local_rope_cos, self.local_rope_sin
        return None if rope is None or cos is None or sin is None else (cos, sin)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Transformer":
        """Recompute the rotary tables after `to`, `to_empty`, `bfloat16`, ..., so that they stay float32."""
        super()._apply(fn, recurse)
        self.reset_buffers()
        return self

    # Forward

    def forward(
        self, tokens_BT: Tensor, context: AttentionContext | None = None, positions_BT: Tensor | None = None
    ) -> Tensor:
        """(B, T) int64 -> logits (B, T, V)."""
        return self.logits(self.hidden(tokens_BT, context, positions_BT))

    def hidden(
        self, tokens_BT: Tensor, context: AttentionContext | None = None, positions_BT: Tensor | None = None
    ) -> Tensor:
        """(B, T) -> hidden states that the head reads (B, T, D). See `hidden_and_router`."""
        return self.hidden_and_router(tokens_BT, context, positions_BT)[0]

    def hidden_and_router(
        self, tokens_BT: Tensor, context: AttentionContext | None = None, positions_BT: Tensor | None = None
    ) -> tuple[Tensor, list[Tensor]]:
        """Return the hidden states that the head reads (B, T, D), and each MoE layer's router statistics (R,).

        They are those after the final norm, divided by `logits_scaling`.

        context: None is causal attention with the reference backend. positions_BT: int64; None is 0..T-1 in each row.
        With learned positions and packed documents, pass `document_positions(...)`.
        Raises UsageError for a sequence longer than the positions, or a backend that lacks a required feature.
        """
        B, T = tokens_BT.shape
        self._check_length(T)
        x_BTD = self._embed(tokens_BT, positions_BT)
        x_BTD = x_BTD if self.dropout is None else self.dropout(x_BTD)
        rotations = self._rotations(T, positions_BT)
        contexts = self._contexts(context or AttentionContext(), B, T, x_BTD)
        # Splitting the embedding costs several passes over it, forward and backward.
        split_embedding = not self.layers[0].attn.delta_optional  # type: ignore[union-attr]
        residual_BTD, delta_BTD = self._split_embedding(x_BTD) if split_embedding else (x_BTD, None)
        statistics: list[Tensor] = []
        for layer in self.layers:
            assert isinstance(layer, Block)
            residual_BTD, delta_BTD, *router = layer(
                residual_BTD, delta_BTD, rotations[layer.attn.rope], contexts[layer.attn.window]
            )
            statistics.extend(router)
        assert delta_BTD is not None
        return self.head_input(self.final.add_norm(residual_BTD, delta_BTD)[1]), statistics

    def head_input(self, hidden_BTD: Tensor) -> Tensor:
        """Hidden states after the final norm -> input of the head: divided by `logits_scaling`, which scales logits."""
        scaling = self.config.logits_scaling
        return hidden_BTD if scaling == 1.0 else hidden_BTD / scaling

    def logits(self, hidden_BTD: Tensor) -> Tensor:
        """Input of the head -> logits, with the soft cap of the configuration."""
        logits_BTV = self.embed.logits(hidden_BTD) if self.head is None else self.head(hidden_BTD)
        cap = self.config.final_logit_softcapping
        return logits_BTV if cap is None else cap * torch.tanh(logits_BTV / cap)

    def loss(
        self, tokens_BT: Tensor, targets_BT: Tensor, context: AttentionContext | None = None, **options: Any
    ) -> Tensor:
        """Return the sum of the losses over targets that are not -100, float32. See `loss_and_router`."""
        return self.loss_and_router(tokens_BT, targets_BT, context, **options)[0]

    def loss_and_router(
        self,
        tokens_BT: Tensor,
        targets_BT: Tensor,
        context: AttentionContext | None = None,
        positions_BT: Tensor | None = None,
        z_loss: float = 0.0,
        chunk_tokens: int = CHUNK_TOKENS,
    ) -> tuple[Tensor, RouterStatistics | None]:
        """Return the summed cross-entropy plus z-loss, and the statistics of the routers (None without experts).

        The statistics cover all tokens of the batch, as in Hugging Face Transformers without a mask. Their losses are
        not part of the sum.
        """
        hidden_BTD, statistics = self.hidden_and_router(tokens_BT, context, positions_BT)
        options = LossOptions(self.config.final_logit_softcapping, z_loss, chunk_tokens)
        hidden_ND, targets_N = hidden_BTD.flatten(0, 1), targets_BT.flatten()
        loss = self.head_loss(hidden_ND, self._head_table.weight, targets_N, options, self.head_rows)
        return loss, _router_statistics(statistics, tokens_BT)

    def multi_token_loss(
        self,
        tokens_BT: Tensor,
        targets_BT: Tensor,
        future: FutureTargets,
        context: AttentionContext | None = None,
        positions_BT: Tensor | None = None,
        z_loss: float = 0.0,
        chunk_tokens: int = CHUNK_TOKENS,
    ) -> tuple[Tensor, Tensor, RouterStatistics | None]:
        """Like `loss_and_router`, but the hidden states also predict the tokens of `future`, with the same head.

        Returns the sum of all terms, the next token's part of it (without gradient), and the routers' statistics.
        """
        hidden_BTD, statistics = self.hidden_and_router(tokens_BT, context, positions_BT)
        options = LossOptions(self.config.final_logit_softcapping, z_loss, chunk_tokens)
        hidden_ND, targets_N = hidden_BTD.flatten(0, 1), targets_BT.flatten()
        total, next_token = self.head_loss.multi_token(
            hidden_ND, self._head_table.weight, targets_N, future, options, self.head_rows
        )
        return total, next_token, _router_statistics(statistics, tokens_BT)

    @torch.no_grad()
    def token_losses(
        self,
        tokens_BT: Tensor,
        targets_BT: Tensor,
        context: AttentionContext | None = None,
        positions_BT: Tensor | None = None,
        chunk_tokens: int = CHUNK_TOKENS,
    ) -> Tensor:
        """Return the cross-entropy of each token, (B, T) float32, 0 where the target is -100. For evaluation."""
        hidden_BTD = self.hidden(tokens_BT, context, positions_BT)
        options = LossOptions(self.config.final_logit_softcapping, chunk_tokens=chunk_tokens)
        hidden_ND, targets_N = hidden_BTD.flatten(0, 1), targets_BT.flatten()
        losses_N = token_losses(hidden_ND, self._head_table.weight, targets_N, options, self.head_rows)
        return losses_N.view(targets_BT.shape)

    # Generation

    def new_cache(self, batch: int, max_length: int) -> KVCache:
        """Return an empty cache for `batch` rows, with the dtype and device of the activations."""
        return KVCache.allocate(
            self.config, batch, max_length, self.activation_dtype, self.embed.weight.device
        )

    @torch.no_grad()
    def forward_cached(
        self,
        tokens_BT: Tensor,
        cache: KVCache,
        counts_B: Tensor | None = None,
        logits_of: Literal["all", "last"] = "all",
        blocks: CachedBlocks = DEFAULT_BLOCKS,
    ) -> Tensor:
        """Append tokens to each row of the cache. Returns logits (B, T, V), or (B, 1, V) for each row's last token.

        counts_B: number of tokens in each row before the padding on the right (None: all T). The logits of padding are
        meaningless. Packed tokens are (1, N), and the cache's view knows the rows (`KVCache.view_packed`).
        blocks: how the blocks and the final norm are computed. Raises UsageError if the tokens exceed the cache or the
        model's positions.
        """
        B, T = tokens_BT.shape
        if not cache.managed:
            self._check_length(cache.bound + T)
        slots = cache.reserve(T, counts_B)
        x_BTD = self._embed(tokens_BT, slots.position_BT)
        contexts = self._contexts(_prefill_context(x_BTD, self.config), B, T, x_BTD) if cache.fresh else {}
        # See `_split_embedding`. Kernels of the blocks rely on this one having no early start (dependent_launch.py).
        residual_BTD = delta_BTD = x_BTD * 0.5
        rotation_of = functools.cache(lambda rope: self._rotation(rope, T, slots.position_BT))
        narrow = logits_of == "last" and blocks.narrows
        for index, layer in enumerate(self.layers):
            assert isinstance(layer, Block)
            layer_cache = LayerCache(cache, index, slots, rotation_of, contexts.get(layer.attn.window))
            residual_BTD, delta_BTD = blocks.attention(layer.attn, residual_BTD, delta_BTD, layer_cache)
            if narrow and index == len(self.layers) - 1:  # nothing attends to what follows
                residual_BTD, delta_BTD = (
                    cache.last_tokens(residual_BTD, counts_B),
                    cache.last_tokens(delta_BTD, counts_B),
                )
            residual_BTD, delta_BTD = blocks.mlp(layer.mlp, residual_BTD, delta_BTD)
        hidden_BTD = self.head_input(blocks.final(self.final, residual_BTD, delta_BTD))
        if logits_of == "last" and not narrow:
            hidden_BTD = cache.last_tokens(hidden_BTD, counts_B)
        cache.advance(T, counts_B)
        return self.logits(hidden_BTD)

    # Accounting

    def num_params(self) -> dict[str, int]:
        """Return the number of parameters by group. A tied head counts as embedding only."""
        counts = dict.fromkeys(PARAM_GROUPS, 0)
        for tensor in logical_tensors(self):
            counts[_param_group(tensor.name)] += tensor.view.numel()
        return counts

    def kv_bytes_per_token(self, dtype: torch.dtype) -> float:
        """Return the bytes of the key-value cache per token of one row, over all layers."""
        return kv_bytes_per_token(self.config, dtype.itemsize)

    @property
    def head_weight(self) -> Tensor:
        """The weight of the head, (V, D); the embedding's if they are tied. A copy if rows are replaced."""
        return self._head_table.table

    @property
    def head_rows(self) -> ReplacementRows | None:
        """(ids, rows) that replace rows of the head's weight, or None."""
        return self._head_table.replaced_rows

    @property
    def _head_table(self) -> Embedding | Linear:
        """The module whose weight is the head's."""
        return self.embed if self.head is None else self.head

    @property
    def activation_dtype(self) -> torch.dtype:
        """The dtype of the residual stream, which the embedding sets."""
        return self.embed.output_dtype or self.embed.weight.dtype

    # Parts of the forward

    def _embed(self, tokens_BT: Tensor, positions_BT: Tensor | None) -> Tensor:
        """Return scaled token embeddings plus learned position embeddings, if the model has them, (B, T, D)."""
        x_BTD = self.embed(tokens_BT)
        if (factor := self.config.embedding_multiplier) != 1.0:
            # The factor is rounded to the dtype of the activations first, as in Gemma's own code.
            x_BTD = x_BTD * torch.full((), factor, dtype=x_BTD.dtype, device=x_BTD.device)
        if self.position is not None:
            if positions_BT is None:
                positions_BT = torch.arange(tokens_BT.shape[1], device=tokens_BT.device)[None]
            x_BTD = x_BTD + self.position(positions_BT)
        return x_BTD

    @staticmethod
    def _split_embedding(x_BTD: Tensor) -> tuple[Tensor, Tensor]:
        """Return the first block's (residual, delta): half of the embedding each.

        Halving is exact in floating point. It gives every block two tensors that require gradients; with a delta of
        None or zeros, torch.compile would compile the first block separately.
        """
        return x_BTD * 0.5, x_BTD * 0.5

    def _rotations(self, tokens: int, positions_BT: Tensor | None) -> dict[str | None, Rotation | None]:
        """Return the rotations of all layers, by `Attention.rope`."""
        rotations: dict[str | None, Rotation | None] = {}
        for layer in self.layers:
            assert isinstance(layer, Block)
            if layer.attn.rope not in rotations:
                rotations[layer.attn.rope] = self._rotation(layer.attn.rope, tokens, positions_BT)
        return rotations

    def _rotation(self, rope: str | None, tokens: int, positions_BT: Tensor | None) -> Rotation | None:
        """Return cos and sin of the positions, (B or 1, T, 1, c) each, or None without RoPE."""
        tables = self.rope_tables(rope)
        if tables is None:
            return None
        cos, sin = (table[:tokens][None] if positions_BT is None else table[positions_BT] for table in tables)
        return cos[:, :, None], sin[:, :, None]

    def _contexts(
        self, context: AttentionContext, batch: int, tokens: int, x: Tensor
    ) -> dict[int | None, AttentionContext]:
        """Return one prepared context for each distinct attention window of the layers."""
        contexts: dict[int | None, AttentionContext] = {}
        for layer in self.layers:
            assert isinstance(layer, Block)
            window = layer.attn.window
            if window not in contexts:
                need = Requirements.of_model(
                    self.config,
                    batch,
                    tokens,
                    x.dtype,
                    x.device,
                    window=window,
                    documents=context.cu_seqlens is not None,
                    causal=context.causal,
                    shared_rows=context.ranks is not None,
                )
                contexts[window] = prepare(layer.attn.context(context), need)
        return contexts

    def _check_length(self, tokens: int) -> None:
        longest = self.config.max_position_embeddings
        if tokens > longest:
            raise UsageError(
                f"max_position_embeddings: {tokens} tokens do not fit into {longest} positions; use shorter sequences"
            )


def _router_statistics(statistics: list[Tensor], tokens_BT: Tensor) -> RouterStatistics | None:
    return RouterStatistics(torch.stack(statistics), tokens_BT.numel()) if statistics else None


def _prefill_context(x: Tensor, config: ModelConfig) -> AttentionContext:
    """Return the context of a prefill from position 0. Causal attention hides the padding on the right."""
    if config.attn_logit_softcapping is not None or config.attention_sinks:
        return AttentionContext()  # FlexAttention would be compiled for every length
    flash = x.is_cuda and x.dtype in (torch.bfloat16, torch.float16)
    full = "unplanned" if x.is_cuda else "sdpa"
    return AttentionContext(backend=full, window_backend="flash" if flash else "chunked")


def _param_group(name: str) -> str:
    """Return the group of `num_params` for a logical name."""
    if "norm" in name:
        return "norm"
    first = name.split(".")[0]
    if first == "layers":
        return "attention" if ".attn." in name else "mlp"
    return {"embed": "embedding", "position": "position", "lm_head": "head"}[first]
