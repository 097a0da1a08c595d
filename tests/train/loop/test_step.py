"""State that a step changes for a while is restored, also after an error."""

import pytest
import torch

from deskside.config import merge
from deskside.model.block import Block
from deskside.optim.build import build
from deskside.precision.convert import convert
from deskside.train.attention_backends import AttentionBackends
from deskside.train.loop.step import Stepper
from deskside.train.loop.train_context import TrainContext
from deskside.train.parallel import World
from tests.optim.models import NO_SCALING
from tests.precision.small import make


def test_the_final_window_ends_with_an_evaluation_that_fails() -> None:
    config, model = merge.build([{}]), make(num_hidden_layers=2, window_pattern="SL", sliding_window=8)
    context = TrainContext(
        config=config,
        world=World(torch.device("cpu")),
        model=model,
        attention=AttentionBackends("reference"),
        precision=convert(model, "fp32"),
    )
    stepper = Stepper(context, build(model, config.optim, NO_SCALING, fused=False))

    def windows() -> list[int | None]:
        return [block.attn.window for block in model.layers if isinstance(block, Block)]

    stepper.set_window(4)
    assert windows() == [4, None]
    with pytest.raises(RuntimeError), stepper.final_window():
        assert windows() == [8, None]
        raise RuntimeError
    assert windows() == [4, None] and stepper.window == 4
