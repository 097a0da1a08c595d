"""Directories published before transformers 5: ours computes the same as transformers."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, Gemma3Config, Gemma3ForConditionalGeneration

from deskside.weights.hf import load_hf, save_hf

SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
}
GEMMA = {
    **SIZES,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 12,
    "sliding_window": 5,
    "rms_norm_eps": 1e-6,
}
YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 8, "attention_factor": 1.2}
FILES: dict[str, dict[str, Any]] = {
    "gemma 2": {**GEMMA, "model_type": "gemma2", "rope_theta": 10000.0, "cache_implementation": "hybrid"},
    "gemma 2 without caps": {
        **GEMMA,
        "model_type": "gemma2",
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
    },
    "gemma 3": {
        **GEMMA,
        "model_type": "gemma3_text",
        "rope_theta": 500.0,
        "rope_local_base_freq": 300.0,
        "rope_scaling": {"rope_type": "linear", "factor": 4.0},
        "sliding_window_pattern": 3,
        "attn_logit_softcapping": None,
    },
    "olmo 2": {**SIZES, "model_type": "olmo2", "rope_theta": 500000, "rms_norm_eps": 1e-6},
    "olmo 3": {
        **SIZES,
        "model_type": "olmo3",
        "rope_theta": 500000,
        "rope_scaling": YARN,
        "sliding_window": 5,
    },
    "pythia": {
        **SIZES,
        "model_type": "gpt_neox",
        "hidden_act": "gelu",
        "rotary_pct": 0.25,
        "rotary_emb_base": 300,
        "layer_norm_eps": 1e-5,
        "use_parallel_residual": True,
        "tie_word_embeddings": False,
    },
    "gpt-neox": {
        **SIZES,
        "model_type": "gpt_neox",
        "hidden_act": "gelu_fast",
        "use_parallel_residual": False,
    },
    "gpt-oss": {
        **SIZES,
        "model_type": "gpt_oss",
        "num_key_value_heads": 2,
        "head_dim": 8,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "experts_per_token": 2,
        "sliding_window": 5,
        "swiglu_limit": 7.0,
        "rope_theta": 150000,
        "rope_scaling": {**YARN, "truncate": False},
        "router_aux_loss_coef": 0.9,
    },
    "granite": {**SIZES, "model_type": "granite", "attention_multiplier": 2.0},
    "ministral": {
        **SIZES,
        "model_type": "mistral",
        "num_key_value_heads": 2,
        "head_dim": 8,
        "sliding_window": 5,
        "layer_types": ["full_attention", "sliding_attention"] * 3,
    },
}

FILES["gpt-oss without scaling"] = {
    name: value for name, value in FILES["gpt-oss"].items() if not name.startswith("rope")
}


def published(name: str, folder: Path) -> torch.nn.Module:
    """Write the directory with random weights, norms and biases too, and return transformers' model."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(FILES[name]))
    theirs = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), attn_implementation="eager")
    generator = torch.Generator().manual_seed(0)
    for parameter in theirs.parameters():
        parameter.data += torch.randn(parameter.shape, generator=generator) * 0.3
    theirs.save_pretrained(folder / "saved")
    shutil.move(folder / "saved" / "model.safetensors", folder / "model.safetensors")
    return theirs.eval()


@pytest.mark.parametrize("name", FILES)
def test_logits_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    theirs = published(name, tmp_path / "hf")
    tokens = torch.randint(0, 61, (2, 17), generator=torch.Generator().manual_seed(1))
    _, ours = load_hf(tmp_path / "hf")
    torch.testing.assert_close(ours(tokens), theirs(tokens).logits, atol=1e-4, rtol=1e-4)


def test_masks_that_pythia_s_files_have_are_not_weights(tmp_path: Path) -> None:
    theirs = published("pythia", tmp_path / "hf")
    file = tmp_path / "hf" / "model.safetensors"
    tensors = load_file(file)
    assert "embed_out.weight" in tensors
    for layer in range(SIZES["num_hidden_layers"]):
        prefix = f"gpt_neox.layers.{layer}.attention"
        tensors |= {f"{prefix}.bias": torch.ones(1, 1, 64, 64, dtype=torch.bool)}
        tensors |= {
            f"{prefix}.masked_bias": torch.tensor(-1e9),
            f"{prefix}.rotary_emb.inv_freq": torch.ones(1),
        }
    save_file(tensors, file)
    tokens = torch.arange(9)[None]
    torch.testing.assert_close(load_hf(file.parent)[1](tokens), theirs(tokens).logits, atol=1e-4, rtol=1e-4)


def test_the_text_model_of_gemma_3_with_images(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its text_config omits values that are defaults in transformers. The export is a text model."""
    text = {
        "hidden_size": 32,
        "num_hidden_layers": 3,
        "intermediate_size": 48,
        "head_dim": 8,
        "sliding_window": 5,
    }
    vision = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    config = Gemma3Config(
        text_config={**text, "vocab_size": 61, "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
        vision_config={**vision, "image_size": 28, "patch_size": 14},
        mm_tokens_per_image=4,
    )
    theirs = Gemma3ForConditionalGeneration._from_config(config, attn_implementation="eager").eval()
    theirs.save_pretrained(tmp_path / "hf")
    file = tmp_path / "hf" / "config.json"
    content = json.loads(file.read_text())
    rope = {
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        "vocab_size": 61,
        "model_type": "gemma3_text",
    }
    file.write_text(json.dumps({**content, "text_config": {**text, **rope}}))
    tokens = torch.arange(17)[None]
    found, ours = load_hf(tmp_path / "hf")
    assert (found.num_attention_heads, found.num_key_value_heads, found.max_position_embeddings) == (
        8,
        4,
        131072,
    )
    assert "only its text model" in capsys.readouterr().err
    torch.testing.assert_close(ours(tokens), theirs(tokens).logits, atol=1e-4, rtol=1e-4)
    save_hf(ours, found, None, tmp_path / "text")
    text_model = AutoModelForCausalLM.from_pretrained(tmp_path / "text")
    assert type(text_model).__name__ == "Gemma3ForCausalLM"
    torch.testing.assert_close(text_model(tokens).logits, ours(tokens), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["gemma 2", "gpt-neox"])
@pytest.mark.parametrize("same", [False, True])
def test_a_head_of_its_own_is_used_though_the_config_ties_it(name: str, same: bool, tmp_path: Path) -> None:
    folder = tmp_path / "hf"
    published(name, folder)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    (embed,) = (key for key in tensors if "embed" in key and key != "embed_out.weight")
    head = "embed_out.weight" if name == "gpt-neox" else "lm_head.weight"
    tensors[head] = tensors[embed] + (0 if same else 0.5 * torch.randn(tensors[embed].shape))
    save_file(tensors, file, metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps({**FILES[name], "tie_word_embeddings": True}))
    theirs = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    tokens = torch.randint(0, 61, (2, 17), generator=torch.Generator().manual_seed(1))
    config, ours = load_hf(folder)
    assert config.tie_word_embeddings == same
    torch.testing.assert_close(ours(tokens), theirs(tokens).logits, atol=1e-4, rtol=1e-4)
