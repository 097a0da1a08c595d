"""The rotary table equals transformers' to the last bit, up to 16,384 positions, with and without YaRN."""

from typing import Any

import pytest
import torch
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from deskside.config.model import YarnConfig
from deskside.ops.rope import rope_table

TO_16K = {"factor": 8.0, "original_max_position_embeddings": 2048}


@pytest.mark.parametrize(
    ("theta", "head_dim", "yarn"),
    [
        (1e4, 64, None),
        (5e5, 128, None),
        (1e4, 64, TO_16K),
        (5e5, 128, TO_16K),
        (1e6, 128, {"factor": 4.0, "original_max_position_embeddings": 32768}),  # as Qwen3 publishes it
        (5e5, 128, {**TO_16K, "attention_factor": 1.25}),
        (5e5, 128, {**TO_16K, "mscale": 1.0, "mscale_all_dim": 0.5}),
        (5e5, 128, {**TO_16K, "mscale": 0.7}),  # without the other it has no effect
        (5e5, 128, {**TO_16K, "beta_fast": 16.0, "beta_slow": 2.0, "truncate": False}),
        (5e5, 16, {"factor": 1.0, "original_max_position_embeddings": 2048}),
        (1e4, 8, {"factor": 8.0, "original_max_position_embeddings": 8}),
        (1e4, 8, {"factor": 8.0, "original_max_position_embeddings": 8, "beta_fast": 1.0}),  # an empty range
    ],
)
def test_equals_transformers(theta: float, head_dim: int, yarn: dict[str, Any] | None) -> None:
    positions = 16384
    parameters = {"rope_type": "yarn" if yarn else "default", "rope_theta": theta, **(yarn or {})}
    config = Qwen3Config(
        hidden_size=4 * head_dim,
        head_dim=head_dim,
        max_position_embeddings=positions,
        rope_parameters=parameters,
    )
    theirs = Qwen3RotaryEmbedding(config)(torch.zeros(1), torch.arange(positions)[None])
    ours = rope_table(
        positions, head_dim, theta, torch.device("cpu"), YarnConfig.model_validate(yarn) if yarn else None
    )
    for table, their_table in zip(ours, theirs, strict=True):
        assert torch.equal(table, their_table[0, :, : head_dim // 2])
