"""The dropout kernel on a GPU has the masks of plain torch, in fused and compiled blocks too."""

import pytest
import torch

from deskside.kernels.dropout import dropout
from deskside.precision.convert import convert
from tests.gpu.card import DEVICE, NEEDS_CARD
from tests.model.test_dropout import gradients
from tests.precision.small import make, worst

pytestmark = NEEDS_CARD


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("channels", [37, 768, 5120])
def test_the_kernel_equals_plain_torch(channels: int, dtype: torch.dtype) -> None:
    x = torch.randn(3, 100, channels, dtype=dtype)
    position = torch.tensor([2**62 + 7, 3, 1000, 2**32 - 50])
    got = dropout(x.to(DEVICE), position.to(DEVICE), 0.1).cpu()
    assert torch.equal(got, dropout(x, position, 0.1))


def test_gradients_equal_the_cpu() -> None:
    """Eager, fused and compiled in float32. A different mask would change the gradients by far more."""
    truth, model = gradients(make()), make().to(DEVICE)
    for fused in (False, True):
        convert(model, "fp32", fused=fused)
        found = {name: g.cpu() for name, g in gradients(model).items()}
        assert worst(found, truth) < 1e-2
    convert(model, "fp32")
    for block in model.layers:
        block.compile(dynamic=False)
    assert worst({name: g.cpu() for name, g in gradients(model).items()}, truth) < 1e-2
