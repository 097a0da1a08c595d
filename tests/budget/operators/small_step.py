"""A small model's step, and the sum of its operators' amounts."""

from typing import Any

from deskside.budget.operators.operator import Operator
from deskside.budget.operators.step import step_operators
from deskside.budget.step_spec import StepSpec
from deskside.config.model import ModelConfig

SMALL = {
    "vocab_size": 1024, "hidden_size": 256, "num_hidden_layers": 3, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 32, "intermediate_size": 704,
}  # fmt: skip
ROWS, LENGTH = 2, 128
TOKENS = ROWS * LENGTH


def operators(shape: ModelConfig, **options: Any) -> list[Operator]:
    """Return the operators of a step of one pass."""
    return step_operators(shape, StepSpec(LENGTH, TOKENS, TOKENS, **options))


def amount(found: list[Operator], *groups: str) -> float:
    """Return the sum of the amounts in these groups."""
    return sum(operator.amount for operator in found if operator.group in groups)
