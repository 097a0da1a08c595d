"""MLPs computed in chunks of tokens: the same gradients as whole ones, with less memory at a time."""

from typing import Any

import pytest
import torch

from deskside.config import merge
from deskside.kernels import fused
from deskside.model.transformer import Transformer
from deskside.precision.convert import convert
from deskside.train.parallel import World
from deskside.train.prepare.setup import build_model, prepare_execution
from deskside.utils.errors import UsageError
from tests.precision.small import B, T, backward, make, worst

OPTIONS: dict[str, dict[str, Any]] = {
    "gated": {},
    "ReLU^2, no gate": {"hidden_act": "relu2", "gated_mlp": False},
    "tied embeddings": {"tie_word_embeddings": True},
}


def in_chunks(model: Transformer, tokens: int, recipe: str = "fp32") -> None:
    applied = convert(model, recipe, fused=True)
    applied.set_checkpointing("block")
    applied.set_mlp_chunk(tokens)


@pytest.mark.parametrize("changes", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("tokens", [1 + B * T // 3, 64, 2 * B * T])
def test_float64_gradients_are_those_of_the_model(changes: dict[str, Any], tokens: int) -> None:
    model = make(torch.float64, **changes)
    loss, truth = backward(model)
    in_chunks(model, tokens)
    again, found = backward(model)
    assert again == pytest.approx(loss, rel=1e-14)
    assert worst(found, truth) < 1e-13


@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16])
def test_bf16_gradients_are_as_near_to_the_truth_as_in_one_piece(weights: torch.dtype) -> None:
    model = make()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.data = parameter.data.to(weights)
    exact = make(torch.float64)
    exact.load_state_dict({name: t.double() for name, t in model.state_dict().items()})
    truth = backward(exact)[1]
    errors = []
    for tokens in (64, 4 * B * T):
        in_chunks(model, tokens, "bf16")
        found = {name: g.double() for name, g in backward(model)[1].items()}
        errors.append(worst(found, truth))
    assert errors[0] < 1.05 * errors[1] < 0.1


def test_no_inner_tensor_has_more_tokens_than_a_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[int] = []
    for name in ("gated", "gated_backward"):
        original = getattr(fused, name)

        def counted(x: torch.Tensor, *more: Any, original: Any = original) -> Any:
            rows.append(len(x))
            return original(x, *more)

        monkeypatch.setattr(fused, name, counted)
    model = make()
    in_chunks(model, 48, "bf16")
    backward(model)
    assert max(rows) == 48 and sum(rows) == 3 * B * T * len(model.layers)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"compute": {"mlp_chunk_tokens": 64}}, "activation_checkpointing mlp or block"),
        *(
            (
                {"compute": {"activation_checkpointing": "block", "compile": "block", **option}},
                rf"compute\.{next(iter(option))}: .*compile fused",
            )
            for option in ({"mlp_chunk_tokens": 64}, {"activation_offloading": True})
        ),
        (
            {
                "compute": {"mlp_chunk_tokens": 64, "activation_checkpointing": "block"},
                "precision": {"name": "fp8"},
            },
            "use bf16",
        ),
        (
            {
                "compute": {"mlp_chunk_tokens": 64, "activation_checkpointing": "mlp"},
                "model": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64},
            },
            "dense MLPs",
        ),
    ],
)
def test_combinations_that_are_refused_say_what_to_do(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(UsageError, match=named):
        merge.build([changes])


def test_unfused_blocks_are_refused() -> None:
    compute = {"mlp_chunk_tokens": 64, "activation_checkpointing": "mlp", "device": "cpu"}
    model = {"num_hidden_layers": 1, "hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2}
    config = merge.build([{"compute": compute, "model": {**model, "vocab_size": 64}}])
    world = World(torch.device("cpu"))
    with pytest.raises(UsageError, match="compile fused"):
        prepare_execution(config, build_model(config, world, "fp32"), world, "fp32")
