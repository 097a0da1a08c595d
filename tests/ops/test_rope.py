"""The rotary table is bitwise equal to transformers', up to 16,384 positions, with and without scaling."""

from typing import Any

import pytest
import torch
from transformers import Phi3Config, Qwen3Config
from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from deskside.config.rope import RopeScaling
from deskside.ops.rope import rope_table

TO_16K = {"factor": 8.0, "original_max_position_embeddings": 2048}


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192}


@pytest.mark.parametrize(
    ("theta", "head_dim", "scaling"),
    [
        (1e4, 64, None),
        (5e5, 128, None),
        (1e4, 64, TO_16K),
        (5e5, 128, TO_16K),
        (1e6, 128, {"factor": 4.0, "original_max_position_embeddings": 32768}),  # as Qwen3 publishes it
        (5e5, 128, {**TO_16K, "attention_factor": 1.25}),
        (5e5, 128, {**TO_16K, "mscale": 1.0, "mscale_all_dim": 0.5}),
        (5e5, 128, {**TO_16K, "mscale": 0.7}),  # has no effect without the other one
        (5e5, 128, {**TO_16K, "beta_fast": 16.0, "beta_slow": 2.0, "truncate": False}),
        (5e5, 16, {"factor": 1.0, "original_max_position_embeddings": 2048}),
        (1e4, 8, {"factor": 8.0, "original_max_position_embeddings": 8}),
        (1e4, 8, {"factor": 8.0, "original_max_position_embeddings": 8, "beta_fast": 1.0}),  # an empty range
        (1e4, 128, {"rope_type": "linear", "factor": 4.0}),
        (5e5, 128, {**LLAMA3, "low_freq_factor": 1.0, "high_freq_factor": 4.0}),  # Llama 3.1
        (5e5, 64, {**LLAMA3, "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}),  # Llama 3.2
        (1e4, 64, {**LLAMA3, "low_freq_factor": 0.5, "high_freq_factor": 30.0}),
    ],
)
def test_equals_transformers(theta: float, head_dim: int, scaling: dict[str, Any] | None) -> None:
    positions = 16384
    kind = {"rope_type": "yarn" if scaling else "default"}
    config = Qwen3Config(
        hidden_size=4 * head_dim,
        head_dim=head_dim,
        max_position_embeddings=positions,
        rope_parameters={**kind, "rope_theta": theta, **(scaling or {})},
    )
    theirs = Qwen3RotaryEmbedding(config)(torch.zeros(1), torch.arange(positions)[None])
    ours = RopeScaling.model_validate(scaling) if scaling else None
    tables = rope_table(positions, head_dim, theta, torch.device("cpu"), ours)
    for table, their_table in zip(tables, theirs, strict=True):
        assert torch.equal(table, their_table[0, :, : head_dim // 2])


@pytest.mark.parametrize("attention_factor", [None, 1.5])
@pytest.mark.parametrize("positions", [64, 512])
def test_longrope_has_the_factors_of_its_length(positions: int, attention_factor: float | None) -> None:
    """Configured like Phi-4-mini: three quarters of the channels rotate."""
    generator = torch.Generator().manual_seed(0)
    factors = {
        name: (1 + torch.rand(12, generator=generator) * top).tolist()
        for name, top in (("short_factor", 1), ("long_factor", 40))
    }
    scaling = {"rope_type": "longrope", "factor": 8.0, "original_max_position_embeddings": 64, **factors}
    if attention_factor is not None:
        scaling["attention_factor"] = attention_factor
    config = Phi3Config(
        hidden_size=128,
        num_attention_heads=4,
        max_position_embeddings=512,
        original_max_position_embeddings=64,
        rope_parameters={"rope_theta": 1e4, "partial_rotary_factor": 0.75, **scaling},
        pad_token_id=0,
    )
    theirs = Phi3RotaryEmbedding(config)(torch.zeros(1), torch.arange(positions)[None])
    ours = rope_table(positions, 24, 1e4, torch.device("cpu"), RopeScaling.model_validate(scaling))
    for table, their_table in zip(ours, theirs, strict=True):
        torch.testing.assert_close(table, their_table[0, :, :12], rtol=0, atol=0)
