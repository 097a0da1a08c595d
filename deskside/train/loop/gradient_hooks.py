"""Hooks on completed gradients that do not keep the model alive."""

import weakref
from collections.abc import Callable
from typing import TypeVar

from torch import nn

Key = TypeVar("Key", int, str)


def call_after_gradient(
    parameter: nn.Parameter, method: Callable[[Key, nn.Parameter], None], key: Key
) -> None:
    """Call `method(key, parameter)` whenever autograd has completed a pass's gradient of the parameter.

    A parameter keeps its hooks alive. If they keep the parameter alive in turn, through the object of the method or
    through an argument, nothing of the model is ever freed: Python's garbage collector does not find cycles through a
    parameter's hooks. So the object is held by a weak reference, and `key` is a name or an index.
    """
    weak = weakref.WeakMethod(method)

    def hook(completed: nn.Parameter) -> None:
        alive = weak()
        if alive is not None:
            alive(key, completed)

    parameter.register_post_accumulate_grad_hook(hook)
