"""The fused kernels' coverage, as the planner derives it from a configuration."""

from typing import Any

import pytest

from deskside.config.dimensions import model_uncovered_reason, uncovered_reason
from deskside.config.model import ModelConfig


@pytest.mark.parametrize(
    ("shape", "covered"),
    [
        ({}, True),
        ({"hidden_act": "gelu", "gated_mlp": False}, True),
        ({"hidden_act": "gelu", "gated_mlp": False, "fused_gate_up": False}, True),
        ({"norm": "layernorm"}, False),
        ({"norm_position": "post"}, False),
        ({"norm_position": "sandwich", "attn_logit_softcapping": 50.0}, True),
        ({"norm_position": "output"}, False),
        ({"parallel_residual": True}, False),
        ({"qk_norm_over": "projection"}, False),
        ({"attention_sinks": True}, False),
        ({"hidden_act": "clamped_swiglu"}, False),
        ({"fused_qkv": False}, False),
        ({"fused_gate_up": False}, False),
        ({"attention_bias": True}, False),
        ({"mlp_bias": True}, False),
        ({"head_dim": 96}, False),
        ({"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 512}, True),
        ({"num_experts": 8, "fused_gate_up": True, "norm_position": "post"}, False),
    ],
)
def test_models(shape: dict[str, Any], covered: bool) -> None:
    assert (model_uncovered_reason(ModelConfig(**shape)) is None) is covered
    assert model_uncovered_reason(ModelConfig(**shape), adapters=True)


def test_the_reason_names_the_head_dim() -> None:
    assert "96" in (uncovered_reason(rmsnorm_first=True, num_projections=1, head_dim=96) or "")
