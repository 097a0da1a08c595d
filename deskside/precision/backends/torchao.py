"""torchao's FP8 layers on our linear layers (github.com/pytorch/ao, torchao.float8; written against 0.18).

torchao converts an nn.Linear, which ours is not. So each of our layers gets an nn.Linear without storage, converted by
`convert_to_float8_training`, and lends it its weight at every call. Nothing is copied or registered twice, and a weight
that sharding has replaced is seen. The lending is plain Python, which torch.compile traces away. This backend needs
compiling to be fast: without it every scale and every cast launches several kernels.

The recipes of the same names differ in two places. torchao's scales of fp8-rowwise are rounded down to powers of two.
In a model that computes in BF16 its weight gradients leave the product in BF16, where ours are float32.
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
from deskside.precision.backends import lent, missing

RECIPES = {"fp8-tensorwise": "tensorwise", "fp8-rowwise": "rowwise"}


class Torchao:
    """Raises UsageError when torchao is missing. On a CPU it emulates."""

    def __init__(self, recipe: Recipe, device: torch.device):
        try:
            self._float8: Any = import_module("torchao.float8")
        except ImportError as error:
            raise missing("torchao", "torchao", error) from None
        config = self._float8.Float8LinearConfig.from_recipe_name(RECIPES[recipe.name])
        # torch's own scaled product is a plain loop on a CPU.
        self._config = replace(config, emulate=device.type != "cuda")

    def execution(self, linear: Linear) -> Callable[[Tensor], Tensor]:
        shape = nn.Linear(linear.in_features, linear.out_features, bias=False, device="meta")
        return lent(linear, self._float8.convert_to_float8_training(shape, config=self._config))

    def region(self) -> AbstractContextManager[None]:
        return contextlib.nullcontext()  # it keeps no state between passes
