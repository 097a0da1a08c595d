"""The check of the hand-written block: it passes where they agree and refuses where a kernel is wrong."""

import pytest
import torch

from deskside.config.model import ModelConfig
from deskside.kernels import fused
from deskside.model.init import initialize
from deskside.model.transformer import Transformer
from deskside.precision.convert import convert
from deskside.train.prepare.check_step import check_block
from deskside.utils.errors import UsageError


def model() -> Transformer:
    config = ModelConfig(
        vocab_size=256,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        intermediate_size=128,
        max_position_embeddings=64,
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
