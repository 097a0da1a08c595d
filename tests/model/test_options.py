"""Every field of the configuration changes what it should."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from deskside.kernels.attention import AttentionContext
from deskside.kernels.functional import rotate
from deskside.ops.composite import attention
from deskside.ops.logical import logical_tensors
from tests.model.tiny import LEARNED, MOE, WINDOWS, make, tokens


def changed_output(change: dict[str, Any], base: dict[str, Any] | None = None) -> bool:
    """Return True if the outputs differ, with the same weights where they exist in both models."""
    before, after = make(**(base or {})), make(**{**(base or {}), **change})
    values = {t.name: t.view for t in logical_tensors(before)}
    for t in logical_tensors(after):
        if t.name in values and values[t.name].shape == t.view.shape:
            t.view.copy_(values[t.name])
    with torch.no_grad():
        return not torch.allclose(before(tokens()), after(tokens()), atol=1e-5)


@pytest.mark.parametrize(
    ("change", "base"),
    [
        ({"rope_theta": 100.0}, {}),
        (LEARNED, {}),
        ({"hidden_act": "gelu"}, {}),
        ({"hidden_act": "gelu_new"}, {"hidden_act": "relu2"}),
        ({"gated_mlp": False}, {}),
        ({"norm": "layernorm"}, {}),
        ({"norm_eps": 0.1}, {}),
        ({"norm_position": "post"}, {}),
        ({"qk_norm": False}, {}),
        ({"tie_word_embeddings": True}, {}),
        ({"sliding_window": 3, "window_pattern": "S"}, {}),
        ({"window_pattern": "LS"}, {"sliding_window": 3, "window_pattern": "SL"}),
        ({"final_logit_softcapping": 1.0}, {}),
        ({"num_experts_per_tok": 3}, MOE),
        ({"norm_topk_prob": False}, MOE),
        ({"scoring_func": "sigmoid"}, MOE),
        ({"shared_expert_intermediate_size": 24}, {**MOE, "qk_norm": False}),
        ({"shared_expert_intermediate_size": 48}, {**MOE, "scoring_func": "sigmoid"}),
    ],
)
def test_option_changes_the_output(change: dict[str, Any], base: dict[str, Any]) -> None:
    assert changed_output(change, base)


@pytest.mark.parametrize(
    ("change", "name", "shape"),
    [
        ({"vocab_size": 70}, "embed.weight", (70, 32)),
        ({"hidden_size": 40}, "layers.0.attn.q_proj.weight", (32, 40)),
        ({"num_attention_heads": 6}, "layers.0.attn.q_proj.weight", (48, 32)),
        ({"num_key_value_heads": 1}, "layers.1.attn.v_proj.weight", (8, 32)),
        ({"head_dim": 16}, "layers.1.attn.k_proj.weight", (32, 32)),
        ({"intermediate_size": 80}, "layers.0.mlp.gate_proj.weight", (80, 32)),
        ({"num_hidden_layers": 3}, "layers.2.mlp.down_proj.weight", (32, 48)),
        ({**LEARNED, "max_position_embeddings": 50}, "position.weight", (50, 32)),
        ({"mlp_bias": True}, "layers.0.mlp.up_proj.bias", (48,)),
        ({"mlp_bias": True}, "layers.0.mlp.down_proj.bias", (32,)),
        ({"attention_bias": True}, "layers.0.attn.k_proj.bias", (16,)),
        ({"attention_bias": True}, "layers.0.attn.o_proj.bias", (32,)),
        ({"norm": "layernorm", "norm_bias": True}, "norm.bias", (32,)),
        ({"qk_norm": True}, "layers.0.attn.q_norm.weight", (8,)),
        ({**MOE, "moe_intermediate_size": 40}, "layers.0.mlp.experts.5.up_proj.weight", (40, 32)),
        (MOE, "layers.1.mlp.router.weight", (6, 32)),
    ],
)
def test_option_gives_the_parameter(change: dict[str, Any], name: str, shape: tuple[int, ...]) -> None:
    shapes = {t.name: tuple(t.view.shape) for t in logical_tensors(make(**change))}
    assert shapes[name] == shape


def test_options_take_parameters_away() -> None:
    names = {
        t.name
        for t in logical_tensors(make(gated_mlp=False, qk_norm=False, tie_word_embeddings=True, **LEARNED))
    }
    assert not any(part in name for name in names for part in ("gate_proj", "q_norm", "lm_head", "bias"))


@pytest.mark.parametrize("field", ["mlp_bias", "attention_bias", "norm_bias"])
def test_biases_are_read(field: str) -> None:
    model = make(norm="layernorm", **{field: True})
    before = model(tokens())
    for t in logical_tensors(model):
        if t.kind == "bias" and "k_proj" not in t.name:  # a key bias shifts all scores of a query equally
            old = t.view.clone()
            t.view.add_(torch.linspace(-1, 1, old.numel()))
            assert not torch.allclose(model(tokens()), before, atol=1e-5), t.name
            t.view.copy_(old)


def test_fused_fields_decide_how_weights_are_stored() -> None:
    fused, separate = make(), make(fused_qkv=False, fused_gate_up=False)
    assert len(list(fused.layers[0].parameters())) + 3 == len(list(separate.layers[0].parameters()))
    values = {t.name: t.view for t in logical_tensors(fused)}
    for t in logical_tensors(separate):
        assert torch.equal(t.view, values.pop(t.name)), t.name  # the same seed draws the same logical weights
    assert not values
    torch.testing.assert_close(fused(tokens()), separate(tokens()))


def test_post_norm_is_the_formula() -> None:
    """x = norm(x + sublayer(x)), with a normalized embedding and no norm between x and the projections."""
    model = make(norm_position="post", qk_norm=False)
    rotation = model._rotations(17, None)["main"]
    norms = [m.norm for layer in model.layers for m in (layer.attn.input, layer.mlp.input)] + [
        model.final.norm
    ]
    x = norms[0](model.embed(tokens()))
    for number, layer in enumerate(model.layers):
        q, k, v = layer.attn.input.projections[0](x).split([32, 16, 16], -1)
        q, k, v = (t.unflatten(-1, (-1, 8)) for t in (q, k, v))
        o = attention(rotate(q, *rotation), rotate(k, *rotation), v, AttentionContext())
        x = norms[2 * number + 1](x + layer.attn.output(o.flatten(2)))
        gate, up = layer.mlp.input.projections[0](x).chunk(2, -1)
        x = norms[2 * number + 2](x + layer.mlp.output.projection(F.silu(gate) * up))
    torch.testing.assert_close(model.hidden(tokens()), x)


def test_softcap_bounds_logits_and_is_in_the_loss() -> None:
    model = make(final_logit_softcapping=2.0)
    logits = model(tokens())
    assert logits.abs().max() < 2.0
    targets = tokens(seed=1)
    expected = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    torch.testing.assert_close(model.loss(tokens(), targets), expected)


@pytest.mark.parametrize("changes", [{}, MOE, {**LEARNED, "tie_word_embeddings": True}])
def test_token_losses_and_z_loss(changes: dict[str, Any]) -> None:
    model, targets = make(**changes), tokens(seed=1)
    targets[0, :5] = -100
    logits = model(tokens())
    expected = F.cross_entropy(logits.transpose(1, 2), targets, reduction="none")
    losses = model.token_losses(tokens(), targets, chunk_tokens=5)
    torch.testing.assert_close(losses, expected)
    z = (torch.logsumexp(logits, -1) ** 2 * (targets != -100)).sum()
    torch.testing.assert_close(model.loss(tokens(), targets, z_loss=0.1), expected.sum() + 0.1 * z)


def test_a_token_never_sees_the_future() -> None:
    model = make(**WINDOWS)
    one, other = tokens(), tokens()
    other[:, 9] = (other[:, 9] + 1) % 61
    a, b = model(one), model(other)
    assert torch.equal(a[:, :9], b[:, :9]) and not torch.allclose(a[:, 9:], b[:, 9:])


def test_window_layers_see_so_far_and_no_further() -> None:
    model = make(num_hidden_layers=1, sliding_window=4, window_pattern="S")
    one, other = tokens(), tokens()
    other[:, 5] = (other[:, 5] + 1) % 61
    same = torch.isclose(model(one), model(other)).all(-1).all(0).tolist()
    assert same == [not 5 <= t < 5 + 4 for t in range(17)]
