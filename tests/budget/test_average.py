"""The planner's memory and time of an average of the weights, compared with the tensors of one."""

from dataclasses import replace

import pytest
import torch

from deskside.budget.host_memory import checkpoint_bytes, host_memory
from deskside.budget.memory import training_memory
from deskside.budget.operators.step import step_operators
from deskside.budget.step_spec import StepSpec
from deskside.config.average import AverageConfig
from deskside.config.model import ModelConfig
from deskside.model.transformer import Transformer
from deskside.optim.average import WeightAverage
from deskside.optim.groups import trained_parameters

SHAPE = ModelConfig(
    vocab_size=300, num_hidden_layers=2, hidden_size=64, num_attention_heads=2, num_key_value_heads=2
)
SPEC = StepSpec(sequence_length=64, tokens=256, micro_tokens=256)


def test_bytes_of_an_average() -> None:
    model = Transformer(SHAPE)
    average = WeightAverage(trained_parameters(model), AverageConfig(name="ema"), torch.device("cpu"))
    size = sum(t.nbytes for t in average.tensors.values())
    device, host = (replace(SPEC, average=place, averages_per_step=0.2) for place in ("device", "host"))
    assert training_memory(SHAPE, device).allocated - training_memory(SHAPE, SPEC).allocated == size
    assert host_memory(SHAPE, host)["average"] == size and not host_memory(SHAPE, device)
    assert checkpoint_bytes(SHAPE, host) - checkpoint_bytes(SHAPE, SPEC) == size
    amounts = {
        place: {o.name: o.amount for o in step_operators(SHAPE, spec)}
        for place, spec in (("none", SPEC), ("device", device), ("host", host))
    }
    assert amounts["device"]["average"] == pytest.approx(0.2 * 3 * size)
    assert amounts["host"]["average, up and down at once"] == pytest.approx(0.2 * size)
    assert amounts["none"].items() <= amounts["device"].items()
