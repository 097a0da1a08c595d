"""Hand-written gradients of the sublayers, compared with the plain model."""

from typing import Any

import pytest
import torch

from deskside.config.recipes import RECIPES
from deskside.kernels.attention import AttentionContext, document_positions
from deskside.model.block import Block
from deskside.ops.composite import AttentionSublayer
from deskside.precision.convert import convert, restore, why_not_fused
from tests.precision.small import (
    B,
    T,
    backward,
    error_and_slope,
    everywhere,
    fresh,
    make,
    quantized_layers,
    worst,
)

QUANTIZED = [name for name, recipe in RECIPES.items() if recipe.quantized]
OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "no QK-norm": {"qk_norm": False},
    "ReLU^2, no gate": {"hidden_act": "relu2", "gated_mlp": False},
    "GELU": {"hidden_act": "gelu"},
    "tanh GELU, no gate": {"hidden_act": "gelu_new", "gated_mlp": False},
    "windows": {"sliding_window": 9, "window_pattern": "SL"},
    "learned positions": {"position_embedding": "learned"},
    "learned positions, no QK-norm": {"position_embedding": "learned", "qk_norm": False},
    "tied embeddings": {"tie_word_embeddings": True},
    "as many keys as queries": {"num_key_value_heads": 4},
    "softcap": {"final_logit_softcapping": 5.0},
    "layers without positions": {"rope_pattern": "RN"},
    "Granite": {
        "qk_norm": False,
        "attention_multiplier": 0.2,
        "embedding_multiplier": 12.0,
        "residual_multiplier": 0.22,
        "logits_scaling": 8.0,
    },
    "Gemma 2 and 3": {
        "norm_position": "sandwich",
        "attn_logit_softcapping": 2.0,
        "attention_multiplier": 0.2,
        "embedding_multiplier": 3.0,
        "rope_local_base_freq": 100.0,
        "hidden_act": "gelu_new",
        "sliding_window": 9,
        "window_pattern": "SL",
    },
}


@pytest.mark.parametrize("backend", ["sdpa", "reference"])
@pytest.mark.parametrize("changes", OPTIONS.values(), ids=OPTIONS)
def test_float64_gradients_are_those_of_the_model(changes: dict[str, Any], backend: str) -> None:
    model = make(torch.float64, **changes)
    context = AttentionContext(backend="reference" if changes.get("sliding_window") else backend)
    loss, truth = backward(model, context)
    applied = convert(model, "fp32", fused=True)
    assert all(applied.is_fused(half) for block in model.layers for half in (block.attn, block.mlp))
    again, found = backward(model, context)
    assert again == pytest.approx(loss, rel=1e-14)
    assert worst(found, truth) < 1e-13
    assert applied.shared.misses == 2 * 2 * len(model.layers)  # the fused sublayers did compute it
    restore(model)
    assert worst(backward(model, context)[1], truth) == 0


def test_documents_of_packed_rows() -> None:
    model = make(torch.float64)
    ends = [0, 11, T, T + 1, 2 * T, 3 * T, 3 * T + 40, 4 * T, 4 * T, 4 * T]
    cu_seqlens = torch.tensor(ends, dtype=torch.int32)
    context = AttentionContext(cu_seqlens=cu_seqlens, max_seqlen=T, backend="reference")
    options = {"positions_BT": document_positions(cu_seqlens, B, T)}
    truth = backward(model, context, **options)[1]
    assert worst(backward(model)[1], truth) > 1e-3  # boundaries matter
    convert(model, "fp32", fused=True)
    assert worst(backward(model, context, **options)[1], truth) < 1e-13


@pytest.mark.parametrize("what", ["none", "attention", "mlp", "block"])
@pytest.mark.parametrize("passes", [1, 2, 4])
def test_checkpointing_and_micro_batches(what: str, passes: int) -> None:
    model = make(torch.float64)
    truth = backward(model)[1]
    applied = convert(model, "fp32", fused=True)
    applied.set_checkpointing(what)
    for half in (half for block in model.layers for half in (block.attn, block.mlp)):
        kind = "attention" if isinstance(half, AttentionSublayer) else "mlp"
        assert half.forward_override.recompute is (what in (kind, "block"))
    assert worst(backward(model, passes=passes)[1], truth) < 1e-13


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("bf16", "block"),
        *(pytest.param(name, "block", marks=pytest.mark.full) for name in QUANTIZED),
        ("fp8-delayed", "mlp"),
        ("nvfp4-eden", "attention"),
    ],
)
def test_what_is_recomputed_is_the_same_to_the_bit(name: str, what: str) -> None:
    """Scales, signs and, in every operand of a forward, rounding are those of the first time."""
    model = make()
    applied = convert(model, everywhere(name), fused=True, native=False)
    made = []
    for rung in ("none", what):
        applied.set_checkpointing(rung)
        applied.scales.reset()
        for step in (1, 2, 3):
            applied.begin_step(step)
            made.append(backward(model)[1])
            applied.end_step()
    for found, truth in zip(made[3:], made[:3], strict=True):
        assert worst(found, {n: t.double() for n, t in truth.items()}) == 0


def test_a_recomputation_stops_before_the_second_product() -> None:
    """Its result is the sublayer's output, which is not needed again."""
    model = make()
    applied = convert(model, "bf16", fused=True)
    uses = {}
    for rung in ("none", "mlp", "block"):
        applied.set_checkpointing(rung)
        before = applied.shared.hits + applied.shared.misses
        backward(model)
        uses[rung] = applied.shared.hits + applied.shared.misses - before
    # two products of each sublayer read a weight in the forward, and two in the backward
    layers = len(model.layers)
    assert uses == {"none": 8 * layers, "mlp": 9 * layers, "block": 10 * layers}


# Errors of all gradients as one vector, in a newly initialized model. The noise of one product is 4 to 7 % in FP8 and
# 13 to 19 % in NVFP4 (config/recipes.py). Weight gradients, most of the vector, pass through one or two noisy
# products.
BANDS = {
    "bf16": (0.002, 0.008),
    "fp8-rowwise": (0.025, 0.05),
    "fp8": (0.03, 0.06),
    "nvfp4": (0.11, 0.18),
    "fp8-nvfp4": (0.06, 0.11),
}


@pytest.mark.parametrize("name", ["bf16", *QUANTIZED])
def test_gradient_errors_lie_within_their_band(name: str) -> None:
    model = fresh()
    loss, truth = backward(model)
    applied = convert(model, everywhere(name), fused=True, native=False)
    assert quantized_layers(applied) == (0 if name == "bf16" else 4 * len(model.layers))
    least, most = BANDS.get(name) or BANDS[name.partition("-")[0]]
    for step in (1, 2, 3):
        applied.begin_step(step)
        low, found = backward(model)
        applied.end_step()
        error, slope = error_and_slope(found, truth)
        assert low == pytest.approx(loss, rel=1e-3)
        assert least < error < most
        assert slope == pytest.approx(1, abs=0.01)  # no scale is wrong


def test_delayed_scales_of_what_begins_as_zero() -> None:
    """Projections that write to the stream begin as zero, so earlier weights have no gradient in
    the first step. A scale from that step would flush the later gradients to zero. Later
    gradients may saturate, but keep their direction.
    """
    model = fresh()
    applied = convert(model, everywhere("fp8-delayed"), fused=True, native=False)
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(1, 7):
        optimizer.param_groups[0]["lr"] = 1e-3 * step / 40
        exact = fresh()
        exact.load_state_dict(model.state_dict())
        truth = backward(exact)[1]
        applied.begin_step(step)
        found = backward(model)[1]
        applied.end_step()
        optimizer.step()
        for name in (name for name, gradient in truth.items() if gradient.ndim == 2 and "layers" in name):
            if step == 1 and "input" in name:
                assert not truth[name].any() and not found[name].any()
                continue
            assert torch.cosine_similarity(found[name].flatten(), truth[name].flatten(), dim=0) > 0.6
            if step <= 2:
                assert (found[name] - truth[name]).norm() < 0.12 * truth[name].norm()


@pytest.mark.parametrize("name", ["nvfp4", "nvfp4-unbiased", "nvfp4-eden"])
def test_rounding_differs_from_step_to_step_and_repeats(name: str) -> None:
    model = make()
    applied = convert(model, everywhere(name), native=False, seed=5)

    def step(number: int) -> dict[str, torch.Tensor]:
        applied.begin_step(number)
        found = backward(model)[1]
        applied.end_step()
        return {n: t.double() for n, t in found.items()}

    first = step(1)
    assert worst(step(2), first) > 0.01
    assert worst(step(1), first) == 0
    restore(model)
    other = convert(model, everywhere(name), native=False, seed=6)
    other.begin_step(1)
    assert worst(backward(model)[1], first) > 0.01


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"norm": "layernorm"}, "RMSNorm"),
        ({"norm_position": "post"}, "RMSNorm before"),
        ({"fused_qkv": False}, "not fused"),
        ({"attention_bias": True}, "bias"),
        ({"qkv_bias": True}, "bias"),
        ({"partial_rotary_factor": 0.5}, "some channels"),
        ({"head_dim": 48}, "power of two"),
    ],
)
def test_what_the_halves_do_not_cover_is_named(changes: dict[str, Any], reason: str) -> None:
    block = make(**changes).layers[0]
    assert isinstance(block, Block)
    assert reason in (why_not_fused(block.attn) or "")


@pytest.mark.parametrize("changes", [{"norm": "layernorm"}, {"attention_bias": True, "mlp_bias": True}])
def test_single_layers_take_what_the_halves_do_not_cover(changes: dict[str, Any]) -> None:
    """Quantized layer by layer. FP32 leaves such a model unchanged."""
    model = fresh(**changes)
    truth = {n: t.double() for n, t in backward(model)[1].items()}
    applied = convert(model, everywhere("fp8-tensorwise"), native=False)
    assert quantized_layers(applied) == 4 * len(model.layers)
    applied.begin_step(1)
    error, slope = error_and_slope(backward(model)[1], truth)
    assert BANDS["fp8"][0] < error < BANDS["fp8"][1] and slope == pytest.approx(1, abs=0.01)
    convert(model, "fp32", fused=True)
    assert worst(backward(model)[1], truth) == 0
