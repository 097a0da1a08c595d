"""Other libraries behind the same recipe names: torchao and transformer-engine carry out a recipe's linear layers.

A backend makes an `execution` for each quantised `ops.Linear` (see there): x (N, in) -> (N, out), with the layer's own
float32 weight, which receives the gradient. The rest of the model runs through its composite operators as written; the
hand-written halves belong to Deskside's own recipes. Neither library is imported before it is asked for.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from deskside.config.recipes import Recipe
from deskside.ops.linear import Linear
from deskside.utils.errors import UsageError

_T = TypeVar("_T")


class PrecisionBackend(Protocol):
    """A library that carries out one recipe."""

    def execution(self, linear: Linear) -> Callable[[Tensor], Tensor]:
        """What `linear.forward_override` is to be. Raises UsageError for sizes that the library cannot take."""
        ...

    def region(self) -> AbstractContextManager[None]:
        """Around one forward pass of the model, for libraries that keep count of passes."""
        ...


def load(name: str, recipe: Recipe, device: torch.device) -> PrecisionBackend:
    """The backend "torchao" or "transformer-engine" for a recipe on a device.

    Raises UsageError where the package is missing, has no counterpart of the recipe, or cannot run it on this device.
    """
    if name == "torchao":
        from deskside.precision.backends.torchao import Torchao

        return Torchao(recipe, device)
    if name == "transformer-engine":
        from deskside.precision.backends.transformer_engine import TransformerEngine

        return TransformerEngine(recipe, device)
    raise UsageError(
        f"precision.backend: '{name}' does not exist; use one of deskside, torchao, transformer-engine"
    )


def not_in_checkpoints(name: str, recipe: Recipe) -> str | None:
    """What a library keeps to itself that a resumed run would need to repeat the other to the last bit; else None."""
    if name != "transformer-engine":
        return None  # torchao's recipes have neither history nor random numbers
    if any(o.rounding == "stochastic" for p in recipe.products for o in (p.left, p.right)):
        return "the state of its random numbers"
    delayed = any(o.scaling == "delayed" for p in recipe.products for o in (p.left, p.right))
    return "the history of its scales" if delayed else None


def counterpart(backend: str, known: Mapping[str, _T], recipe: Recipe) -> _T:
    """What a library has for a recipe. Raises UsageError that names the recipes it has."""
    if recipe.name not in known:
        raise UsageError(
            f"precision.backend: {backend} has no recipe {recipe.name}; use one of {', '.join(known)}, or backend "
            f"deskside"
        )
    return known[recipe.name]


def missing(backend: str, extra: str, why: object) -> UsageError:
    """The error for a package that does not import. extra: the optional dependency that brings it."""
    first_sentence = str(why).split(". ")[0].split("\n")[0] or type(why).__name__
    return UsageError(
        f"precision.backend: {backend} does not import here ({first_sentence}); "
        f"install it with: pip install 'deskside[{extra}]', or use backend deskside"
    )
