"""Models small enough to compare every gradient, in float64 where they are compared exactly."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from deskside.config.model import ModelConfig
from deskside.config.recipes import Recipe, recipe_named
from deskside.kernels.attention import AttentionContext
from deskside.model.init import InitOptions, initialize
from deskside.model.transformer import Transformer
from deskside.precision.convert import QuantizedModel
from deskside.precision.fused_sublayers import FusedSublayer
from deskside.precision.quantized_linear import QuantizedLinear

# Widths are multiples of 128, for the recipes with a Hadamard transform of 128; so are the tokens of a pass.
SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 128,
    "max_position_embeddings": 64,
}
B, T = 4, 64
Gradients = dict[str, Tensor]


def plans_of(applied: QuantizedModel) -> list[QuantizedLinear]:
    """Return the plans of all linear layers but those of experts, in the recipe and in BF16."""
    sublayers = [plan for _, *plans in applied._sublayers for plan in plans]
    fused = [plan for one in sublayers if isinstance(one, FusedSublayer) for plan in (one.first, one.second)]
    return fused + [override.args[0] for _, override in applied._linears if isinstance(override, partial)]


def quantized_layers(applied: QuantizedModel) -> int:
    """Return the linear layers whose products have fewer than 16 bits."""
    return len(applied._linears) if applied.backend else sum(not plan.plain for plan in plans_of(applied))


def fresh(**changes: Any) -> Transformer:
    """Return a model with a run's initial weights: blocks add little to the
    stream, so the products' noise hardly grows.
    """
    model = Transformer(ModelConfig(**{**SIZES, **changes}))
    initialize(model, 0)
    return model


def make(dtype: torch.dtype = torch.float32, **changes: Any) -> Transformer:
    """Return a model with weights at a scale where everything matters."""
    model = Transformer(ModelConfig(**{**SIZES, **changes}))
    initialize(model, 0, InitOptions(embedding_std=0.5, head_std=0.3, output="fan_in"))
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:  # ones would hide a forgotten weight
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return model.to(dtype)


def tokens(seed: int = 0, rows: int = B) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, SIZES["vocab_size"], (rows, T), generator=generator)


def backward(
    model: Transformer, context: AttentionContext | None = None, passes: int = 1, **options: Any
) -> tuple[float, Gradients]:
    """Return the loss and the gradients of the mean loss of B rows, computed in `passes` micro-batches."""
    model.zero_grad()
    device = next(model.parameters()).device
    total = 0.0
    for x, y in zip(tokens().chunk(passes), tokens(1).chunk(passes), strict=True):
        loss = model.loss(x.to(device), y.to(device), context, **options) / (B * T)
        loss.backward()
        total += float(loss.detach())
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    assert len(found) == len(list(model.parameters()))
    return total, found


def worst(found: Mapping[str, Tensor], truth: Mapping[str, Tensor]) -> float:
    """Return the largest relative Frobenius error among the gradients."""
    assert found.keys() == truth.keys()
    return max(float((found[n].double() - t).norm() / t.norm()) for n, t in truth.items())


def error_and_slope(found: Mapping[str, Tensor], truth: Mapping[str, Tensor]) -> tuple[float, float]:
    """Treat all gradients as one vector: return its relative error, and the coefficient of the truth in it."""
    a, b = (torch.cat([g[n].double().flatten().cpu() for n in truth]) for g in (found, truth))
    return float((a - b).norm() / b.norm()), float(a @ b / (b @ b))


def everywhere(name: str) -> Recipe:
    """Return the recipe, applied to every block."""
    return replace(recipe_named(name), keep_first=0.0, keep_last=0.0)
