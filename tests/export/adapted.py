"""Small models with trained adapters, for the tests of this folder."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from deskside.config.model import ModelConfig
from deskside.config.sections import AdapterConfig
from deskside.model.init import InitOptions, initialize
from deskside.model.transformer import Transformer
from deskside.ops.moe import Experts
from deskside.weights import frozen_base

MOE: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
BIASED_MOE = {**MOE, "mlp_bias": True, "hidden_act": "clamped_swiglu"}
TINY: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 128,
    "max_position_embeddings": 64,
}


def weights_of(config: ModelConfig) -> dict[str, Tensor]:
    """Return every parameter. None is zero, and the matrices have values that 16 bits represent exactly."""
    model = Transformer(config)
    initialize(model, 3, InitOptions(output="fan_in", head_std=0.2, embedding_std=0.5))
    torch.manual_seed(1)
    found = {}
    for name, parameter in model.named_parameters():
        value = parameter.detach().clone()
        if value.ndim < 2:
            value += 0.1 * torch.randn_like(value)
        found[name] = value.bfloat16().float() if value.ndim >= 2 else value
    return found


def trained(
    adapter: dict[str, Any] | None = None, tokens: Sequence[int] = (), /, **shape: Any
) -> tuple[Transformer, AdapterConfig]:
    """Return an adapted model in which every trainable weight has changed. It computes in float32."""
    config, options = ModelConfig(**{**TINY, **shape}), AdapterConfig(rank=4, alpha=8, **(adapter or {}))
    model = frozen_base.build(config, options, 5, weights_of(config), "cpu", tokens)
    torch.manual_seed(2)
    for parameter in model.parameters():
        if parameter.requires_grad:
            nn.init.normal_(parameter, std=0.1)
    model.embed.output_dtype = torch.float32
    return model, options


def without_adapters(model: Transformer) -> Transformer:
    """Remove the adapters and return the model, which is then the frozen base alone."""
    for module in model.modules():
        if isinstance(module, Experts):
            module.adapters = nn.ModuleDict()
        elif getattr(module, "adapter", None) is not None:
            module.adapter = None
    return model
