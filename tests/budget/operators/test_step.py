"""The operators of a step that is divided into several passes."""

from deskside.budget.operators.step import step_operators
from deskside.budget.step_spec import StepSpec
from deskside.config.model import ModelConfig
from tests.budget.operators.small_step import LENGTH, SMALL, amount


def test_accumulation_repeats_what_belongs_to_a_pass() -> None:
    """With the same tokens in four passes, weights are cast and kernels launched
    four times. All other amounts are equal.
    """
    shape = ModelConfig(**SMALL)
    one = step_operators(shape, StepSpec(LENGTH, 4 * LENGTH, 4 * LENGTH))
    four = step_operators(shape, StepSpec(LENGTH, 4 * LENGTH, LENGTH))
    for group in ("weights", "layers"):
        assert amount(four, group) == 4 * amount(one, group)
    for group in ("matmul", "head", "attention", "traffic", "loss_traffic", "optimizer_matmul"):
        assert amount(four, group) == amount(one, group)
