"""The sizes of a model and of an optimizer step in which the formulas of memory and time are written."""

from deskside.budget.shape import (
    Shape,
    active_mlp_width,
    attention_matrix,
    block_matrices,
    mlp_matrix,
    num_params,
    root_params,
)
from deskside.budget.step_spec import StepSpec
from deskside.budget.terms import leaf

NAMES = {
    "hidden": "hidden size",
    "vocabulary": "vocabulary",
    "layers": "layers",
    "heads": "heads",
    "kv_heads": "key-value heads",
    "head_dim": "head_dim",
    "queries": "query channels",
    "keys": "key channels",
    "mlp_width": "MLP width",
    "parameters": "parameters",
    "block_weights": "weights of the blocks",
    "root_weights": "weights of embedding and head",
    "attention_weights": "attention weights of a layer",
    "mlp_weights": "MLP weights of a layer that a token meets",
    "tokens": "tokens of a step on one GPU",
    "pass_tokens": "tokens per pass",
    "chunk_tokens": "tokens of a loss chunk",
    "passes": "passes",
    "gpus": "GPUs",
    "shards": "shards",
}


class Sizes:
    """Sizes of one step of a model on one GPU.

    Attributes:
        queries, keys: Channels of all query heads, and of all key (or value) heads.
        mlp_width: Width of a layer's MLP that a token meets. In a mixture of experts, of all its chosen experts.
        root_weights: Weights in no block: embedding, positions, head.
        shards: GPUs that share one copy of the weights; 1 where every GPU holds them all.
        traced: Whether the sizes are `Term`s, so that results carry their formulas.
    """

    def __init__(self, shape: Shape, spec: StepSpec, traced: bool = False):
        self.shape, self.spec, self.traced = shape, spec, traced
        self.hidden: float = shape.hidden_size
        self.vocabulary: float = shape.vocab_size
        self.layers: float = shape.num_hidden_layers
        self.heads: float = shape.num_attention_heads
        self.kv_heads: float = shape.num_key_value_heads
        self.head_dim: float = shape.head_dim
        self.queries: float = shape.num_attention_heads * shape.head_dim
        self.keys: float = shape.num_key_value_heads * shape.head_dim
        self.mlp_width: float = active_mlp_width(shape)
        self.parameters: float = num_params(shape)
        self.block_weights: float = block_matrices(shape)
        self.root_weights: float = root_params(shape)
        self.attention_weights: float = attention_matrix(shape)
        self.mlp_weights: float = mlp_matrix(shape, shape.num_experts_per_tok)
        self.tokens: float = spec.tokens // spec.gpus
        self.pass_tokens: float = spec.micro_tokens
        self.chunk_tokens: float = min(spec.loss_chunk_tokens, spec.micro_tokens)
        self.passes: float = spec.accumulation
        self.gpus: float = spec.gpus
        self.shards: float = spec.gpus if spec.sharded else 1
        if traced:
            for attribute, name in NAMES.items():
                setattr(self, attribute, leaf(name, getattr(self, attribute)))

    def leaf(self, name: str, value: float) -> float:
        """Return a number that no formula here computes, with a name if the sizes are traced."""
        return leaf(name, value) if self.traced else value

    @property
    def vectors(self) -> float:
        """Weights of norms and biases."""
        return self.parameters - self.block_weights - self.root_weights
