"""Parameters and FLOPs agree with budget/ and with torch."""

from typing import Any

import pytest
import torch

from deskside.budget.shape import flops_per_token, kv_bytes_per_token, parameter_groups
from tests.model.tiny import LEARNED, MOE, WINDOWS, make, tokens

ACCOUNTED = [
    {},
    {"tie_word_embeddings": True},
    {
        "norm": "layernorm",
        "norm_bias": True,
        "mlp_bias": True,
        "attention_bias": True,
        "qk_norm": False,
        **LEARNED,
    },
    {"gated_mlp": False, "mlp_bias": True, "fused_qkv": False},
    MOE,
    {**MOE, "gated_mlp": False},
    WINDOWS,
]


@pytest.mark.parametrize("changes", ACCOUNTED)
def test_accounting_agrees_with_budget(changes: dict[str, Any]) -> None:
    model = make(**changes)
    groups = model.num_params()
    assert groups == parameter_groups(model.config)
    assert sum(groups.values()) == sum(p.numel() for p in model.parameters())
    cache = model.new_cache(3, 10)
    stored = cache.k.nbytes + cache.v.nbytes
    assert model.kv_bytes_per_token(torch.float32) == kv_bytes_per_token(model.config, 4) == stored / 30


@pytest.mark.parametrize("changes", [{}, {"tie_word_embeddings": True}, {"gated_mlp": False}])
def test_flops_agree_with_torchs_counter(changes: dict[str, Any]) -> None:
    """torch counts every product. The reference attention computes the full
    square, of which we count the causal half.
    """
    from torch.utils.flop_counter import FlopCounterMode

    model, T = make(**changes), 32
    with FlopCounterMode(display=False) as counter:
        model(tokens(1, T)).sum().backward()
    attention_half = 2 * 12 * 4 * 8 * T / 2
    expected = (flops_per_token(model.config, T) + attention_half) * T
    assert abs(counter.get_total_flops() - expected) <= 0.01 * expected
