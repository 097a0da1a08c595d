"""Linear layers and the end of a decoding step: the kernels in Triton's interpreter, and the torch form."""

import pytest
import torch
import torch.nn.functional as F

from deskside.kernels import few_tokens
from deskside.kernels.decode_step import NOT_FINITE, greedy_tokens, write_state
from deskside.kernels.few_tokens import AddNorm
from tests.kernels.interpreter import interpreted


def test_products_equal_float64() -> None:
    pytest.importorskip("triton")
    found: dict[str, float] = interpreted("few_tokens_interpreted", "products")
    assert len(found) == 48
    assert all(error < 1e-6 for error in found.values()), found


def test_the_end_of_a_step_equals_torch() -> None:
    pytest.importorskip("triton")
    found: dict[str, float] = interpreted("few_tokens_interpreted", "step_end")
    assert len(found) == 5
    assert not any(found.values()), found


@pytest.mark.parametrize("activation, gated", [(None, False), ("silu", True), ("relu2", False)])
def test_the_torch_form_is_sum_norm_product_activation(activation: str | None, gated: bool) -> None:
    torch.manual_seed(0)
    x, delta, weight, bias, g = (torch.randn(s).double() for s in ((3, 8), (3, 8), (10, 8), (10,), (8,)))
    total, out = few_tokens.add_norm_linear(x, AddNorm(delta, g, 1e-6), weight, bias, activation, gated)
    torch.testing.assert_close(total, x + delta)
    rms = ((x + delta).square().mean(1, keepdim=True) + 1e-6).sqrt()
    expected = ((x + delta) / rms * g) @ weight.T + bias
    if activation == "silu":
        expected = F.silu(expected[:, :5]) * expected[:, 5:]
    elif activation == "relu2":
        expected = expected.clamp(min=0) ** 2
    torch.testing.assert_close(out, expected)
    normed = (x + delta) / rms * g
    torch.testing.assert_close(few_tokens.linear(normed, weight, bias, activation, gated), expected)


def test_logits_that_are_not_finite_have_no_token() -> None:
    nan, inf = float("nan"), float("inf")
    logits = torch.tensor([[1.0, 3, 3], [nan, 1, 2], [inf, 1, 2], [-inf] * 3, [-inf, -inf, -5]])
    assert greedy_tokens(logits).tolist() == [1, NOT_FINITE, NOT_FINITE, NOT_FINITE, 2]


def test_the_state_of_the_dummy_row_stays_zero() -> None:
    state, three = torch.zeros(4, 3, dtype=torch.int64), torch.tensor([7, NOT_FINITE, 9])
    write_state(state, torch.tensor([2, 0, 3]), three, three * 0 + 5, three * 0 + 1, added=1)
    assert state.tolist() == [[0, 6, 2], [0, 0, 0], [7, 6, 2], [0, 0, 0]]
