"""Linear layers computed by transformer-engine's (github.com/NVIDIA/TransformerEngine; written for 2.20.2).

Each of our layers gets a `te.Linear` without storage, which is called with the weight of our layer. So nothing is
copied, and a weight that sharding replaces later is still found. Under torch.autocast, te.Linear accepts a float32
weight with BF16 activations and quantizes the float32 numbers.

`forward_context` exists because of delayed scaling. When the outermost `te.autocast` ends, transformer-engine moves the
largest magnitudes of a forward pass into its histories. It moves those of the gradients after the backward of the first
layer that was called in this context. If each layer had its own context, every layer would move the histories of all
layers. So one context surrounds the whole forward pass. A layer that is called without one opens its own, which is
correct for recipes without a history and for a model with one layer.

The histories are not part of our checkpoints, because te.Linear exposes them only as pickles. A resumed run fills them
in the dry steps that determine its micro-batch size, before the first real step.
"""

import contextlib
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from deskside.config.recipes import Recipe
from deskside.ops.linear import Linear
from deskside.precision.backends.library import import_failed, with_weight_of
from deskside.utils.errors import UsageError

NAME = "transformer-engine"
NVFP4_MULTIPLE = 32  # must divide both sizes of a weight for transformer-engine's NVFP4 products


# The counterparts of our recipes, from transformer_engine.common.recipe.
RECIPES: dict[str, Callable[[Any, Recipe], Any]] = {
    "fp8-delayed": lambda recipes, recipe: recipes.DelayedScaling(
        fp8_format=recipes.Format.HYBRID, amax_history_len=recipe.amax_history, amax_compute_algo="max"
    ),
    "fp8-tensorwise": lambda recipes, recipe: recipes.Float8CurrentScaling(
        fp8_format=recipes.Format.HYBRID, use_power_2_scales=False
    ),
    # Set explicitly, because the defaults depend on environment variables.
    "nvfp4": lambda recipes, recipe: recipes.NVFP4BlockScaling(
        disable_rht=False, disable_stochastic_rounding=False, disable_2d_quantization=False
    ),
}


class TransformerEngine:
    """transformer-engine's implementation of a recipe. Raises UsageError if it is missing or cannot run here."""

    def __init__(self, recipe: Recipe, device: torch.device):
        try:
            self._te: Any = import_module("transformer_engine.pytorch")
            recipes = import_module("transformer_engine.common.recipe")
        except (
            ImportError,
            OSError,
            RuntimeError,
            AssertionError,
        ) as error:  # raised by the package's own checks
            raise import_failed(NAME, NAME, error) from None
        if device.type != "cuda":
            raise UsageError(f"precision.backend: {NAME} needs an NVIDIA GPU; use backend deskside")
        self._fp4 = recipe.name == "nvfp4"
        is_available = self._te.is_nvfp4_available if self._fp4 else self._te.is_fp8_available
        available, reason = is_available(return_reason=True)
        if not available:
            raise UsageError(
                f"precision.backend: {NAME} cannot run {recipe.name} on this GPU ({reason}); use backend deskside"
            )
        self._recipe = RECIPES[recipe.name](recipes, recipe)
        self._in_context = False

    def forward_override(self, linear: Linear) -> Callable[[Tensor], Tensor]:
        sizes = {"input": linear.in_features, "output": linear.out_features}
        for side, size in sizes.items():
            if self._fp4 and size % NVFP4_MULTIPLE:
                raise UsageError(
                    f"precision.backend: {NAME} needs {side} features divisible by {NVFP4_MULTIPLE} for nvfp4, and "
                    f"{' and '.join(s.name for s in linear.slices)} has {size}; change the model's sizes, or use "
                    f"backend deskside"
                )
        layer = self._te.Linear(
            linear.in_features, linear.out_features, bias=False, params_dtype=torch.float32, device="meta"
        )
        product = with_weight_of(linear, layer)

        def call(x: Tensor) -> Tensor:
            with self.forward_context(), torch.autocast(x.device.type, dtype=x.dtype):
                return product(x)

        return call

    @contextlib.contextmanager
    def forward_context(self) -> Iterator[None]:
        """Context manager around one forward pass. A nested one has no effect."""
        if self._in_context:
            yield
            return
        self._in_context = True
        try:
            with self._te.autocast(enabled=True, recipe=self._recipe):
                yield
        finally:
            self._in_context = False
