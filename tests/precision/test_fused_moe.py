"""The hand-written gradients of a mixture of experts, compared with the plain model and with transformers."""

from typing import Any

import pytest
import torch

from deskside.model.transformer import Transformer
from deskside.ops.moe import MixtureOfExperts, MoESublayer
from deskside.precision.convert import convert, restore
from tests.precision.small import B, Gradients, T, make, tokens, worst

EXPERTS: dict[str, Any] = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "weights as they are": {"norm_topk_prob": False},
    "one expert per token": {"num_experts_per_tok": 1},
    "all experts": {"num_experts_per_tok": 6},
    "sigmoid": {"scoring_func": "sigmoid"},
    "sigmoid, shared expert": {"scoring_func": "sigmoid", "shared_expert_intermediate_size": 64},
    "shared expert with a gate": {"shared_expert_intermediate_size": 48, "qk_norm": False},
    "shared expert with a gate, tanh GELU": {
        "shared_expert_intermediate_size": 48,
        "qk_norm": False,
        "hidden_act": "gelu_new",
        "gated_mlp": False,
    },
    "sigmoid, weights as they are": {"scoring_func": "sigmoid", "norm_topk_prob": False},
    "tanh GELU, no gate": {"hidden_act": "gelu_new", "gated_mlp": False},
}


def backward(model: Transformer, passes: int = 1) -> tuple[float, Gradients]:
    """Return the gradients of the cross-entropy and of the routers' load-balancing and z-loss."""
    model.zero_grad()
    total = 0.0
    for x, y in zip(tokens().chunk(passes), tokens(1).chunk(passes), strict=True):
        loss, router = model.loss_and_router(x, y)
        assert router is not None
        whole = loss / (B * T) + 0.1 * (router.load_balancing_loss() + router.z_loss()) / passes
        whole.backward()
        total += float(whole.detach())
    return total, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("changes", OPTIONS.values(), ids=OPTIONS)
def test_float64_gradients_are_those_of_the_model(changes: dict[str, Any]) -> None:
    model = make(torch.float64, **{**EXPERTS, **changes})
    loss, truth = backward(model)
    applied = convert(model, "fp32", fused=True)
    assert all(applied.is_fused(block.mlp) for block in model.layers)
    again, found = backward(model)
    assert again == pytest.approx(loss, rel=1e-13)
    assert worst(found, truth) < 1e-12
    restore(model)
    assert worst(backward(model)[1], truth) == 0


@pytest.mark.parametrize("part", ["none", "attention", "mlp", "block"])
@pytest.mark.parametrize("passes", [1, 2])
def test_checkpointing_and_micro_batches(part: str, passes: int) -> None:
    model = make(torch.float64, **EXPERTS, shared_expert_intermediate_size=48, qk_norm=False)
    truth = backward(model, passes)[1]
    applied = convert(model, "fp32", fused=True)
    applied.set_checkpointing(part)
    for block in model.layers:
        assert isinstance(block.mlp, MoESublayer)
        assert block.mlp.forward_override.recompute is (part in ("mlp", "block"))
    assert worst(backward(model, passes)[1], truth) < 1e-12


def test_a_recomputation_is_the_same_to_the_bit() -> None:
    model = make(**EXPERTS)
    applied = convert(model, "bf16", fused=True)
    truth = backward(model)[1]
    applied.set_checkpointing("block")
    assert worst(backward(model)[1], {n: t.double() for n, t in truth.items()}) == 0


def test_weights_are_converted_once_a_step() -> None:
    model = make(**EXPERTS)
    applied = convert(model, "bf16", fused=True)
    applied.begin_step(1)
    backward(model, passes=2)
    layers = len(model.layers)
    assert applied.shared.misses == layers * (2 + 3)  # two of attention; router, gate and up, down
    applied.end_step()
    applied.begin_step(2)
    backward(model)
    assert applied.shared.misses == 2 * layers * (2 + 3)


@pytest.mark.parametrize("fused", [True, False])
def test_a_shared_experts_small_projections_stay_unquantized(fused: bool) -> None:
    """The token gate has one row, which no low-precision product accepts."""
    options: dict[str, Any] = {"shared_expert_intermediate_size": 64, "qk_norm": False}
    options |= {"num_experts": 2}  # both are chosen, so rounding decides for no token
    if not fused:
        options["norm"] = "layernorm"
    model = make(**{**EXPERTS, **options})
    truth = backward(model)[1]
    applied = convert(model, "fp8-rowwise", fused=fused, native=False)
    assert applied.is_fused(model.layers[0].mlp) is fused
    mixture = model.layers[0].mlp.mixture
    assert isinstance(mixture, MixtureOfExperts) and mixture.shared_expert is not None
    assert mixture.shared_expert.token_gate is not None
    assert mixture.shared_expert.token_gate.forward_override is None
    assert (mixture.shared_expert.input.forward_override is None) is fused
    found = backward(model)[1]
    for name in ("layers.0.mlp.mixture.shared_expert.output.weight", "layers.1.attn.output.weight"):
        assert 0 < float((found[name] - truth[name]).norm() / truth[name].norm()) < 0.25
