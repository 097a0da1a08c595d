"""The check of the hand-written block passes if both blocks agree and refuses a wrong kernel."""

from typing import Any

import pytest
import torch

from deskside.config.model import ModelConfig
from deskside.kernels import fused, moe
from deskside.model.init import initialize
from deskside.model.transformer import Transformer
from deskside.precision.convert import convert
from deskside.train.prepare.check_step import check_block
from deskside.utils.errors import UsageError


def model(**changes: Any) -> Transformer:
    config = ModelConfig(
        vocab_size=256,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        intermediate_size=128,
        max_position_embeddings=64,
        **changes,
    )
    made = Transformer(config)
    initialize(made, 1)
    convert(made, "bf16")
    return made


def test_what_agrees_passes_and_changes_nothing() -> None:
    made = model()
    before = {name: p.clone() for name, p in made.named_parameters()}
    check_block(made)
    for name, parameter in made.named_parameters():
        assert torch.equal(parameter, before[name])
        assert parameter.grad is None
    assert made.layers[0].attn.forward_override is None  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "kernel", ["add_norm", "gated", "qk_norm_rope", "add_norm_backward", "gated_backward"]
)
def test_a_wrong_kernel_is_refused(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = getattr(fused, kernel)

    def wrong(*arguments: object) -> object:
        result = right(*arguments)
        if not isinstance(result, tuple):
            return result * 1.5
        position = 1 if kernel == "add_norm" else 0
        return tuple(r * 1.5 if i == position else r for i, r in enumerate(result))

    monkeypatch.setattr(fused, kernel, wrong)
    with pytest.raises(UsageError, match=r"compute\.compile"):
        check_block(model())


EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}


def change_logits(monkeypatch: pytest.MonkeyPatch, size: float) -> None:
    """Add noise to the logits of the fused router: `size` times their standard deviation."""
    right = moe.route

    def noisy(logits_NE: torch.Tensor, *others: Any) -> Any:
        noise = torch.randn(logits_NE.shape, generator=torch.Generator().manual_seed(3))
        return right((logits_NE + size * logits_NE.float().std() * noise).to(logits_NE.dtype), *others)

    monkeypatch.setattr(moe, "route", noisy)


def test_a_token_that_rounding_sends_to_another_expert_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few of the 128 tokens get other experts, so their outputs differ completely."""
    change_logits(monkeypatch, 0.01)
    check_block(model(**EXPERTS))


def test_wrong_choices_of_experts_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    change_logits(monkeypatch, 0.5)
    with pytest.raises(UsageError, match="other experts"):
        check_block(model(**EXPERTS))


@pytest.mark.parametrize("kernel", ["combine", "route_backward"])
def test_a_wrong_kernel_of_experts_is_refused(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = getattr(moe, kernel)

    def wrong(*arguments: Any) -> Any:
        result = right(*arguments)
        return tuple(r * 1.5 for r in result) if isinstance(result, tuple) else result * 1.5

    monkeypatch.setattr(moe, kernel, wrong)
    with pytest.raises(UsageError, match=r"compute\.compile"):
        check_block(model(**EXPERTS))
