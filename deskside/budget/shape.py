"""Parameters, FLOPs and KV cache of a model shape.

FLOPs per token follow one convention everywhere in this project: a forward and backward pass, two FLOPs per
multiply-add, the backward twice the forward. The count includes the matmuls of a token with weights (of a mixture of
experts only its chosen experts; the head, but not the embedding look-up), and attention over the positions that the
causal mask and the window admit. It excludes norms, activations and recomputation.

    6 x matmul parameters + sum over layers of 12 x heads x head_dim x T_avg
    T_avg: average positions that a token attends to: T / 2 for a sequence of T; with a window w < T, w - w^2 / (2 T)

A run with adapters over frozen weights needs less (`budget.adapters.training_flops_per_token`).

The 12 is two products (scores, values) x two FLOPs x three (the forward once, the backward twice). Some other projects
count the full square (T instead of T / 2), which raises the utilization they report.
"""

from typing import Protocol

from deskside.budget.terms import leaf


class Shape(Protocol):
    """The fields of a model's configuration that the formulas read, a subset of `config.model.ModelConfig`."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def num_hidden_layers(self) -> int: ...
    @property
    def num_attention_heads(self) -> int: ...
    @property
    def num_key_value_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def intermediate_size(self) -> int: ...
    @property
    def max_position_embeddings(self) -> int: ...
    @property
    def position_embedding(self) -> str: ...
    @property
    def gated_mlp(self) -> bool: ...
    @property
    def parallel_residual(self) -> bool: ...
    @property
    def mlp_bias(self) -> bool: ...
    @property
    def attention_bias(self) -> bool: ...
    @property
    def qkv_bias(self) -> bool: ...
    @property
    def norm(self) -> str: ...
    @property
    def norm_bias(self) -> bool: ...
    @property
    def norm_position(self) -> str: ...
    @property
    def qk_norm(self) -> bool: ...
    @property
    def qk_norm_over(self) -> str: ...
    @property
    def attention_sinks(self) -> bool: ...
    @property
    def tie_word_embeddings(self) -> bool: ...
    @property
    def num_experts(self) -> int: ...
    @property
    def num_experts_per_tok(self) -> int: ...
    @property
    def moe_intermediate_size(self) -> int: ...
    @property
    def scoring_func(self) -> str: ...
    @property
    def shared_expert_intermediate_size(self) -> int: ...
    def layer_window(self, layer: int) -> int | None: ...
    def __hash__(self) -> int: ...


def parameter_groups(shape: Shape) -> dict[str, int]:
    """Return the number of parameters by group.

    A tied head counts only as embedding. Router and experts belong to "mlp", biases to the group of their projection,
    and QK-norm to "norm".
    """
    D, layers = shape.hidden_size, shape.num_hidden_layers
    per_norm = D * (2 if shape.norm == "layernorm" and shape.norm_bias else 1)
    return {
        "embedding": shape.vocab_size * D,
        "position": shape.max_position_embeddings * D if shape.position_embedding == "learned" else 0,
        "attention": layers * (attention_matrix_params(shape) + _attention_biases(shape)),
        "mlp": layers * (mlp_matrix_params(shape, shape.num_experts) + _mlp_biases(shape)),
        "norm": (layers * block_norms(shape) + 1) * per_norm + layers * _qk_norm_params(shape),
        "head": 0 if shape.tie_word_embeddings else shape.vocab_size * D,
    }


def block_norms(shape: Shape) -> int:
    """Return the number of norms over the residual stream or a sublayer's output in a block."""
    return 4 if shape.norm_position == "sandwich" else 2


def num_params(shape: Shape) -> int:
    """Return the number of parameters."""
    return sum(parameter_groups(shape).values())


def root_params(shape: Shape) -> int:
    """Return the number of parameters in the root module: embedding, positions, head; not the final norm."""
    groups = parameter_groups(shape)
    return groups["embedding"] + groups["position"] + groups["head"]


def active_params(shape: Shape) -> int:
    """Return the number of parameters that one token uses: all, except experts that are not chosen."""
    idle = mlp_matrix_params(shape, shape.num_experts) - mlp_matrix_params(shape, shape.num_experts_per_tok)
    return num_params(shape) - (shape.num_hidden_layers * idle if shape.num_experts else 0)


def matmul_params(shape: Shape) -> int:
    """Return the number of weights that a token is multiplied with: block matrices (chosen experts, router) and head,
    tied or not."""
    block = attention_matrix_params(shape) + mlp_matrix_params(shape, shape.num_experts_per_tok)
    return shape.num_hidden_layers * block + shape.vocab_size * shape.hidden_size


def block_matrix_params(shape: Shape) -> int:
    """Return the number of weights in the matrices of the blocks, all experts included. Muon updates these."""
    return shape.num_hidden_layers * (
        attention_matrix_params(shape) + mlp_matrix_params(shape, shape.num_experts)
    )


def attention_span(sequence_length: int, window: int | None) -> float:
    """Return the average number of tokens that a token attends to (T / 2, an approximation of (T + 1) / 2)."""
    if window is None or window >= sequence_length:
        return sequence_length / 2
    return window - window**2 / (2 * sequence_length)


def flops_per_token(shape: Shape, sequence_length: int, traced: bool = False) -> float:
    """Return the FLOPs per token of forward and backward, by the convention of the module docstring.

    traced: return a `Term`, which carries the formula.
    """
    span = sum(attention_span(sequence_length, shape.layer_window(i)) for i in range(shape.num_hidden_layers))
    weights: float = matmul_params(shape)
    queries: float = shape.num_attention_heads * shape.head_dim
    if traced:
        weights = leaf("weights that a token is multiplied with", weights)
        queries = leaf("query channels", queries)
        span = leaf("tokens that a token sees, summed over the layers", span)
    return 6 * weights + 12 * queries * span


def kv_bytes_per_token(shape: Shape, bytes_per_element: float) -> float:
    """Return the bytes of one token in the KV cache, over all layers. Windows do not make it smaller."""
    per_layer = 2 * shape.num_key_value_heads * shape.head_dim
    return shape.num_hidden_layers * per_layer * bytes_per_element


def attention_matrix_params(shape: Shape) -> int:
    """Return the number of weights in the q, k, v and output projections of one layer."""
    q, kv = shape.num_attention_heads * shape.head_dim, shape.num_key_value_heads * shape.head_dim
    return shape.hidden_size * (2 * q + 2 * kv)


def _qk_norm_params(shape: Shape) -> int:
    if not shape.qk_norm:
        return 0
    if shape.qk_norm_over == "head":
        return 2 * shape.head_dim
    return (shape.num_attention_heads + shape.num_key_value_heads) * shape.head_dim


def _attention_biases(shape: Shape) -> int:
    q, kv = shape.num_attention_heads * shape.head_dim, shape.num_key_value_heads * shape.head_dim
    sinks = shape.num_attention_heads if shape.attention_sinks else 0
    if shape.attention_bias:
        return sinks + q + 2 * kv + shape.hidden_size
    return sinks + (q + 2 * kv if shape.qkv_bias else 0)


def mlp_matrix_params(shape: Shape, experts: int) -> int:
    """Return the number of weights in one layer's MLP.

    In a mixture of experts: the router, `experts` experts, and the shared expert with its gate.
    """
    matrices = 3 if shape.gated_mlp else 2
    if shape.num_experts:
        width = experts * shape.moe_intermediate_size + shape.shared_expert_intermediate_size
        has_gate = shape.shared_expert_intermediate_size > 0 and shape.scoring_func == "softmax"
        return shape.hidden_size * (shape.num_experts + matrices * width + has_gate)
    return matrices * shape.hidden_size * shape.intermediate_size


def mlp_width_per_token(shape: Shape) -> int:
    """Return the intermediate size of a layer's MLP, summed over a token's experts and the shared one in a mixture."""
    if shape.num_experts:
        return shape.num_experts_per_tok * shape.moe_intermediate_size + shape.shared_expert_intermediate_size
    return shape.intermediate_size


def _mlp_biases(shape: Shape) -> int:
    if shape.scoring_func == "sigmoid" and shape.num_experts:  # of the router, to balance the experts
        return shape.num_experts
    if not shape.mlp_bias:
        return 0
    inputs = 2 if shape.gated_mlp else 1
    if shape.num_experts:
        return shape.num_experts * (1 + inputs * shape.moe_intermediate_size + shape.hidden_size)
    return inputs * shape.intermediate_size + shape.hidden_size
