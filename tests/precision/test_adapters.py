"""Adapters on complete models: what is frozen, what trains and by which rule, compiled blocks, and refused options."""

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from deskside.budget.scaling import Scaling
from deskside.config.model import ModelConfig
from deskside.config.optim import AdamWConfig, MuonConfig
from deskside.config.sections import PROJECTIONS, AdapterConfig
from deskside.model.init import initialize
from deskside.model.transformer import Transformer
from deskside.ops.logical import logical_tensors
from deskside.ops.moe import Experts
from deskside.optim.build import build
from deskside.optim.groups import classify_parameters
from deskside.precision.attach_adapters import attach_adapters
from deskside.precision.convert import convert
from deskside.precision.frozen import FrozenLinear
from deskside.precision.lora import Adapter, num_trained_parameters
from deskside.utils.errors import UsageError
from deskside.weights.peft_adapters import LowRank
from tests.optim.models import NO_SCALING

TOKENS = torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(0))
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
FORMATS: list[Any] = ["bf16", "int8", "nf4"]


def adapted(
    base: Any = "bf16",
    tokens: tuple[int, ...] = (),
    seed: int = 0,
    options: dict[str, Any] | None = None,
    **shape: Any,
) -> Transformer:
    config = ModelConfig(
        **{
            "vocab_size": 64, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
            "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 128, "max_position_embeddings": 64, **shape,
        }
    )  # fmt: skip
    model = Transformer(config)
    initialize(model, 0)
    attach_adapters(model, AdapterConfig(rank=4, base=base, **(options or {})), seed, tokens)
    return model


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("base", FORMATS)
def test_only_adapters_and_rows_train(base: Any) -> None:
    model = adapted(base, (3, 9))
    infos = {info.name: info.role for info in classify_parameters(model)}
    assert {role for name, role in infos.items() if ".adapter." in name} == {"adapter"}
    assert {name: role for name, role in infos.items() if ".adapter." not in name} == {
        "embed.trained.rows": "rows",
        "head.trained.rows": "rows",
    }
    assert sum(name.count(".adapter.") for name in infos) == 2 * 7 * 2
    assert num_trained_parameters(model) == 2 * 4 * (128 + 2 * 96 + 128 + 2 * 192 + 192) + 2 * 2 * 64
    assert all(p.dtype == torch.float32 for p in model.parameters() if p.requires_grad)
    frozen = [m for m in model.modules() if isinstance(m, FrozenLinear)]
    assert len(frozen) == (0 if base == "bf16" else 8)


def test_rates_and_decay() -> None:
    seven = Scaling(lr=7.0, embedding_lr=7.0, weight_decay=7.0)  # of weights that are trained completely
    optimizer = build(adapted("bf16", (3,)), AdamWConfig(lr=1e-4, weight_decay=0.3), seven)
    found = {group.name: (group.peak_lr, group.weight_decay) for group in optimizer.adamw.groups}
    assert found == {"adapters": (1e-4, 0.3), "rows": (1e-4, 0.0)}
    more = {"dora": True, "modules_to_save": ("embed_tokens", "lm_head")}
    optimizer = build(adapted("bf16", options=more), AdamWConfig(lr=1e-4, weight_decay=0.3), seven)
    found = {group.name: (group.peak_lr, group.weight_decay) for group in optimizer.adamw.groups}
    trained = dict.fromkeys(("embedding", "head"), (1e-4, 0.3)) | {"vectors": (1e-4, 0.0)}
    assert found == trained | {"adapters": (1e-4, 0.3)}
    with pytest.raises(UsageError, match=r"muon is for whole matrices"):
        build(adapted(), MuonConfig(), NO_SCALING)


def test_a_tied_table_has_one_set_of_rows() -> None:
    model = adapted("bf16", (3,), tie_word_embeddings=True)
    assert [info.name for info in classify_parameters(model) if info.role == "rows"] == ["embed.trained.rows"]
    assert model.head_rows is not None and model.head_rows[1] is model.embed.trained.rows  # type: ignore[union-attr]


def test_initial_values_are_of_seed_and_name_alone() -> None:
    one, same, other = adapted(seed=1), adapted(seed=1), adapted("int8", seed=2)
    a = "layers.1.attn.input.projections.0.adapter.a.q_proj"
    values = [dict(model.named_parameters()) for model in (one, same, other)]
    assert torch.equal(values[0][a], values[1][a]) and not torch.equal(values[0][a], values[2][a])
    assert not torch.equal(values[0][a], values[0][a.replace("layers.1", "layers.0")])
    assert all(not p.any() for name, p in one.named_parameters() if ".adapter.b." in name)


@pytest.mark.parametrize("base", ["bf16", "int8"])
def test_dora_leaves_a_row_of_zeros_as_it_is(base: Any) -> None:
    """The output matrices of blocks begin as zeros, so the norm of each of their rows is 0, and 0 / 0 is NaN."""
    model, plain = adapted(base, options={"dora": True}), adapted(base)
    loss = model.loss(TOKENS, TOKENS)
    torch.testing.assert_close(loss.detach(), plain.loss(TOKENS, TOKENS).detach(), rtol=1e-5, atol=0)
    loss.backward()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)
    output = model.layers[0].attn.output  # type: ignore[union-attr]
    weight = torch.zeros(64, 64)
    output.adapter.merge(weight)  # type: ignore[union-attr, operator]
    low_rank = LowRank(output.adapter.a["o_proj"], output.adapter.b["o_proj"], 1.0, torch.zeros(64))  # type: ignore[union-attr, index]
    assert not weight.any() and not low_rank.merged(weight).any() and not low_rank.gain(weight).any()


@pytest.mark.parametrize("base", FORMATS)
def test_the_hand_written_halves_leave_adapted_blocks_alone(base: Any) -> None:
    model = adapted(base)
    applied = convert(model, "bf16", fused=True)
    assert not any(applied.is_fused(half) for block in model.layers for half in (block.attn, block.mlp))
    assert all(
        block.attn.forward_override is None and block.mlp.forward_override is None for block in model.layers
    )


@pytest.mark.parametrize("base", FORMATS)
def test_float32_beside_frozen_weights_is_float32(base: Any) -> None:
    """The values are those of the frozen dtype, but the products are in float32."""
    model = adapted(base)
    whole = copy.deepcopy(model).float()
    convert(model, "fp32")
    assert model.activation_dtype == torch.float32
    torch.testing.assert_close(model(TOKENS), whole(TOKENS), rtol=1e-6, atol=1e-6)


@pytest.mark.full
@pytest.mark.parametrize(
    ("shape", "options"),
    [
        (MOE, {}),
        *(pytest.param({}, options, marks=pytest.mark.full) for options in ({}, {"dora": True})),
    ],
    ids=["experts", "dense", "dora"],
)
@pytest.mark.parametrize(
    "base", ["nf4", *(pytest.param(base, marks=pytest.mark.full) for base in ("bf16", "int8"))]
)
def test_compiled_blocks_compute_the_same_and_keep_no_dense_weights(
    base: Any, shape: dict[str, int], options: dict[str, Any], fresh_compiler: None
) -> None:
    """torch.compile's partitioner would otherwise keep the dense weights, which forward and backward both compute."""
    results = []
    for compiled in (False, True):
        model = adapted(base, options=options, **shape)
        torch.manual_seed(1)
        for parameter in model.parameters():
            if parameter.requires_grad:
                torch.nn.init.normal_(parameter, std=0.1)
        convert(model, "bf16")
        if compiled:
            for block in model.layers:
                block.compile(dynamic=False, fullgraph=True, backend="aot_eager_decomp_partition")
        own = {t.untyped_storage().data_ptr() for t in [*model.parameters(), *model.buffers()]}
        kept: dict[int, int] = {}

        def pack(t: Tensor, own: set[int] = own, kept: dict[int, int] = kept) -> Tensor:
            storage = t.untyped_storage()
            if storage.data_ptr() not in own:
                kept[storage.data_ptr()] = storage.nbytes()
            return t

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            loss = model.loss(TOKENS, TOKENS.roll(-1, 1))
        loss.backward()
        gradients = [p.grad for p in model.parameters() if p.requires_grad]
        results.append((loss.detach(), gradients, sum(kept.values())))
    (loss, gradients, eager), (other, others, bytes_) = results
    torch.testing.assert_close(loss, other, rtol=1e-4, atol=1e-3)
    for one, two in zip(gradients, others, strict=True):
        torch.testing.assert_close(one, two, rtol=2e-2, atol=2e-2)
    assert bytes_ <= 1.05 * eager


def test_dropout_is_a_function_of_seed_and_step() -> None:
    model = adapted(options={"dropout": 0.5})
    torch.manual_seed(1)
    for parameter in model.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.5)
    applied = convert(model, "fp32", seed=3)

    def loss_of(step: int) -> float:
        applied.begin_step(step)
        return float(model.loss(TOKENS, TOKENS).detach())

    first, second = loss_of(1), loss_of(2)
    assert first != second
    torch.manual_seed(99)
    assert (loss_of(1), loss_of(2)) == (first, second)
    with torch.no_grad():
        assert loss_of(1) == loss_of(2)


@pytest.mark.parametrize("base", FORMATS)
def test_experts_get_adapters_and_the_router_none(base: Any) -> None:
    model = adapted(base, **MOE)
    adapters = [module for module in model.modules() if isinstance(module, Adapter)]
    assert len(adapters) == 2 * 4
    assert {s.name for adapter in adapters for s in adapter.adapted} == set(PROJECTIONS)
    assert {info.role for info in classify_parameters(model)} == {"adapter"}
    attention, expert = 128 + 2 * 96 + 128, 2 * (64 + 32) + 32 + 64
    assert num_trained_parameters(model) == 2 * 4 * (attention + 4 * expert)
    for parameter in model.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.1)
    model.loss(TOKENS, TOKENS.roll(-1, 1)).backward()
    assert all(p.grad is not None and p.grad.any() for p in model.parameters() if p.requires_grad)
    applied = convert(model, "bf16", fused=True)
    assert not any(applied.is_fused(half) for block in model.layers for half in (block.attn, block.mlp))


def test_experts_without_adapters_keep_their_class() -> None:
    model = adapted("bf16", options={"targets": ("q_proj",)}, **MOE)
    assert all(type(block.mlp.mixture.experts) is Experts for block in model.layers)


def test_what_cannot_be_is_named() -> None:
    with pytest.raises(
        UsageError, match=r"adapter.targets: this model has none of the projections \('gate_proj',\)"
    ):
        adapted(options={"targets": ("gate_proj",)}, gated_mlp=False)
    with pytest.raises(UsageError, match=r"token 64 is outside of the vocabulary of 64 entries"):
        adapted("bf16", (3, 64))
    with pytest.raises(TypeError, match="merge the model first"):
        logical_tensors(adapted("int8"))
