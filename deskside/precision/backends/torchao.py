"""Linear layers computed by torchao's FP8 layers (github.com/pytorch/ao, torchao.float8; written for 0.18).

torchao converts only nn.Linear, and our `Linear` is another class. So each of our layers gets an nn.Linear without
storage, converted by `convert_to_float8_training`, which is called with the weight of our layer. Nothing is copied or
registered twice, and a weight that sharding replaces later is still found. torch.compile removes the overhead of these
calls. Without it this backend is slow, because every scale and every cast launches several kernels.

torchao's recipes differ from ours of the same name in two details. The scales of fp8-rowwise are rounded down to powers
of two. In a model that computes in BF16, the product for a weight gradient returns BF16, where ours returns float32.
"""

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from deskside.config.recipes import Recipe
from deskside.ops.linear import Linear
from deskside.precision.backends.library import import_failed, with_weight_of

RECIPES = {"fp8-tensorwise": "tensorwise", "fp8-rowwise": "rowwise"}


class Torchao:
    """torchao's implementation of a recipe, emulated on a CPU. Raises UsageError if torchao is missing."""

    def __init__(self, recipe: Recipe, device: torch.device):
        try:
            self._float8: Any = import_module("torchao.float8")
        except ImportError as error:
            raise import_failed("torchao", "torchao", error) from None
        config = self._float8.Float8LinearConfig.from_recipe_name(RECIPES[recipe.name])
        # On a CPU, torch's scaled product is a slow loop.
        self._config = replace(config, emulate=device.type != "cuda")

    def forward_override(self, linear: Linear) -> Callable[[Tensor], Tensor]:
        layer = nn.Linear(linear.in_features, linear.out_features, bias=False, device="meta")
        return with_weight_of(linear, self._float8.convert_to_float8_training(layer, config=self._config))

    def forward_context(self) -> AbstractContextManager[None]:
        return contextlib.nullcontext()  # torchao has no state that spans layers
