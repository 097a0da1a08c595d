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
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from deskside.config.recipes import Recipe
from deskside.ops.linear import Linear
from deskside.precision.backends import counterpart, missing
from deskside.utils.errors import UsageError

NAME = "transformer-engine"
NVFP4_MULTIPLE = 32  # what its NVFP4 products sum over, in both sizes of a weight


def _delayed(recipes: Any, recipe: Recipe) -> Any:
    return recipes.DelayedScaling(
        fp8_format=recipes.Format.HYBRID, amax_history_len=recipe.amax_history, amax_compute_algo="max"
    )


def _current(recipes: Any, recipe: Recipe) -> Any:
    return recipes.Float8CurrentScaling(fp8_format=recipes.Format.HYBRID, use_power_2_scales=False)


def _nvfp4(recipes: Any, recipe: Recipe) -> Any:
    # Said explicitly, for the defaults come from the environment and a recipe's name must mean one thing.
    return recipes.NVFP4BlockScaling(
        disable_rht=False, disable_stochastic_rounding=False, disable_2d_quantization=False
    )


RECIPES = {"fp8-delayed": _delayed, "fp8-tensorwise": _current, "nvfp4": _nvfp4}


class TransformerEngine:
    """Raises UsageError when the package is missing, has no counterpart of the recipe, or refuses this card."""

    def __init__(self, recipe: Recipe, device: torch.device):
        build = counterpart(NAME, RECIPES, recipe)
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
        self._recipe = build(recipes, recipe)
        self._inside = False

    def execution(self, linear: Linear) -> Callable[[Tensor], Tensor]:
        """See `Backend`."""
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
        return _Execution(self, linear, layer)

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


@dataclass(frozen=True, eq=False)
class _Execution:
    """Not a module, so that the layer that holds it shows no parameters but its own."""

    backend: TransformerEngine
    linear: Linear
    layer: nn.Module

    def __call__(self, x: Tensor) -> Tensor:
        """x (N, in) -> (N, out) in x's dtype."""
        with self.backend.region(), torch.autocast(x.device.type, dtype=x.dtype):
            output: Tensor = functional_call(self.layer, {"weight": self.linear.weight}, (x,))
        return output
