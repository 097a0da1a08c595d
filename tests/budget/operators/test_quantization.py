"""The casts to formats below 16 bits, against counting by hand."""

from dataclasses import replace

import pytest

from deskside.budget.format_costs import ALL_NATIVE, LowFormat, Precision
from deskside.budget.operators.quantization import expert_values, quantized_values
from deskside.budget.operators.step import step_operators
from deskside.budget.sizes import Sizes
from deskside.budget.step_spec import StepSpec
from deskside.config.model import ModelConfig
from tests.budget.test_format_costs import EXPERTS, WORK


def test_values_quantized_by_hand() -> None:
    """Values per token and block: 768 into qkv, 768 into the output, 768 into
    gate-up, 2048 into down; the same four out.
    """
    entering, gradients = quantized_values(Sizes(ModelConfig(num_hidden_layers=1), StepSpec(1, 1, 1)))
    assert entering == 768 + 768 + 768 + 2048
    assert gradients == (768 + 2 * 192) + 768 + 2 * 2048 + 768


@pytest.mark.parametrize("precision", ["fp8", "nvfp4-eden", "fp8-nvfp4"])
def test_casts_of_experts_are_counted_for_every_row(precision: Precision) -> None:
    """Each of a token's experts has a separate copy of the input, and the second
    product's input is as wide as all of them.
    """
    spec = replace(WORK, precision=precision, copies="step", native=frozenset())
    first, second, gradients = expert_values(Sizes(EXPERTS, spec))
    per_token = (2 * 2048, 2 * 2176, 2 * 2 * 2176 + 2 * 2048)
    assert (first, second, gradients) == tuple(n * spec.tokens * 4 for n in per_token)
    shared = EXPERTS.model_copy(update={"shared_expert_intermediate_size": 1024, "qk_norm": False})
    assert expert_values(Sizes(shared, spec)) == (first, second, gradients)  # it stays in BF16
    names = {o.name for o in step_operators(EXPERTS, spec) if "experts to" in o.name}
    expected = {"fp8": {"FP8"}, "nvfp4-eden": {"NVFP4"}, "fp8-nvfp4": {"FP8", "NVFP4"}}[precision]
    assert names == {f"quantizing experts to {name}" for name in expected}
    if precision == "fp8":
        amounts = {}
        for native in (frozenset[LowFormat](), ALL_NATIVE):
            operators = step_operators(EXPERTS, replace(spec, native=native))
            (amounts[len(native)],) = [o.amount for o in operators if o.name == "quantizing experts to FP8"]
        assert amounts[len(ALL_NATIVE)] == first + second + gradients  # one byte each
        assert amounts[0] - amounts[len(ALL_NATIVE)] == 3 * (2 * (first + second + gradients))
    dense, _ = quantized_values(Sizes(EXPERTS, spec))
    assert dense == spec.tokens * 4 * (2048 + EXPERTS.num_attention_heads * EXPERTS.head_dim)
