"""The planner's memory and time of multi-token prediction, compared with the loader's own tensors."""

from dataclasses import replace

import pytest
import torch

from deskside.budget.memory import instants, training_memory
from deskside.budget.operators.step import step_operators
from deskside.budget.step_spec import StepSpec
from deskside.config.model import ModelConfig
from deskside.config.run import RunConfig
from deskside.config.step_options import step_options
from deskside.data.reading.loader import future_targets

SHAPE = ModelConfig(
    vocab_size=300, num_hidden_layers=2, hidden_size=64, num_attention_heads=2, num_key_value_heads=2
)
SPEC = StepSpec(sequence_length=64, tokens=512, micro_tokens=256)


@pytest.mark.parametrize("count", [1, 2, 4])
def test_bytes_and_traffic_of_later_targets(count: int) -> None:
    spec = replace(SPEC, future_targets=count)
    positions_BT = torch.arange(64).expand(8, 64)
    size = future_targets(
        torch.zeros(8, 64, dtype=torch.int64), positions_BT, count
    ).nbytes  # of the whole step
    assert training_memory(SHAPE, spec).allocated - training_memory(SHAPE, SPEC).allocated == size
    assert {memory.items["later targets"] for memory in instants(SHAPE, spec).values()} == {size}
    with_them, without = ({o.name: o.amount for o in step_operators(SHAPE, one)} for one in (spec, SPEC))
    added = {name: amount for name, amount in with_them.items() if without.get(name) != amount}
    assert added == {"later targets": size + 3 * 32 * 512 * count}


def test_the_configuration_says_how_many() -> None:
    assert step_options(RunConfig())["future_targets"] == 0
    config = RunConfig.model_validate({"multi_token": {"weights": [0.5, 0.25]}})
    assert step_options(config)["future_targets"] == 2
