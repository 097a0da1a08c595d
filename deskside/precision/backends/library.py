"""The interface of the backends, and functions that all of them use."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

from torch import Tensor, nn
from torch.func import functional_call

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


def with_weight_of(linear: Linear, layer: nn.Module) -> Callable[[Tensor], Tensor]:
    """Return a function x (N, in) -> (N, out) that calls a library's layer with the weight of `linear`.

    layer: has no separate weight storage. The result is a function, because a module would register its parameters in
    `linear`.
    """

    def call(x: Tensor) -> Tensor:
        output: Tensor = functional_call(layer, {"weight": linear.weight}, (x,))
        return output

    return call


def import_failed(backend: str, extra: str, error: Exception) -> UsageError:
    """Return the error for a package that cannot be imported. extra: the optional dependency that installs it."""
    first_sentence = str(error).split(". ")[0].split("\n")[0] or type(error).__name__
    return UsageError(
        f"precision.backend: {backend} cannot be imported ({first_sentence}); "
        f"install it with: pip install 'deskside[{extra}]', or use backend deskside"
    )
