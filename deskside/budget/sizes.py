"""The sizes of a model and of an optimizer step in which the formulas of memory and time are written."""

from functools import lru_cache

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
        mlp_width, parameters, blocks, root, attention, mlp = _counts(shape)
        size = self.leaf
        self.hidden = size("hidden size", shape.hidden_size)
        self.vocabulary = size("vocabulary", shape.vocab_size)
        self.layers = size("layers", shape.num_hidden_layers)
        self.heads = size("heads", shape.num_attention_heads)
        self.kv_heads = size("key-value heads", shape.num_key_value_heads)
        self.queries = size("query channels", shape.num_attention_heads * shape.head_dim)
        self.keys = size("key channels", shape.num_key_value_heads * shape.head_dim)
        self.mlp_width = size("MLP width", mlp_width)
        self.parameters = size("parameters", parameters)
        self.block_weights = size("weights of the blocks", blocks)
        self.root_weights = size("weights of embedding and head", root)
        self.attention_weights = size("attention weights of a layer", attention)
        self.mlp_weights = size("MLP weights of a layer that a token meets", mlp)
        self.tokens = size("tokens of a step on one GPU", spec.tokens // spec.gpus)
        self.pass_tokens = size("tokens per pass", spec.micro_tokens)
        self.chunk_tokens = size("tokens of a loss chunk", min(spec.loss_chunk_tokens, spec.micro_tokens))
        self.passes = size("passes", spec.accumulation)
        self.gpus = size("GPUs", spec.gpus)
        self.shards = size("shards", spec.gpus if spec.sharded else 1)

    def leaf(self, name: str, value: float) -> float:
        """Return a number that no formula here computes, with a name if the sizes are traced."""
        return leaf(name, value) if self.traced else value

    @property
    def vectors(self) -> float:
        """Weights of norms and biases."""
        return self.parameters - self.block_weights - self.root_weights


@lru_cache(maxsize=512)  # the planner prices one shape in hundreds of ways
def _counts(shape: Shape) -> tuple[int, int, int, int, int, int]:
    return (
        active_mlp_width(shape),
        num_params(shape),
        block_matrices(shape),
        root_params(shape),
        attention_matrix(shape),
        mlp_matrix(shape, shape.num_experts_per_tok),
    )
