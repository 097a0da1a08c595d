"""Memory traffic of the activations, in bytes.

The reads and writes of element-wise work were counted by hand, as elements of the activations' dtype (`TrafficUnits`):
those of the blocks as torch compiles them, and those of the fused sublayers and of the loss kernel of 2026-11-21, which
read and write each tensor once.

In a mixture of experts, rows are gathered by expert and summed by token. With k experts per token, `dispatch` reads
and writes k rows for the forward, for the gradient of the output and for the weight gradient, and k more if the
sublayer is recomputed; `combine` reads k rows and writes one, and in the backward reads one more: 8 k + 3 per token,
layer and hidden channel, and 2 k for recomputation.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from deskside.budget.operators.operator import Operator
from deskside.budget.sizes import Sizes
from deskside.budget.step_spec import StepSpec


@dataclass(frozen=True)
class TrafficUnits:
    """Elements that element-wise work reads and writes, forward and backward together.

    Attributes:
        norm: Norms and residuals, per token, layer and hidden channel.
        gated, plain: Activation of an MLP with and without a gate, per token, layer and MLP channel.
        rope: QK-norm and RoPE, per token, layer and channel of queries and keys.
        rope_keys: What these move in addition per channel of keys.
        loss: Logits and their gradient, per token and vocabulary entry.
    """

    norm: float
    gated: float
    plain: float
    rope: float
    rope_keys: float
    loss: float


# Of the 22 elements of norms and residuals, 8 are moved in the forward.
COMPILED_TRAFFIC = TrafficUnits(norm=22, gated=9, plain=4, rope=8, rope_keys=0, loss=6)
FUSED_TRAFFIC = TrafficUnits(norm=16, gated=8, plain=5, rope=5, rope_keys=2, loss=2)
# With an FP8 head, instead of 2: logits are read in 16 bits; their gradient is written in 8 bits, read and transposed.
FP8_HEAD_LOSS = 2.5
SECTOR_BYTES = 32  # smallest transfer of a GPU's memory


def traffic_units(spec: StepSpec) -> TrafficUnits:
    """Return the element-wise memory traffic of fused sublayers or of compiled blocks."""
    return FUSED_TRAFFIC if spec.fused else COMPILED_TRAFFIC


def loss_units(spec: StepSpec) -> float:
    """Return the elements that the loss reads and writes per token and vocabulary entry."""
    return FP8_HEAD_LOSS if spec.fused and spec.fp8_head else traffic_units(spec).loss


def expert_rows(s: Sizes, activation_bytes: float) -> Iterator[Operator]:
    """Yield the gathering of rows by expert and their sums by token, in a mixture of experts."""
    if not s.shape.num_experts:
        return
    k = s.leaf("experts per token", s.shape.num_experts_per_tok)
    row = s.tokens * s.layers * activation_bytes * s.hidden
    yield Operator("rows of experts", "traffic", (8 * k + 3) * row)
    if s.spec.activation_checkpointing in ("mlp", "block"):
        yield Operator("rows of experts", "traffic", 2 * k * row, recompute=True)


def later_targets(s: Sizes) -> Iterator[Operator]:
    """Yield the traffic of multi-token prediction: of each later target its number (8 bytes), its logit, and its part
    of the gradient, which is read and written. The logits and their sums are those of the next token."""
    if s.spec.future_targets:
        later = s.leaf("later targets of a token", s.spec.future_targets)
        yield Operator("later targets", "loss_traffic", (8 + 3 * SECTOR_BYTES) * s.tokens * later)


def dropout(s: Sizes, activation_bytes: float) -> Iterator[Operator]:
    """Yield the traffic of dropout, which reads and writes its tensor in the forward and in the backward."""
    if not s.spec.dropout:
        return
    tensor = s.tokens * activation_bytes * s.hidden
    yield Operator("dropout", "traffic", 4 * tensor * (2 * s.layers + 1))
    # A fused sublayer is recomputed up to its output only.
    recomputed = {"none": 0, "block": 2}.get(s.spec.activation_checkpointing, 1)
    if recomputed and not s.spec.fused:
        yield Operator("dropout", "traffic", 2 * recomputed * tensor * s.layers, recompute=True)
