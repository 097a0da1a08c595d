"""State that a step changes for a while is restored, also after an error, and a dry step says what does not fit."""

import pytest
import torch
from torch import nn

from deskside.config import merge
from deskside.data.reading.loader import Batch
from deskside.model.block import Block
from deskside.optim.build import build
from deskside.precision.convert import convert
from deskside.train.attention_backends import AttentionBackends
from deskside.train.loop.step import Stepper
from deskside.train.loop.train_context import TrainContext
from deskside.train.parallel import World
from deskside.utils.errors import RunError
from tests.optim.models import NO_SCALING
from tests.precision.small import make

CPU = torch.device("cpu")


def make_stepper(model: nn.Module, world: World) -> Stepper:
    config = merge.build([{}])
    context = TrainContext(
        config=config,
        world=world,
        model=model,
        attention=AttentionBackends("reference"),
        precision=convert(model, "fp32"),
    )
    return Stepper(context, build(model, config.optim, NO_SCALING, fused=False))


def test_the_final_window_ends_with_an_evaluation_that_fails() -> None:
    model = make(num_hidden_layers=2, window_pattern="SL", sliding_window=8)
    stepper = make_stepper(model, World(CPU))

    def windows() -> list[int | None]:
        return [block.attn.window for block in model.layers if isinstance(block, Block)]

    stepper.set_window(4)
    assert windows() == [4, None]
    with pytest.raises(RuntimeError), stepper.final_window():
        assert windows() == [8, None]
        raise RuntimeError
    assert windows() == [4, None] and stepper.window == 4


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("part", ["begin_step", "forward_backward", "update"])
def test_only_processes_that_wait_within_passes_cannot_try_fewer_rows(
    part: str, sharded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    stepper = make_stepper(make(), World(CPU, sharded=sharded))
    stepper.set_progress(0.0, 0.0, 0)
    monkeypatch.setattr(Stepper, part, full)
    tokens_BT = torch.ones(1, 8, dtype=torch.int64)
    with pytest.raises(RunError if sharded else torch.OutOfMemoryError):
        stepper.run([Batch(tokens_BT, tokens_BT, None, None, 8, 8)], 1, dry=True)
