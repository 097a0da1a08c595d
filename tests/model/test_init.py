"""Initialization follows its documentation."""

import hashlib

import pytest
import torch
from torch import nn

from deskside.config.model import ModelConfig
from deskside.model.init import InitOptions, initialize
from deskside.model.transformer import Transformer
from deskside.ops.logical import logical_tensors
from tests.model.tiny import TINY, make, tokens


def test_initialisation_says_what_it_does() -> None:
    config = ModelConfig(**{**TINY, "hidden_size": 256, "vocab_size": 512, "attention_bias": True})
    model = Transformer(config)
    for parameter in model.parameters():
        nn.init.constant_(parameter, torch.nan)
    initialize(model, 0)
    for t in logical_tensors(model):
        std = float(t.view.std())
        if t.kind == "norm":
            assert (t.view == 1).all()
        elif t.kind == "bias" or t.name.endswith(("o_proj.weight", "down_proj.weight")):
            assert not t.view.any(), t.name
        elif t.kind == "embedding":
            assert std == pytest.approx(0.02, rel=0.05)
        elif t.kind == "head":
            assert std == pytest.approx(0.001, rel=0.05)
        else:
            assert std == pytest.approx(t.view.shape[1] ** -0.5, rel=0.1), t.name
    targets = torch.randint(0, 512, (2, 17))
    assert float(model.loss(tokens(), targets).detach()) / 34 == pytest.approx(
        torch.tensor(512.0).log().item(), rel=0.01
    )


def test_large_embeddings_leave_the_router_small() -> None:
    shape = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "hidden_size": 256}
    model = Transformer(ModelConfig(**{**TINY, **shape, "initializer_range": 1.0}))
    initialize(model, 0)
    std = {t.name: float(t.view.std()) for t in logical_tensors(model)}
    assert [value for name, value in std.items() if name.endswith("router.weight")] == pytest.approx(
        [0.02] * TINY["num_hidden_layers"], rel=0.1
    )
    assert std["embed.weight"] == pytest.approx(1.0, rel=0.05)


def test_q_norm_init_multiplies_the_scores_alone() -> None:
    plain, sharp = (Transformer(ModelConfig(**TINY, q_norm_init=gain)) for gain in (1.0, 4.0))
    for model in (plain, sharp):
        initialize(model, 0)
    for (name, one), (_, other) in zip(plain.named_parameters(), sharp.named_parameters(), strict=True):
        assert torch.equal(4.0 * one if "q_norm" in name else one, other), name
    assert sum("q_norm" in name for name, _ in sharp.named_parameters()) == TINY["num_hidden_layers"]


def test_initialisation_is_a_function_of_the_seed() -> None:
    one, same, other = (Transformer(ModelConfig(**TINY)) for _ in range(3))
    initialize(one, 3)
    torch.randn(5)
    initialize(same, 3)
    initialize(other, 4)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), same.parameters(), strict=True))
    assert not torch.equal(one.embed.weight, other.embed.weight)
    views = [
        t.view.flatten()[:8].tolist() for t in logical_tensors(one) if t.kind == "matrix" and t.view.any()
    ]
    assert len({tuple(v) for v in views}) == len(views)  # no two matrices are alike


def test_every_tensor_is_drawn_by_a_generator_of_its_own() -> None:
    """The values of a seed do not depend on other random draws or their order."""
    config = ModelConfig(**{**TINY, "hidden_size": 256, "vocab_size": 512})
    model = Transformer(config)
    initialize(model, 11)
    checked = 0
    for t in logical_tensors(model):
        digest = hashlib.blake2b(f"11:{t.name}".encode(), digest_size=8).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") % 2**63)
        expected = torch.empty(t.view.shape)
        if t.kind == "embedding":
            expected.normal_(0.0, 0.02, generator=generator)
        elif t.kind == "matrix" and not t.name.endswith(("o_proj.weight", "down_proj.weight")):
            bound = 3**0.5 * (1.0 * t.view.shape[-1] ** -0.5)
            expected.uniform_(-bound, bound, generator=generator)
        else:
            continue
        assert torch.equal(t.view, expected), t.name
        checked += 1
    assert checked > 5 * config.num_hidden_layers


def test_output_option() -> None:
    model = Transformer(ModelConfig(**TINY))
    initialize(model, 0, InitOptions(output="fan_in", head_std=0.5))
    down = model.layers[0].mlp.output.projection.weight
    assert float(down.detach().std()) == pytest.approx(48**-0.5, rel=0.1)
    assert float(model.head_weight.detach().std()) == pytest.approx(0.5, rel=0.1)


def test_meta_device_then_materialised() -> None:
    with torch.device("meta"):
        model = Transformer(ModelConfig(**TINY))
    assert all(p.is_meta for p in model.parameters())
    model.to_empty(device="cpu")
    initialize(model, 0, InitOptions(embedding_std=0.5, head_std=0.3, output="fan_in"))
    assert torch.equal(model(tokens()), make()(tokens()))


def test_rotary_tables_stay_float32_and_out_of_the_state() -> None:
    model = make()
    assert not any("rope" in name for name in model.state_dict())
    table = model.rope_cos.clone()
    model.bfloat16()
    assert model.rope_cos.dtype == torch.float32 and torch.equal(model.rope_cos, table)
    assert model(tokens()).dtype == torch.bfloat16
