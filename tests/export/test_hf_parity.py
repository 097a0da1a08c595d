"""The model compared with transformers: logits and every gradient in float32, through our export and our import."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from deskside.config.model import ModelConfig
from deskside.model.init import InitOptions, initialize
from deskside.model.transformer import Transformer
from deskside.ops.logical import LogicalTensor, logical_tensors
from deskside.weights.hf import hf_tensors, load_hf, save_hf, to_hf
from deskside.weights.hf_families import family_of

transformers = pytest.importorskip("transformers")

TINY = {
    "vocab_size": 61,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
}
GPT2 = {
    "num_key_value_heads": 4,
    "position_embedding": "learned",
    "hidden_act": "gelu_new",
    "gated_mlp": False,
    "mlp_bias": True,
    "attention_bias": True,
    "norm": "layernorm",
    "norm_bias": True,
    "norm_eps": 1e-5,
    "qk_norm": False,
}
MOE = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
YARN = {"factor": 8.0, "original_max_position_embeddings": 8}
WINDOW = {"num_hidden_layers": 4, "sliding_window": 5, "window_pattern": "SL"}
GEMMA2 = {
    **WINDOW,
    "qk_norm": False,
    "norm_position": "sandwich",
    "hidden_act": "gelu_new",
    "attention_multiplier": 0.25,
    "attn_logit_softcapping": 2.0,
    "final_logit_softcapping": 3.0,
    "embedding_multiplier": 32**0.5,
    "tie_word_embeddings": True,
}
GEMMA3 = {
    **{name: value for name, value in GEMMA2.items() if "softcapping" not in name},
    "qk_norm": True,
    "rope_theta": 1e6,
    "rope_local_base_freq": 1e4,
}
NEOX = {
    "num_key_value_heads": 4,
    "hidden_act": "gelu",
    "gated_mlp": False,
    "mlp_bias": True,
    "attention_bias": True,
    "norm": "layernorm",
    "norm_bias": True,
    "norm_eps": 1e-5,
    "qk_norm": False,
    "parallel_residual": True,
    "partial_rotary_factor": 0.25,
}
GPT_OSS = {
    **MOE,
    "intermediate_size": 2048,
    **WINDOW,
    "attention_bias": True,
    "attention_sinks": True,
    "mlp_bias": True,
    "hidden_act": "clamped_swiglu",
    "qk_norm": False,
}
OLMO2 = {"norm_position": "output", "qk_norm_over": "projection"}
LONGROPE_FACTORS = {
    "short_factor": [1.0, 1.1, 1.3, 1.5, 2.0, 3.0],
    "long_factor": [1.0, 2.0, 3.0, 5.0, 7.0, 9.0],
}
PHI4_MINI = {
    "qk_norm": False,
    "hidden_size": 64,
    "head_dim": 16,
    "partial_rotary_factor": 0.75,
    "rope_scaling": {
        "rope_type": "longrope",
        "factor": 8.0,
        "original_max_position_embeddings": 64,
        **LONGROPE_FACTORS,
    },
}
GRANITE = {
    "attention_multiplier": 0.2,
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
    "logits_scaling": 8.0,
}
SEPARATE = {"fused_qkv": False, "fused_gate_up": False}

CASES: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "qwen3 mha": {"num_key_value_heads": 4},
    "qwen3 mqa": {"num_key_value_heads": 1},
    "qwen3 tied": {"tie_word_embeddings": True},
    "qwen3 separate": SEPARATE,
    "qwen3 separate qkv, tied, mqa": {
        "fused_qkv": False,
        "tie_word_embeddings": True,
        "num_key_value_heads": 1,
    },
    "qwen3 bias": {"attention_bias": True},
    "qwen3 wide heads": {"head_dim": 16, "rope_theta": 1e6, "norm_eps": 1e-3},
    "qwen3 gelu": {"hidden_act": "gelu"},
    "qwen3 relu2": {"hidden_act": "relu2"},
    "qwen3 window": WINDOW,
    "qwen3 window, late": {"num_hidden_layers": 3, "sliding_window": 3, "window_pattern": "LSS"},
    "qwen3 yarn": {"rope_scaling": YARN},
    "qwen3 moe yarn": {**MOE, "rope_scaling": {**YARN, "attention_factor": 1.5, "truncate": False}},
    "llama yarn": {
        "qk_norm": False,
        "rope_scaling": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.4, "beta_fast": 4.0, "beta_slow": 0.5},
    },
    "llama": {"qk_norm": False},
    "llama mha, bias, separate, tied": {
        "qk_norm": False,
        "num_key_value_heads": 4,
        "attention_bias": True,
        "mlp_bias": True,
        "tie_word_embeddings": True,
        **SEPARATE,
    },
    "llama, llama3 rope": {"qk_norm": False, "rope_scaling": {**YARN, "rope_type": "llama3"}},
    "llama, linear rope": {"qk_norm": False, "rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    "qwen2": {"qk_norm": False, "qkv_bias": True},
    "qwen2 window": {**WINDOW, "qk_norm": False, "qkv_bias": True},
    "mistral": {"qk_norm": False, "model_type": "mistral"},
    "mistral window": {"qk_norm": False, "sliding_window": 5, "window_pattern": "S"},
    "ministral": {**WINDOW, "qk_norm": False},
    "phi3": {"qk_norm": False, "model_type": "phi3"},
    "phi3 window": {
        "qk_norm": False,
        "model_type": "phi3",
        "sliding_window": 5,
        "window_pattern": "S",
        "fused_qkv": False,
    },
    "phi3, longrope, some channels rotated": PHI4_MINI,
    "smollm3": {"qk_norm": False, "rope_pattern": "RN", "tie_word_embeddings": True},
    "smollm3 window, mlp bias": {
        "qk_norm": False,
        "rope_pattern": "RRN",
        "num_hidden_layers": 3,
        "sliding_window": 5,
        "window_pattern": "LLS",
        "mlp_bias": True,
    },
    "granite": {"qk_norm": False, **GRANITE},
    "granite, only the logits": {"qk_norm": False, "logits_scaling": 7.0, "tie_word_embeddings": True},
    "mixtral": {**MOE, "qk_norm": False, "intermediate_size": 2048},
    "mixtral window": {
        **MOE,
        "qk_norm": False,
        "intermediate_size": 2048,
        "sliding_window": 5,
        "window_pattern": "S",
    },
    "qwen2 moe, as published": {
        **MOE,
        "qk_norm": False,
        "shared_expert_intermediate_size": 40,
        "qkv_bias": True,
    },
    "gpt2": {**GPT2, "tie_word_embeddings": True},
    "gpt2 untied, separate": {**GPT2, "fused_qkv": False},
    "qwen3 moe": MOE,
    "qwen3 moe, not normalised, tied": {**MOE, "norm_topk_prob": False, "tie_word_embeddings": True},
    "dots1": {**MOE, "scoring_func": "sigmoid"},
    "dots1, not normalised, tied, bias": {
        **MOE,
        "scoring_func": "sigmoid",
        "norm_topk_prob": False,
        "tie_word_embeddings": True,
        "attention_bias": True,
    },
    "dots1, shared expert": {**MOE, "scoring_func": "sigmoid", "shared_expert_intermediate_size": 48},
    "qwen2 moe": {**MOE, "qk_norm": False, "shared_expert_intermediate_size": 40},
    "qwen2 moe, not normalised, tied": {
        **MOE,
        "qk_norm": False,
        "shared_expert_intermediate_size": 40,
        "norm_topk_prob": False,
        "tie_word_embeddings": True,
    },
    "qwen2 moe window": {**MOE, **WINDOW, "qk_norm": False, "shared_expert_intermediate_size": 40},
    "dots1 window": {**MOE, **WINDOW, "scoring_func": "sigmoid"},
    "gemma2": GEMMA2,
    "gemma2 bias, untied, gelu, no caps": {
        **GEMMA2,
        "attention_bias": True,
        "tie_word_embeddings": False,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "attention_multiplier": 3**-0.5,
        "hidden_act": "gelu",
        **SEPARATE,
    },
    "olmo2": OLMO2,
    "olmo2 bias, tied, yarn": {
        **OLMO2,
        "attention_bias": True,
        "tie_word_embeddings": True,
        "rope_scaling": YARN,
    },
    "gemma3": GEMMA3,
    "gemma3 linear, cap": {
        **GEMMA3,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        "rope_local_base_freq": 300.0,
        "final_logit_softcapping": 3.0,
    },
    "olmo3": {**OLMO2, **WINDOW},
    "olmo3 yarn": {**OLMO2, **WINDOW, "rope_scaling": YARN, "rope_local_base_freq": 10000.0},
    "neox": NEOX,
    "neox sequential, tied, no attention bias": {
        **NEOX,
        "parallel_residual": False,
        "partial_rotary_factor": 0.5,
        "attention_bias": False,
        "tie_word_embeddings": True,
        "hidden_act": "gelu_new",
        **SEPARATE,
    },
    "gpt-oss": GPT_OSS,
    "gpt-oss no bias, yarn": {
        **GPT_OSS,
        "attention_bias": False,
        "rope_scaling": {**YARN, "truncate": False},
    },
    "qwen3 moe window": {**MOE, "sliding_window": 4, "window_pattern": "S"},
}


def random_model(**changes: Any) -> Transformer:
    """Return a model whose parameters are all random, norms and biases too, at a scale where each one matters."""
    model = Transformer(ModelConfig(**{**TINY, **changes}))
    initialize(model, 0, InitOptions(embedding_std=0.5, head_std=0.3, output="fan_in"))
    g = torch.Generator().manual_seed(1)
    for tensor in logical_tensors(model):
        if tensor.kind in ("norm", "bias"):
            tensor.view.add_(torch.randn(tensor.view.shape, generator=g) * 0.2)
        if tensor.name.endswith("router.weight"):
            tensor.view.mul_(50)  # far from uniform, so that gradients through the choice are of size one
        if tensor.name.endswith("e_score_correction_bias"):
            tensor.view.mul_(0.2)  # every expert is still chosen
    return model


def batch() -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(2)
    tokens = torch.randint(0, TINY["vocab_size"], (2, 18), generator=g)
    return tokens[:, :-1], tokens[:, 1:]


def their_gradients(theirs: Any, folder: Path) -> dict[str, Tensor]:
    """Return transformers' gradients by the names in published checkpoints. Its names in
    memory differ and are converted when saving.
    """
    with torch.no_grad():
        for parameter in theirs.parameters():
            if parameter.numel():  # not a shared expert without channels
                parameter.copy_(parameter.grad)
    theirs.save_pretrained(folder)
    return {name: grad for name, grad in load_file(folder / "model.safetensors").items() if grad.numel()}


@pytest.mark.parametrize("case", CASES)
def test_logits_and_gradients_equal_transformers(case: str, tmp_path: Path) -> None:
    model = random_model(**CASES[case])
    config = model.config
    save_hf(model, config, None, tmp_path / "hf")
    theirs, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "hf", output_loading_info=True, attn_implementation="eager"
    )
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert type(theirs).__name__ == family_of(config).architecture

    inputs, targets = batch()
    their_logits = theirs(inputs).logits
    loss = F.cross_entropy(their_logits.flatten(0, 1), targets.flatten(), reduction="sum")
    loss.backward()
    their_grads = their_gradients(theirs, tmp_path / "gradients")
    their_grads = {
        name: grad for name, grad in their_grads.items() if not name.endswith("e_score_correction_bias")
    }

    loaded_config, loaded = load_hf(tmp_path / "hf")
    kept = {name: CASES[case][name] for name in SEPARATE if name in CASES[case]}
    assert _same_model(loaded_config.model_copy(update=kept), config)
    for ours in (model, loaded):
        torch.testing.assert_close(ours(inputs), their_logits, atol=1e-4, rtol=1e-4)
        our_loss = ours.loss(inputs, targets, chunk_tokens=5)
        torch.testing.assert_close(our_loss, loss, atol=1e-4, rtol=1e-5)
        our_loss.backward()
        grads = hf_tensors(ours, family_of(config), gradient)
        grads = {name: grad for name, grad in grads.items() if not name.endswith("e_score_correction_bias")}
        assert set(grads) == set(their_grads)
        for name, grad in grads.items():
            # Relative to the largest element: the smallest differ by as many rounding errors, which depend on the CPU.
            atol = 5e-5 * float(their_grads[name].abs().max())
            torch.testing.assert_close(
                grad, their_grads[name], atol=atol, rtol=1e-4, msg=lambda m, n=name: f"{n}: {m}"
            )
            assert grad.abs().max() > 1e-3, f"{name} has next to no gradient, so this compares nothing"


def gradient(tensor: LogicalTensor) -> Tensor:
    if tensor.parameter.grad is None:
        assert tensor.name.endswith("e_score_correction_bias"), tensor.name
        return torch.zeros(0)
    return tensor.slice_of(tensor.parameter.grad)


def _same_model(loaded: ModelConfig, config: ModelConfig) -> bool:
    """Assert equality of everything that an architecture stores. A window pattern may be written differently."""
    config = config.model_copy(update={"initializer_range": config.initializer_range or 0.02})
    ignored = {"window_pattern"}
    if not config.num_experts:
        ignored |= {"num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob", "router_aux_loss_coef"}
    if config.position_embedding == "learned":
        ignored |= {"rope_theta"}
    windows = [[c.layer_window(i) for i in range(c.num_hidden_layers)] for c in (loaded, config)]
    return windows[0] == windows[1] and loaded.model_dump(exclude=ignored) == config.model_dump(
        exclude=ignored
    )


def test_longrope_of_longer_rows_has_the_long_factors(tmp_path: Path) -> None:
    """Published configurations have rows longer than the original length, and so do their exports."""
    scaling = {**PHI4_MINI["rope_scaling"], "original_max_position_embeddings": 8}
    model = random_model(**{**PHI4_MINI, "rope_scaling": scaling})
    save_hf(model, model.config, None, tmp_path / "hf")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    inputs, _ = batch()
    torch.testing.assert_close(model(inputs), theirs(inputs).logits, atol=1e-4, rtol=1e-4)
    loaded, short = load_hf(tmp_path / "hf")
    assert loaded.max_position_embeddings == 8
    torch.testing.assert_close(short(inputs[:, :8]), theirs(inputs[:, :8]).logits, atol=1e-4, rtol=1e-4)
    save_hf(short, loaded, None, tmp_path / "again")
    assert json.loads((tmp_path / "again" / "config.json").read_text())["max_position_embeddings"] == 64


def test_load_balancing_loss_is_that_of_transformers_layer_by_layer(tmp_path: Path) -> None:
    from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

    model = random_model(**MOE, num_key_value_heads=4)
    save_hf(model, model.config, None, tmp_path / "hf")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    inputs, targets = batch()
    out = theirs(inputs, output_router_logits=True)
    expected = torch.stack([load_balancing_loss_func((logits,), 6, 2) for logits in out.router_logits]).mean()
    expected.backward()
    router = model.loss_and_router(inputs, targets)[1]
    assert router is not None
    balance = router.load_balancing_loss()
    torch.testing.assert_close(balance, expected, atol=1e-5, rtol=1e-5)
    balance.backward()
    weight = model.layers[0].mlp.mixture.router.weight
    torch.testing.assert_close(weight.grad, theirs.model.layers[0].mlp.gate.weight.grad, atol=1e-5, rtol=1e-4)


def test_separate_and_fused_are_the_same_model() -> None:
    fused, separate = random_model(), random_model(**SEPARATE)
    assert len(list(separate.parameters())) > len(list(fused.parameters()))
    inputs, _ = batch()
    values = {t.name: t.view for t in logical_tensors(fused)}
    for t in logical_tensors(separate):
        t.view.copy_(values[t.name])
    torch.testing.assert_close(fused(inputs), separate(inputs))
    for one, other in zip(
        to_hf(fused, fused.config)[1].items(), to_hf(separate, separate.config)[1].items(), strict=True
    ):
        assert one[0] == other[0] and torch.equal(one[1], other[1])


@pytest.mark.parametrize("case", ["qwen3", "gpt2", "qwen3 window", "qwen3 moe"])
def test_greedy_text_equals_transformers_generate(case: str, tmp_path: Path) -> None:
    model = random_model(**CASES[case])
    save_hf(model, model.config, None, tmp_path / "hf")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    prompt = batch()[0][:1, :6]
    expected = theirs.generate(prompt, max_new_tokens=20, do_sample=False, pad_token_id=0)
    cache, text, step = model.new_cache(1, 40), prompt, prompt
    for _ in range(20):
        step = model.forward_cached(step, cache)[:, -1:].argmax(-1)
        text = torch.cat((text, step), 1)
    assert text.tolist() == expected.tolist()
