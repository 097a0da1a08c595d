"""Sizes of a model and of an optimizer step: the variables of the formulas for memory and time."""

from functools import lru_cache

from deskside.budget.shape import (
    Shape,
    attention_matrix_params,
    block_matrix_params,
    mlp_matrix_params,
    mlp_width_per_token,
    num_params,
    root_params,
)
from deskside.budget.step_spec import StepSpec
from deskside.budget.terms import leaf


class Sizes:
    """Sizes of one step of a model on one GPU.

    Attributes:
        queries, keys: Channels of all query heads, and of all key (or value) heads.
        mlp_width: Intermediate size of a layer's MLP. In a mixture of experts, the sum over the experts of one token,
            the shared one included.
        root_weights: Weights outside the blocks: embedding, positions, head.
        shards: GPUs that share one copy of the weights; 1 if every GPU holds all of them.
        traced: True if the sizes are `Term`s, so that results carry their formulas.
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
        self.mlp_weights = size("MLP weights of a layer that a token is multiplied with", mlp)
        self.tokens = size("tokens of a step on one GPU", spec.tokens // spec.gpus)
        self.pass_tokens = size("tokens per pass", spec.micro_tokens)
        self.chunk_tokens = size("tokens of a loss chunk", min(spec.loss_chunk_tokens, spec.micro_tokens))
        self.passes = size("passes", spec.accumulation)
        self.gpus = size("GPUs", spec.gpus)
        self.shards = size("shards", spec.gpus if spec.sharded else 1)

    def leaf(self, name: str, value: float) -> float:
        """Return `value`, as a `Term` with this name if the sizes are traced."""
        return leaf(name, value) if self.traced else value

    @property
    def vectors(self) -> float:
        """Number of norm weights and biases."""
        return self.parameters - self.block_weights - self.root_weights


@lru_cache(maxsize=512)  # the planner evaluates hundreds of settings for one shape
def _counts(shape: Shape) -> tuple[int, int, int, int, int, int]:
    return (
        mlp_width_per_token(shape),
        num_params(shape),
        block_matrix_params(shape),
        root_params(shape),
        attention_matrix_params(shape),
        mlp_matrix_params(shape, shape.num_experts_per_tok),
    )
