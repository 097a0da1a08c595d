"""Backends that compute the linear layers of a recipe with other libraries: torchao and transformer-engine.

A backend makes a `forward_override` for each quantized `ops.Linear`: x (N, in) -> (N, out), with the layer's own
float32 weight, which receives the gradient. The rest of the model runs its ordinary forward; only deskside's own
implementation has fused sublayers. A library is imported only when it is requested.
"""

import torch

from deskside.config.recipes import Recipe
from deskside.precision.backends.library import PrecisionBackend


def load(name: str, recipe: Recipe, device: torch.device) -> PrecisionBackend:
    """Return the backend "torchao" or "transformer-engine" for one of its recipes (`config.sections.BACKEND_RECIPES`).

    Raises UsageError if the package is missing or cannot run the recipe on this device.
    """
    if name == "torchao":
        from deskside.precision.backends.torchao import Torchao

        return Torchao(recipe, device)
    from deskside.precision.backends.transformer_engine import TransformerEngine

    return TransformerEngine(recipe, device)


def not_in_checkpoints(name: str, recipe: Recipe) -> str | None:
    """Return which state a bit-exact resume would need that the library `name` does not expose, or None."""
    if name != "transformer-engine":
        return None  # torchao's recipes have neither history nor random numbers
    if any(o.rounding == "stochastic" for p in recipe.products for o in (p.left, p.right)):
        return "the state of its random numbers"
    delayed = any(o.scaling == "delayed" for p in recipe.products for o in (p.left, p.right))
    return "the history of its scales" if delayed else None
