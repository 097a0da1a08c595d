"""A dense model as a mixture of experts: equal to the dense model at step 0, also in transformers; refusals."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from deskside.config.model import ModelConfig
from deskside.config.sections import PrecisionConfig
from deskside.model.init import allocate, initialize
from deskside.model.transformer import Transformer
from deskside.ops.logical import logical_tensors
from deskside.precision.convert import convert
from deskside.utils.errors import UsageError
from deskside.weights.hf import save_hf
from deskside.weights.upcycle import check_upcycling, upcycle
from tests.export.test_hf_parity import TINY, batch, random_model

DENSE = ModelConfig(**TINY)
EIGHT = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
FINE = {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 12}
# Multiplying by 3 rounds, unlike by 4.
THIRDS = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 16}


def mixture_of(dense: Transformer, **experts: Any) -> Transformer:
    config = ModelConfig(**{**dense.config.model_dump(), **experts})
    check_upcycling(dense.config, config, "dense")
    mixture = allocate(config, "cpu")
    initialize(mixture, 5)
    upcycle(mixture, {tensor.name: tensor.view for tensor in logical_tensors(dense)})
    return mixture


# The weights of the chosen experts sum to one within a few roundings of their dtype, and each of the two layers of
# the tiny model adds that error once. bfloat16 rounds by 2^-8, so the loss of some 4 nats changes by less than 1 %.
@pytest.mark.parametrize(
    ("experts", "dtype", "tolerance"),
    [
        pytest.param(EIGHT, torch.float64, 1e-12, id="whole float64"),
        pytest.param(FINE, torch.float64, 1e-12, id="quarters float64"),
        pytest.param(EIGHT, torch.float32, 1e-5, id="whole float32"),
        pytest.param(FINE, torch.float32, 1e-5, id="quarters float32"),
        pytest.param(THIRDS, torch.float32, 1e-5, id="thirds float32"),
        pytest.param(EIGHT, torch.bfloat16, 1e-2, id="whole bfloat16"),
        pytest.param(FINE, torch.bfloat16, 1e-2, id="quarters bfloat16"),
    ],
)
def test_first_loss_is_that_of_the_dense_model(
    experts: dict[str, int], dtype: torch.dtype, tolerance: float
) -> None:
    dense = random_model()
    mixture = mixture_of(dense, **experts)
    tokens_BT, targets_BT = batch()
    losses_BT = [model.to(dtype).token_losses(tokens_BT, targets_BT).double() for model in (dense, mixture)]
    mean, mixed = (losses.mean().item() for losses in losses_BT)
    assert mixed == pytest.approx(mean, rel=tolerance) and mean > 1
    if dtype != torch.bfloat16:
        torch.testing.assert_close(*losses_BT, rtol=10 * tolerance, atol=10 * tolerance)


@pytest.mark.parametrize(
    "shape",
    [
        {"qk_norm": False, "fused_gate_up": False, "fused_qkv": False},
        {"gated_mlp": False, "hidden_act": "relu2", "tie_word_embeddings": True},
        {"attention_bias": True, "sliding_window": 5, "window_pattern": "S"},
        {"mlp_bias": True},
    ],
    ids=["llama, separate", "relu2 without gate, tied", "bias, window", "bias of the MLP"],
)
def test_other_dense_models(shape: dict[str, Any]) -> None:
    dense = random_model(**shape).double()
    mixture = mixture_of(dense, **FINE).double()
    tokens_BT, _ = batch()
    torch.testing.assert_close(mixture(tokens_BT), dense(tokens_BT), rtol=1e-12, atol=1e-12)


def test_each_token_has_whole_copies_and_copies_share_the_tokens() -> None:
    """Every group of four quarter experts has equal counts, and no copy gets nearly all tokens."""
    mixture = mixture_of(random_model(), **FINE)
    tokens_BT, _ = batch()
    statistics = mixture.hidden_and_router(tokens_BT)[1]
    for counts_E in (layer[:16] for layer in statistics):
        copies = counts_E.view(4, 4)
        assert torch.equal(copies, copies[:, :1].expand(4, 4))
        assert copies[:, 0].sum() == tokens_BT.numel() and copies.max() < 0.9 * tokens_BT.numel()


def test_training_makes_copies_different() -> None:
    """Copies get other tokens and, within a copy, other channels, so all experts have different gradients."""
    mixture = mixture_of(random_model(), **FINE)
    tokens_BT, targets_BT = batch()
    loss, router = mixture.loss_and_router(tokens_BT, targets_BT)
    assert router is not None
    (loss + router.load_balancing_loss()).backward()
    gradient = mixture.layers[0].mlp.mixture.router.weight.grad  # type: ignore[union-attr]
    assert isinstance(gradient, torch.Tensor) and len(torch.unique(gradient, dim=0)) == 16


@pytest.mark.parametrize("experts", [EIGHT, FINE], ids=["whole", "quarters"])
def test_transformers_loads_the_mixture_with_the_dense_logits(
    experts: dict[str, int], tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    dense = random_model()
    mixture = mixture_of(dense, **experts)
    save_hf(mixture, mixture.config, None, tmp_path / "hf")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", attn_implementation="eager")
    assert type(theirs).__name__ == "Qwen3MoeForCausalLM"
    tokens_BT, _ = batch()
    with torch.no_grad():
        logits_BTV = theirs(tokens_BT).logits
        torch.testing.assert_close(logits_BTV, mixture(tokens_BT), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(logits_BTV, dense(tokens_BT), rtol=1e-4, atol=1e-4)
    assert math.isfinite(logits_BTV.sum().item())


@pytest.mark.parametrize(
    ("key", "experts"),
    [
        ("hidden_size", {**EIGHT, "hidden_size": 64}),
        ("num_hidden_layers", {**EIGHT, "num_hidden_layers": 3}),
        ("vocab_size", {**EIGHT, "vocab_size": 64}),
        ("rope_theta", {**EIGHT, "rope_theta": 5e5}),
        (
            "shared_expert_intermediate_size",
            {**EIGHT, "scoring_func": "sigmoid", "shared_expert_intermediate_size": 48},
        ),
        ("norm_topk_prob", {**EIGHT, "norm_topk_prob": False}),
        ("moe_intermediate_size", {**EIGHT, "moe_intermediate_size": 20}),
        ("moe_intermediate_size", {**EIGHT, "moe_intermediate_size": 96}),
        ("num_experts", {**FINE, "num_experts": 18}),
        ("num_experts_per_tok", {**FINE, "num_experts_per_tok": 2}),
        ("--model.num_experts", {}),
    ],
)
def test_a_mixture_that_would_compute_something_else_is_refused(key: str, experts: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=key):
        check_upcycling(DENSE, ModelConfig(**{**TINY, **experts}), "dense")


def test_the_dense_models_option_of_experts_does_not_matter() -> None:
    dense = ModelConfig(**TINY, norm_topk_prob=False)
    check_upcycling(dense, DENSE.model_copy(update=EIGHT), "dense")
    with pytest.raises(UsageError, match="sum to one; use true"):
        check_upcycling(dense, dense.model_copy(update=EIGHT), "dense")


def test_a_mixture_is_not_upcycled_again() -> None:
    mixture = ModelConfig(**{**TINY, **EIGHT})
    with pytest.raises(UsageError, match="8 experts already"):
        check_upcycling(mixture, mixture, "dense")


@pytest.mark.parametrize("experts", [EIGHT, FINE], ids=["whole", "quarters"])
def test_fused_experts_begin_as_the_dense_model(experts: dict[str, int]) -> None:
    """The hand-written routing chooses whole copies too. Losses are in bfloat16 as above."""
    dense = random_model()
    mixture = mixture_of(dense, **experts)
    tokens_BT, targets_BT = batch()
    means = []
    for model in (dense, mixture):
        convert(model, "bf16", PrecisionConfig(name="bf16"), fused=True)
        means.append(model.token_losses(tokens_BT, targets_BT).double().mean().item())
    assert means[1] == pytest.approx(means[0], rel=1e-2)
    counts_E = mixture.hidden_and_router(tokens_BT)[1][0][: experts["num_experts"]]
    copies = counts_E.view(-1, 48 // experts["moe_intermediate_size"])
    assert torch.equal(copies, copies[:, :1].expand_as(copies))
    assert counts_E.sum() == tokens_BT.numel() * experts["num_experts_per_tok"]
