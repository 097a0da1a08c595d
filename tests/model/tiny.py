"""Tiny models with weights at a scale where everything matters, for the tests of this folder."""

from typing import Any

import torch
from torch import Tensor

from deskside.config.model import ModelConfig
from deskside.model.init import InitOptions, initialize
from deskside.model.transformer import Transformer

TINY = {
    "vocab_size": 61,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
}
LEARNED = {"position_embedding": "learned"}
MOE = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
WINDOWS = {"num_hidden_layers": 3, "sliding_window": 4, "window_pattern": "SSL"}


def make(**changes: Any) -> Transformer:
    model = Transformer(ModelConfig(**{**TINY, **changes}))
    initialize(model, 0, InitOptions(embedding_std=0.5, head_std=0.3, output="fan_in"))
    return model


def tokens(B: int = 2, T: int = 17, seed: int = 0) -> Tensor:
    return torch.randint(0, TINY["vocab_size"], (B, T), generator=torch.Generator().manual_seed(seed))
