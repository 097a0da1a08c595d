"""The copy used for generation computes the same numbers as the trained model, and follows its updates."""

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from deskside.align.sampler import copy_weights, inference_copy
from deskside.engine.engine import Engine
from deskside.engine.requests import Request
from deskside.precision.convert import convert
from deskside.utils.errors import UsageError
from tests.engine.test_generate import VARIANTS, make

TOKENS = torch.arange(24).view(2, 12)


@pytest.mark.parametrize("name", ["gqa", "learned", "moe", "capped"])
@pytest.mark.parametrize("recipe", ["fp32", "bf16"])
@torch.no_grad()
def test_the_copy_computes_what_the_model_does(name: str, recipe: str) -> None:
    """Outputs are bitwise equal, also in BF16, where the model casts its float32 weights at every use."""
    model = make(**VARIANTS[name])
    convert(model, recipe)
    copy = inference_copy(model)
    assert torch.equal(copy(TOKENS), model(TOKENS))
    before = {name: parameter.data_ptr() for name, parameter in copy.named_parameters()}
    for parameter in model.parameters():
        parameter.mul_(1.01)
    assert not torch.equal(copy(TOKENS), model(TOKENS))
    copy_weights(copy, model)
    assert torch.equal(copy(TOKENS), model(TOKENS))
    assert before == {name: parameter.data_ptr() for name, parameter in copy.named_parameters()}
    assert not any(parameter.requires_grad for parameter in copy.parameters())
    assert next(model.parameters()).requires_grad


class InHalf(TorchDispatchMode):
    """Refuses to create a float32 tensor with the shape of one of the given weights."""

    def __init__(self, weights: Iterable[Tensor]) -> None:
        super().__init__()
        self.shapes = {tuple(weight.shape) for weight in weights if weight.ndim >= 2}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and not result.is_meta and tuple(result.shape) in self.shapes:
            assert result.dtype == torch.bfloat16 or function is torch.ops.aten.detach.default, function
        return result


def test_the_copy_never_takes_the_memory_of_float32() -> None:
    """The copy is made while training already fills the GPU."""
    model = make()
    convert(model, "bf16")
    with InHalf(model.parameters()):
        copy = inference_copy(model)
    assert copy.embed.weight.dtype == torch.bfloat16


def test_the_engine_runs_on_the_copy() -> None:
    model = make()
    convert(model, "bf16")
    copy = inference_copy(model)
    engine = Engine(copy, max_batch=2, max_tokens=128)
    asked = [Request((1, 2, 3), 8), Request((50, 4), 8)]
    first = engine.run(asked)
    with torch.no_grad():
        model.embed.weight.mul_(-1)
    copy_weights(copy, model)
    engine.weights_changed()
    second = engine.run(asked)
    assert [a.tokens for (a,) in second] == [a.tokens for (a,) in Engine(model, max_tokens=128).run(asked)]
    assert [a.tokens for (a,) in first] != [a.tokens for (a,) in second]


def test_another_model_is_refused() -> None:
    with pytest.raises(UsageError, match="only one of the two models has this parameter"):
        copy_weights(make(), make(qk_norm=False))
