"""The planner's assumptions about a step's execution on a GPU equal training's
own, for every architecture and precision.
"""

from typing import Any

import pytest
import torch

from deskside.budget.format_costs import Precision
from deskside.config import merge
from deskside.config.dimensions import model_uncovered_reason
from deskside.model.transformer import Transformer
from deskside.plan.setting import setting_from_config
from deskside.precision.convert import why_not_fused
from deskside.train.prepare.setup import execution_mode

SHAPES: dict[str, dict[str, Any]] = {
    "the default": {},
    "GELU without a gate": {"hidden_act": "gelu", "gated_mlp": False},
    "no QK norm, windows": {"qk_norm": False, "window_pattern": "SL", "sliding_window": 512},
    "LayerNorm": {"norm": "layernorm"},
    "norms after": {"norm_position": "post"},
    "q, k and v apart": {"fused_qkv": False},
    "gate and up apart": {"fused_gate_up": False},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "heads of 96": {"head_dim": 96, "num_attention_heads": 8, "num_key_value_heads": 2},
}


@pytest.mark.parametrize("compile", ["auto", "off"])
@pytest.mark.parametrize("precision", ["bf16", "fp8"])
@pytest.mark.parametrize("shape", SHAPES)
def test_it_plans_what_training_does_on_a_card(shape: str, precision: Precision, compile: str) -> None:
    config = merge.build(
        [{"model": SHAPES[shape], "precision": {"name": precision}, "compute": {"compile": compile}}]
    )
    mode = execution_mode(config, precision, torch.device("cuda"))
    planned = setting_from_config(config, 1, precision)
    assert planned.compiled == (mode != "off")
    assert planned.copies == ("step" if mode == "fused" else "pass")


@pytest.mark.parametrize("shape", SHAPES)
def test_the_configuration_says_what_the_modules_say(shape: str) -> None:
    config = merge.build([{"model": SHAPES[shape]}])
    with torch.device("meta"):
        model = Transformer(config.model)
    reasons = [why_not_fused(sublayer) for block in model.layers for sublayer in (block.attn, block.mlp)]
    assert (model_uncovered_reason(config.model) is None) == (not any(reasons))
