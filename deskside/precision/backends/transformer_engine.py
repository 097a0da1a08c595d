"""transformer-engine's layers on our linear layers (github.com/NVIDIA/TransformerEngine; written against 2.20.2).

Each of our layers gets a `te.Linear` without storage, to which it lends its weight at every call, so nothing is copied
and a weight that sharding has replaced is seen. Under torch.autocast te.Linear takes a float32 weight with BF16
activations and quantises the float32 numbers themselves.

Delayed scaling is why there are regions. transformer-engine moves the largest magnitudes of a pass into its histories
when the outermost `te.autocast` is left, and those of the gradients after the backward of the first layer called in it.
With one region per layer every layer would move the histories of all; so `region` is entered once around a forward
pass. A layer called outside of one opens its own: right for the recipes without history, and for a model of one layer.

The histories are not part of our checkpoints (te.Linear only hands them out pickled): a resumed run fills them in the
steps that settle its micro-batch, before the first real one.
"""

import contextlib
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from deskside.config.recipes import Recipe
from deskside.ops.linear import Linear
from deskside.precision.backends import lent, missing
from deskside.utils.errors import UsageError

NAME = "transformer-engine"
NVFP4_MULTIPLE = 32  # what its NVFP4 products sum over, in both sizes of a weight


# The counterparts of our recipes, from transformer_engine.common.recipe.
RECIPES: dict[str, Callable[[Any, Recipe], Any]] = {
    "fp8-delayed": lambda recipes, recipe: recipes.DelayedScaling(
        fp8_format=recipes.Format.HYBRID, amax_history_len=recipe.amax_history, amax_compute_algo="max"
    ),
    "fp8-tensorwise": lambda recipes, recipe: recipes.Float8CurrentScaling(
        fp8_format=recipes.Format.HYBRID, use_power_2_scales=False
    ),
    # Said explicitly, for the defaults come from the environment and a recipe's name must mean one thing.
    "nvfp4": lambda recipes, recipe: recipes.NVFP4BlockScaling(
        disable_rht=False, disable_stochastic_rounding=False, disable_2d_quantization=False
    ),
}


class TransformerEngine:
    """Raises UsageError when the package is missing or refuses this card."""

    def __init__(self, recipe: Recipe, device: torch.device):
        try:
            self._te: Any = import_module("transformer_engine.pytorch")
            recipes = import_module("transformer_engine.common.recipe")
        except (ImportError, OSError, RuntimeError, AssertionError) as error:  # what its own checks raise
            raise missing(NAME, NAME, error) from None
        if device.type != "cuda":
            raise UsageError(f"precision.backend: {NAME} needs an NVIDIA GPU; use backend deskside")
        self._fp4 = recipe.name == "nvfp4"
        ask = self._te.is_nvfp4_available if self._fp4 else self._te.is_fp8_available
        available, reason = ask(return_reason=True)
        if not available:
            raise UsageError(
                f"precision.backend: {NAME} cannot run {recipe.name} on this card ({reason}); use backend deskside"
            )
        self._recipe = RECIPES[recipe.name](recipes, recipe)
        self._inside = False

    def execution(self, linear: Linear) -> Callable[[Tensor], Tensor]:
        sizes = {"in": linear.in_features, "out": linear.out_features}
        for side, size in sizes.items():
            if self._fp4 and size % NVFP4_MULTIPLE:
                raise UsageError(
                    f"precision.backend: {NAME} needs {side}put features divisible by {NVFP4_MULTIPLE} for nvfp4, and "
                    f"{' and '.join(s.name for s in linear.slices)} has {size}; change the model's sizes, or use "
                    f"backend deskside"
                )
        layer = self._te.Linear(
            linear.in_features, linear.out_features, bias=False, params_dtype=torch.float32, device="meta"
        )
        product = lent(linear, layer)

        def call(x: Tensor) -> Tensor:
            with self.region(), torch.autocast(x.device.type, dtype=x.dtype):
                return product(x)

        return call

    @contextlib.contextmanager
    def region(self) -> Iterator[None]:
        """One forward pass. Inside of another region it does nothing."""
        if self._inside:
            yield
            return
        self._inside = True
        try:
            with self._te.autocast(enabled=True, recipe=self._recipe):
                yield
        finally:
            self._inside = False
