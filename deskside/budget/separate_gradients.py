"""GPU memory of gradients that wait in host memory, or that are released into the optimizer during the backward.

Of the gradients of matrices and tables, these exist on the GPU at the same time:

- those of the sublayer whose backward has just ended, in the weights' format;
- those that a side stream still copies or updates, at most WAITING (`optim/side_stream.py`), if it is used;
- the buffers through which sums travel between host and GPU, if gradients are in host memory;
- during the update from host memory, the gradient that is used and the next one.

Muon updates the matrices of one weight at a time. A test compares WAITING with the constant of the optimizer.
"""

from deskside.budget.sizes import Sizes
from deskside.budget.states import BUFFERS, PIECE
from deskside.budget.step_spec import QUANTIZED_STATES, StepSpec

WAITING = 2  # gradients whose work on the side stream has not finished
# Bytes per weight of Muon's stack, at most: bfloat16 direction, two float16 iterates, and four matrices on the shorter
# side, if it is almost as long as the other.
STACK_BYTES = 14
STACK_WEIGHTS = 2**26  # weights that Muon updates at a time, unless a matrix, of all experts, is larger


def has_side_stream(spec: StepSpec) -> bool:
    """Return True if gradients are handled during the backward."""
    return spec.gradients == "host" or (spec.gradients == "released" and spec.offload_optimizer)


def has_float32_directions(spec: StepSpec) -> bool:
    """Return True if Muon's directions are in float32: of streamed momentum, unless it has 8 bits."""
    return spec.offload_optimizer and spec.states not in QUANTIZED_STATES


def gradients_in_backward(s: Sizes) -> float:
    """Return the bytes of gradients on the GPU at a time, in a block's backward."""
    spec = s.spec
    per_weight: float = spec.weight_bytes
    live = per_weight * sublayer_weights(s)
    if has_side_stream(spec):
        live += WAITING * per_weight * largest_tensor(s)
    if spec.gradients == "host":
        live += sum_buffers(s)
    return live


def gradients_in_update(s: Sizes) -> float:
    """Return the bytes of gradients on the GPU while the optimizer runs after the backward."""
    if s.spec.gradients == "released":
        return 0.0
    return 2 * s.spec.weight_bytes * max(largest_tensor(s), s.vocabulary * s.hidden) + sum_buffers(s)


def update_in_backward(s: Sizes) -> float:
    """Return the bytes of Muon's work on a released matrix, during the backward or between two blocks."""
    if s.spec.gradients != "released" or s.spec.optimizer != "muon":
        return 0.0
    return muon_bytes(s)


def muon_bytes(s: Sizes) -> float:
    """Return the bytes that Muon's work on one weight takes, if it updates one weight at a time."""
    tensor = largest_tensor(s)
    direction = 4 * tensor if has_float32_directions(s.spec) else 0.0
    stack = _first(s)
    if stack > STACK_WEIGHTS and s.shape.gated_mlp:  # then gate and up have a stack each
        stack /= 2
    return STACK_BYTES * s.leaf("weights of Muon's stack", max(stack, _attention(s) / 2)) + direction


def sum_buffers(s: Sizes) -> float:
    """Return the bytes of the buffers through which the sums of gradients travel."""
    largest = max(largest_tensor(s), s.vocabulary * s.hidden)
    return BUFFERS * s.spec.weight_bytes * s.leaf("weights of a streaming buffer", min(PIECE, largest))


def sublayer_weights(s: Sizes) -> float:
    """Return the weights of the largest sublayer of a block, all experts included."""
    mlp = (1.5 if s.shape.gated_mlp else 2) * _first(s)
    return s.leaf("weights of a layer's largest sublayer", max(_attention(s), mlp))


def largest_tensor(s: Sizes) -> float:
    """Return the weights of the largest tensor of a block."""
    return s.leaf("weights of a block's largest tensor", max(_attention(s) / 2, _first(s)))


def _first(s: Sizes) -> float:
    """Return the weights of the MLP's first product, of all experts."""
    shape = s.shape
    width = shape.num_experts * shape.moe_intermediate_size if shape.num_experts else shape.intermediate_size
    return float((2 if shape.gated_mlp else 1) * width * shape.hidden_size)


def _attention(s: Sizes) -> float:
    shape = s.shape
    return float(
        2 * shape.hidden_size * shape.head_dim * (shape.num_attention_heads + shape.num_key_value_heads)
    )
