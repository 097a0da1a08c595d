"""Backends that compute the linear layers of a recipe with other libraries: torchao and transformer-engine.

A backend makes a `forward_override` for each quantized `ops.Linear`: x (N, in) -> (N, out), with the layer's own
float32 weight, which receives the gradient. The rest of the model runs its ordinary forward; only deskside's own
implementation has fused sublayers. A library is imported only when it is requested.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.func import functional_call

from deskside.config.recipes import Recipe
from deskside.ops.linear import Linear
from deskside.utils.errors import UsageError


class PrecisionBackend(Protocol):
    """A library's implementation of one recipe."""

    def forward_override(self, linear: Linear) -> Callable[[Tensor], Tensor]:
        """Return the `forward_override` of a layer. Raises UsageError for sizes that the library does not support."""
        ...

    def forward_context(self) -> AbstractContextManager[None]:
        """Context manager around one forward pass of the model, for libraries that track passes."""
        ...


def load(name: str, recipe: Recipe, device: torch.device) -> PrecisionBackend:
    """Return the backend "torchao" or "transformer-engine" for one of its recipes (`config.sections.BACKEND_RECIPES`).

    Raises UsageError if the package is missing or cannot run the recipe on this device.
    """
    if name == "torchao":
        from deskside.precision.backends.torchao import Torchao

        return Torchao(recipe, device)
    from deskside.precision.backends.transformer_engine import TransformerEngine

    return TransformerEngine(recipe, device)


def with_weight_of(linear: Linear, layer: nn.Module) -> Callable[[Tensor], Tensor]:
    """Return a function x (N, in) -> (N, out) that calls a library's layer with the weight of `linear`.

    layer: has no separate weight storage. The result is a function, because a module would register its parameters in
    `linear`.
    """

    def call(x: Tensor) -> Tensor:
        output: Tensor = functional_call(layer, {"weight": linear.weight}, (x,))
        return output

    return call


def not_in_checkpoints(name: str, recipe: Recipe) -> str | None:
    """Return which state a bit-exact resume would need that the library `name` does not expose, or None."""
    if name != "transformer-engine":
        return None  # torchao's recipes have neither history nor random numbers
    if any(o.rounding == "stochastic" for p in recipe.products for o in (p.left, p.right)):
        return "the state of its random numbers"
    delayed = any(o.scaling == "delayed" for p in recipe.products for o in (p.left, p.right))
    return "the history of its scales" if delayed else None


def import_failed(backend: str, extra: str, error: Exception) -> UsageError:
    """Return the error for a package that cannot be imported. extra: the optional dependency that installs it."""
    first_sentence = str(error).split(". ")[0].split("\n")[0] or type(error).__name__
    return UsageError(
        f"precision.backend: {backend} cannot be imported ({first_sentence}); "
        f"install it with: pip install 'deskside[{extra}]', or use backend deskside"
    )
