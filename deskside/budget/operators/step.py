"""Operators of one optimizer step on a GPU: products, attention and memory traffic, one entry each.

Nothing here depends on a device. The counts are those of this project's training step (fused projections, chunked loss)
on one GPU; `budget/speed.py` computes their time.
"""

from deskside.budget.format_costs import runs_as
from deskside.budget.operators.adapters import adapter_operators
from deskside.budget.operators.operator import Operator
from deskside.budget.operators.products import attention, products, unquantized_format
from deskside.budget.operators.quantization import quantized_values, quantizing, quantizing_experts
from deskside.budget.operators.traffic import (
    dropout,
    expert_rows,
    later_targets,
    loss_units,
    traffic_units,
)
from deskside.budget.operators.transfers import transfers
from deskside.budget.operators.update import optimizer_update, weight_average
from deskside.budget.operators.weights import chunk_sums, weight_casts
from deskside.budget.shape import Shape, block_norms
from deskside.budget.sizes import Sizes
from deskside.budget.step_spec import StepSpec

RECOMPUTED = 0.35  # share of a sublayer's element-wise traffic that belongs to its forward


def step_operators(shape: Shape, spec: StepSpec, traced: bool = False) -> list[Operator]:
    """Return all operators of one optimizer step on one GPU. Embedding look-ups are left out.

    traced: amounts are `Term`s, which carry their formulas.
    """
    s = Sizes(shape, spec, traced)
    activation_bytes = s.leaf("bytes of an activation", 4 if spec.precision == "fp32" else 2)
    units = traffic_units(spec)
    per_channel = s.tokens * s.layers * activation_bytes
    # A norm of a sublayer's output reads and writes one tensor, and in the backward two and one.
    output_norms = 5 * (block_norms(shape) - 2)
    norm = per_channel * s.hidden * (units.norm + output_norms)
    rope = per_channel * ((s.queries + s.keys) * units.rope + s.keys * units.rope_keys)
    activation = per_channel * s.mlp_width * (units.gated if shape.gated_mlp else units.plain)
    # FLOPs per weight and token: output, gradient of the input and, if it is trained, gradient of the weight.
    weight_flops = 6.0 if spec.adapter is None else 4.0
    inputs, output_gradients = quantized_values(s)
    has_experts = shape.num_experts > 0
    dense_traffic = norm / 2 + rope if has_experts else norm + rope + activation
    operators = [
        *products("attention projections", weight_flops * s.tokens * s.layers * s.attention_weights, s),
        *products("MLP", weight_flops * s.tokens * s.layers * s.mlp_weights, s, experts=has_experts),
        Operator(
            "head",
            "head",
            weight_flops * s.tokens * s.hidden * s.vocabulary,
            runs_as=runs_as("fp8", spec.native) if spec.fp8_head else unquantized_format(spec),
        ),
        *attention(12.0 * s.queries * s.tokens, s),
        Operator("norms and residuals", "traffic", norm),
        Operator("QK-norm and RoPE", "traffic", rope),
        Operator("activation", "traffic", activation),
        Operator("loss", "loss_traffic", s.tokens * s.vocabulary * activation_bytes * loss_units(spec)),
        *expert_rows(s, activation_bytes),
        *later_targets(s),
        *dropout(s, activation_bytes),
        *weight_casts(s),
        *adapter_operators(s, activation_bytes),
        Operator("layers", "layers", s.layers * s.passes),
        *quantizing(dense_traffic, inputs, output_gradients, s),
        *quantizing_experts(s),
    ]
    attention_again, mlp_again = s.attention_weights, s.mlp_weights
    if spec.fused:  # the backward does not need the output of a sublayer, and does not compute it again
        attention_again -= s.hidden * s.queries
        mlp_again -= s.hidden * s.mlp_width
    if spec.activation_checkpointing in ("attention", "block"):
        recomputed = RECOMPUTED * (rope + norm / 2)
        operators += [
            *products(
                "attention projections", 2.0 * s.tokens * s.layers * attention_again, s, recompute=True
            ),
            *attention(4.0 * s.queries * s.tokens, s, recompute=True),
            Operator("QK-norm and RoPE", "traffic", recomputed, recompute=True),
            *quantizing(recomputed, s.tokens * s.layers * (s.hidden + s.queries), 0.0, s, recompute=True),
        ]
    if spec.activation_checkpointing in ("mlp", "block"):
        recomputed = RECOMPUTED * (activation + norm / 2)
        operators += [
            *products("MLP", 2.0 * s.tokens * s.layers * mlp_again, s, recompute=True, experts=has_experts),
            *chunk_sums(s),
            Operator("activation", "traffic", recomputed, recompute=True),
        ]
        if has_experts:
            operators += quantizing_experts(s, recompute=True)
        else:
            values = s.tokens * s.layers * (s.hidden + s.mlp_width)
            operators += quantizing(recomputed, values, 0.0, s, recompute=True)
    return operators + optimizer_update(s) + weight_average(s) + transfers(s)
