"""Bytes that replicas send each other in a step, and the memory of the gradients that are being summed.

Gradients are summed during the last backward of a step (`train/loop/gradient_buckets.py`). Muon's matrices are updated
by one GPU each, and their new weights are sent during the next forward (`optim/owners.py`). These transfers add to the
step only the time by which they outlast these passes, and the sum of the embedding's gradient, which the backward
computes last. If passes are CUDA graphs, nothing hides the transfers.

    bytes that a GPU sends per weight          float32              bfloat16
    sum on every GPU                           8 (n - 1) / n        4 (n - 1) / n
    sum on the owner                           4                    4 (n - 1) / n
    new weight                                 4 (2 if it is stored in bfloat16)

A ring all-reduce sends every weight 2 (n - 1) / n times. A reduce to one GPU or a broadcast from it sends every weight
once. The slowdown of a pass while gradients are sent was measured on two H200 (docs/log.md, 2026-11-28):
124m and 340m with AdamW, BF16 and FP8, took 2.0 to 3.2 % longer than on the slower card alone, beyond what is exposed.
With Muon it was -0.4 to 1.1 %, because the cards also share its update.
"""

from dataclasses import dataclass

from deskside.budget.host import replays_passes
from deskside.budget.shape import Shape, num_params
from deskside.budget.sizes import Sizes
from deskside.budget.step_spec import StepSpec

# Share by which the last pass is longer if float32 gradients of all weights were summed during it: the median of the
# four cases with AdamW, divided by the share of the weights that are summed during it.
CONTENTION = 0.032
SLOWEST_CARD = 0.012  # share by which the slower of two H200 was slower than their mean; all wait for it
BUCKET_WEIGHTS = 2**22  # gradients of at least this many weights are summed alone, in place; a test compares
# Buckets whose memory is in use at once, if gradients are sent in another format than their own.
IN_FLIGHT = 3


@dataclass(frozen=True)
class Exchange:
    """Bytes that one GPU sends in a step: during the last backward, with no overlap, and during the next forward."""

    in_backward: float = 0.0
    exposed: float = 0.0
    in_forward: float = 0.0


def update_shares(spec: StepSpec) -> int:
    """Return the number of GPUs that share Muon's update of whole matrices."""
    return 1 if spec.sharded or spec.optimizer != "muon" else spec.gpus


def exchange(s: Sizes, trained: float) -> Exchange:
    """Return what replicas send. trained: number of weights that are trained."""
    spec = s.spec
    if spec.gpus == 1 or spec.sharded:
        return Exchange()
    share, owned = (s.gpus - 1) / s.gpus, update_shares(spec) > 1
    per_weight = (4.0 if spec.gradient_dtype == "bfloat16" else 8.0) * share
    per_matrix_weight = 4.0 if owned and spec.gradient_dtype == "float32" else per_weight
    matrices: float = s.block_weights if owned else 0.0
    whole_embedding = spec.adapter is None or "embed_tokens" in spec.adapter.tables
    embedding: float = s.vocabulary * s.hidden if whole_embedding else 0.0
    in_backward = per_weight * (trained - matrices - embedding) + per_matrix_weight * matrices
    exposed: float = per_weight * embedding
    in_forward: float = spec.weight_bytes * matrices
    # Replicas that replay their passes sum gradients after them, and wait for new weights before them.
    replayed = replays_passes(spec)
    if spec.context > 1 or replayed:  # the backward of shared rows has its own transfers
        in_backward, exposed = 0.0, exposed + in_backward
    if replayed or (spec.compiled and not spec.fused):  # torch.compile's forward waits for no single layer
        in_forward, exposed = 0.0, exposed + in_forward
    return Exchange(in_backward, exposed, in_forward)


def contention(s: Sizes, sent: Exchange) -> float:
    """Return the share by which the last pass is longer because gradients are summed during it."""
    everything = 8.0 * (s.gpus - 1) / s.gpus * num_params(s.shape)
    return CONTENTION * sent.in_backward / everything


def bucket_bytes(s: Sizes, trained: float) -> float:
    """Return the bytes of gradients that exist a second time while they are summed."""
    spec = s.spec
    if spec.gpus == 1 or spec.sharded:
        return 0.0
    if keeps_gradients(spec):
        return 4 * s.leaf("weights whose gradients share buckets", shared_weights(s.shape, spec))
    largest: float = 2 * BUCKET_WEIGHTS  # a bucket is closed at the end of the sublayer that fills it
    if spec.gradient_dtype == "float32" and spec.weights == "float32":
        return 4 * s.leaf("weights of a gradient bucket", min(trained, largest))
    if spec.adapter is None or spec.adapter.tables:
        embedding = s.shape.vocab_size * s.shape.hidden_size
        largest = embedding + (IN_FLIGHT - 1) * max(largest, s.block_weights / s.layers)
    # A copy in float32, or what is sent and what is received in bfloat16.
    return 4 * s.leaf("weights of the gradient buckets on their way", min(trained, largest))


def keeps_gradients(spec: StepSpec) -> bool:
    """Return True if gradients that share buckets exist beside their sums until the update ends.

    Elsewhere, a bucket takes the place of its gradients, but a captured pass keeps them. Sums in bfloat16 are copied
    back to the gradients.
    """
    return spec.gpus > 1 and replays_passes(spec) and spec.gradient_dtype == "float32"


def shared_weights(shape: Shape, spec: StepSpec) -> int:
    """Return the number of weights whose gradients share buckets, of a model without experts.

    Matrices that one GPU updates and large gradients are summed alone, in place.
    """
    hidden, width = shape.hidden_size, shape.intermediate_size
    queries, keys = (
        heads * shape.head_dim for heads in (shape.num_attention_heads, shape.num_key_value_heads)
    )
    tables = [shape.vocab_size * hidden] * (1 if shape.tie_word_embeddings else 2)
    if shape.position_embedding == "learned":
        tables.append(shape.max_position_embeddings * hidden)
    attention = [hidden * (queries + 2 * keys), hidden * queries]
    mlp = [hidden * width * (2 if shape.gated_mlp else 1), hidden * width]
    smallest = 0 if update_shares(spec) > 1 else BUCKET_WEIGHTS
    alone = sum(weights for weights in tables if weights >= BUCKET_WEIGHTS)
    alone += shape.num_hidden_layers * sum(weights for weights in attention + mlp if weights >= smallest)
    return num_params(shape) - alone
