"""Other libraries behind the same recipe names: torchao and transformer-engine carry out a recipe's linear layers.

A backend makes a `forward_override` for each quantized `ops.Linear`: x (N, in) -> (N, out), with the layer's own
float32 weight, which receives the gradient. The rest of the model runs its ordinary forward; fused sublayers exist
for Deskside's own recipes only. Neither library is imported before it is requested.
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
    """A library that carries out one recipe."""

    def execution(self, linear: Linear) -> Callable[[Tensor], Tensor]:
        """Return the `forward_override` of a layer. Raises UsageError for sizes that the library does not support."""
        ...

    def region(self) -> AbstractContextManager[None]:
        """Context manager around one forward pass of the model, for libraries that track passes."""
        ...


def load(name: str, recipe: Recipe, device: torch.device) -> PrecisionBackend:
    """Return the backend "torchao" or "transformer-engine" for one of its recipes (`config.sections.BACKEND_RECIPES`).

    Raises UsageError where the package is missing or cannot run the recipe on this device.
    """
    if name == "torchao":
        from deskside.precision.backends.torchao import Torchao

        return Torchao(recipe, device)
    from deskside.precision.backends.transformer_engine import TransformerEngine

    return TransformerEngine(recipe, device)


def lent(linear: Linear, layer: nn.Module) -> Callable[[Tensor], Tensor]:
    """Return x (N, in) -> (N, out) by a library's layer without storage, which is lent the weight of `linear`.

    A closure and not a module, so that the layer that holds it shows no parameters but its own.
    """

    def call(x: Tensor) -> Tensor:
        output: Tensor = functional_call(layer, {"weight": linear.weight}, (x,))
        return output

    return call


def not_in_checkpoints(name: str, recipe: Recipe) -> str | None:
    """Return the state that a library does not expose but a bit-exact resume would need, or None."""
    if name != "transformer-engine":
        return None  # torchao's recipes have neither history nor random numbers
    if any(o.rounding == "stochastic" for p in recipe.products for o in (p.left, p.right)):
        return "the state of its random numbers"
    delayed = any(o.scaling == "delayed" for p in recipe.products for o in (p.left, p.right))
    return "the history of its scales" if delayed else None


def missing(backend: str, extra: str, why: object) -> UsageError:
    """The error for a package that does not import. extra: the optional dependency that brings it."""
    first_sentence = str(why).split(". ")[0].split("\n")[0] or type(why).__name__
    return UsageError(
        f"precision.backend: {backend} does not import here ({first_sentence}); "
        f"install it with: pip install 'deskside[{extra}]', or use backend deskside"
    )
