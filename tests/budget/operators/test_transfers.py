"""The bytes between GPUs and to the host, against counting by hand."""

import pytest

from deskside.budget.operators.step import step_operators
from deskside.budget.shape import block_matrix_params, num_params, root_params
from deskside.budget.step_spec import StepSpec
from deskside.config.model import ModelConfig
from tests.budget.operators.small_step import LENGTH, SMALL, amount, operators


@pytest.mark.parametrize("gpus", [2, 4, 8])
def test_between_gpus(gpus: int) -> None:
    """FSDP gathers the blocks twice per pass and the rest once, and scatters once per step. Muon's matrices are
    gathered in bfloat16. test_sharded_oracle.py counts them.
    """
    shape = ModelConfig(**SMALL)
    gradients = 4.0 * num_params(shape)
    spec = {"sequence_length": LENGTH, "tokens": 2 * gpus * LENGTH, "micro_tokens": LENGTH, "gpus": gpus}
    share = (gpus - 1) / gpus
    sharded = step_operators(shape, StepSpec(**spec, sharded=True))
    tables = 4.0 * 2 * shape.vocab_size * shape.hidden_size
    muon = 2.0 * block_matrix_params(shape)
    assert amount(sharded, "communication") == ((2 * 2 + 1) * gradients - 2 * tables + muon) * share
    adamw = step_operators(shape, StepSpec(**spec, sharded=True, optimizer="adamw"))
    assert amount(sharded, "communication") - amount(adamw, "communication") == muon * share
    assert amount(step_operators(shape, StepSpec(LENGTH, LENGTH, LENGTH)), "communication") == 0


def test_states_on_the_host_travel_up_and_down() -> None:
    """Muon's 4 bytes per block weight and AdamW's 8 per table entry are transferred each way. Vectors stay."""
    shape = ModelConfig(**SMALL)
    expected = 4.0 * block_matrix_params(shape) + 8 * root_params(shape)
    assert amount(operators(shape, offload_optimizer=True), "offload") == expected
    assert amount(operators(shape), "offload") == 0
