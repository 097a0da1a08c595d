"""Directories written by the PEFT library and merged by us: the logits equal PEFT's, unmerged."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from deskside.export.peft import save_peft
from deskside.utils.errors import RunError, UsageError
from deskside.weights.hf import save_hf
from deskside.weights.load import load_model
from deskside.weights.merge_adapters import merged
from deskside.weights.peft_adapters import base_of, merge_peft, read_peft
from deskside.weights.peft_config import read_peft_config
from tests.export.adapted import MOE, trained, without_adapters

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

TOKENS = torch.tensor([[3, 5, 17, 60, 3, 9, 11, 2, 44, 5], [5, 5, 1, 0, 30, 31, 32, 33, 3, 3]])
SHAPE = {
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 64, "initializer_range": 0.2,
}  # fmt: skip
GPT2 = {
    "vocab_size": 64,
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 64,
    "initializer_range": 0.2,
}
QWEN, LLAMA = "Qwen3", "Llama"
ATTENTION = ["q_proj", "v_proj"]
TIED = {"tie_word_embeddings": True}
# Architecture, its options, and those of LoraConfig.
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "lora": (QWEN, {}, {"target_modules": ATTENTION}),
    "rslora": (QWEN, {}, {"target_modules": ATTENTION, "use_rslora": True, "r": 9}),
    "dora": (LLAMA, {}, {"target_modules": [*ATTENTION, "down_proj"], "use_dora": True}),
    "dora beside biases": (
        LLAMA,
        {"attention_bias": True, "mlp_bias": True},
        {"target_modules": "all-linear", "use_dora": True, "bias": "all"},
    ),
    "bias of adapted modules": (
        LLAMA,
        {"attention_bias": True, "mlp_bias": True},
        {"target_modules": ["o_proj"], "bias": "lora_only"},
    ),
    "all linear": (QWEN, {}, {"target_modules": "all-linear"}),
    "regular expression": (QWEN, {}, {"target_modules": r".*layers\.1\..*(gate|up)_proj"}),
    "patterns": (
        QWEN,
        {},
        {
            "target_modules": "all-linear",
            "use_rslora": True,
            "rank_pattern": {"q_proj": 3, r"layers\.1\.mlp\.down_proj": 6},
            "alpha_pattern": {"v_proj": 40, "q_proj": 5},
        },
    ),
    "one layer": (QWEN, {}, {"target_modules": ATTENTION, "layers_to_transform": [1]}),
    "modules to save": (QWEN, {}, {"target_modules": ATTENTION, "modules_to_save": ["lm_head", "embed_tokens"]}),
    "norms to save": (QWEN, {}, {"target_modules": ATTENTION, "modules_to_save": ["input_layernorm", "q_norm"]}),
    "embedding to save, tied": (QWEN, TIED, {"target_modules": ATTENTION, "modules_to_save": ["embed_tokens"]}),
    "head to save, tied": (QWEN, TIED, {"target_modules": ATTENTION, "modules_to_save": ["lm_head"]}),
    "both to save, tied": (
        QWEN,
        TIED,
        {"target_modules": ATTENTION, "modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
    ),
    "head and embedding adapted": (QWEN, {}, {"target_modules": ["lm_head", "embed_tokens", "k_proj"]}),
    "embedding adapted, tied": (QWEN, TIED, {"target_modules": ["embed_tokens"]}),
    "head adapted, tied": (QWEN, TIED, {"target_modules": ["lm_head", "o_proj"]}),
    "single tokens": (QWEN, {}, {"target_modules": ATTENTION, "trainable_token_indices": [60, 3]}),
    "single tokens, tied": (QWEN, TIED, {"target_modules": ATTENTION, "trainable_token_indices": [60, 3]}),
    "head adapted and single tokens, tied": (
        QWEN,
        TIED,
        {"target_modules": ["lm_head", "o_proj"], "trainable_token_indices": [60, 3]},
    ),
    "single tokens of both": (
        QWEN,
        {},
        {"target_modules": ATTENTION, "trainable_token_indices": {"embed_tokens": [60, 3], "lm_head": [5]}},
    ),
    "qwen2, with bias": ("Qwen2", {}, {"target_modules": ATTENTION, "use_dora": True, "bias": "lora_only"}),
    "gemma2, norms to save": (
        "Gemma2",
        {"query_pre_attn_scalar": 16, "sliding_window": 8},
        {"target_modules": "all-linear", "modules_to_save": ["norm", "pre_feedforward_layernorm"]},
    ),
    "phi3, stacked": (
        "Phi3", {"pad_token_id": None}, {"target_modules": ["qkv_proj", "gate_up_proj"], "use_dora": True}
    ),
    "gpt-neox, stacked by head": (
        "GPTNeoX", {"num_key_value_heads": None}, {"target_modules": "all-linear", "use_dora": True, "bias": "all"}
    ),
    "gpt-neox, tables": (
        "GPTNeoX",
        {"num_key_value_heads": None},
        {"target_modules": ["query_key_value"], "modules_to_save": ["embed_in", "embed_out"]},
    ),
    "olmo2": ("Olmo2", {}, {"target_modules": "all-linear", "modules_to_save": ["post_feedforward_layernorm"]}),
    "mixtral, attention": (  # the usual list also names modules that do not exist
        "Mixtral",
        {"num_local_experts": 4, "num_experts_per_tok": 2},
        {"target_modules": ["q_proj", "o_proj", "gate_proj", "down_proj"]},
    ),
    "gpt2": ("GPT2", {}, {"target_modules": ["c_attn", "c_fc"], "fan_in_fan_out": True}),
    "gpt2, dora": ("GPT2", {}, {"target_modules": ["c_attn"], "fan_in_fan_out": True, "use_dora": True}),
}  # fmt: skip


def base_model(architecture: str, options: dict[str, Any], folder: Path) -> None:
    torch.manual_seed(0)
    shape = GPT2 if architecture == "GPT2" else {**SHAPE, "tie_word_embeddings": False}
    config = getattr(transformers, f"{architecture}Config")(**{**shape, **options})
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim < 2:
                parameter += 0.1 * torch.randn_like(parameter)
            else:
                parameter.copy_(parameter.bfloat16())  # values that a frozen base in BF16 can represent too
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text(json.dumps(TOKENIZER))


TOKENIZER: dict[str, Any] = {
    "version": "1.0",
    "truncation": None,
    "padding": None,
    "added_tokens": [
        {"id": 0, "content": "<|endoftext|>", "single_word": False, "lstrip": False, "rstrip": False,
         "normalized": False, "special": True}
    ],
    "normalizer": None,
    "pre_tokenizer": None,
    "post_processor": None,
    "decoder": None,
    "model": {"type": "BPE", "vocab": {"<|endoftext|>": 0, **{chr(64 + i): i for i in range(1, 60)}}, "merges": []},
}  # fmt: skip


def move(model: Any) -> None:
    """Change everything that trains. Otherwise, half of the adapters would have no effect."""
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                scale = 0.3 if "magnitude" in name else 0.1
                parameter += scale * torch.randn_like(parameter)


def adapted(tmp_path: Path, architecture: str, options: dict[str, Any], lora: dict[str, Any]) -> Any:
    """Write a base and adapters of it. Return PEFT's model, loaded from these files."""
    base_model(architecture, options, tmp_path / "base")
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    defaults = {"r": 4, "lora_alpha": 12, "task_type": "CAUSAL_LM", "lora_dropout": 0.1}
    model = peft.get_peft_model(base, peft.LoraConfig(**{**defaults, **lora}))
    move(model)
    model.save_pretrained(tmp_path / "adapter")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    return peft.PeftModel.from_pretrained(again, tmp_path / "adapter").eval()


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_logits_are_those_of_peft(case: tuple[str, dict[str, Any], dict[str, Any]], tmp_path: Path) -> None:
    with torch.no_grad():
        expected = adapted(tmp_path, *case)(TOKENS).logits
        loaded = load_model(tmp_path / "adapter")
        before = load_model(tmp_path / "base").model(TOKENS)
        torch.testing.assert_close(loaded.model(TOKENS), expected, rtol=1e-4, atol=1e-4)
    assert float((expected - before).abs().max()) > 0.1
    assert loaded.name == "adapter" and loaded.adapters == tmp_path / "adapter"


OWN: dict[str, tuple[dict[str, Any], tuple[int, ...], dict[str, Any]]] = {
    "dense": ({}, (), {}),
    "tokens of tied tables": ({"rank_stabilised": True}, (60, 3), TIED),
    "tokens of both tables": ({"targets": ["o_proj"]}, (60, 3), {}),
    "experts": ({}, (3,), MOE),
    "experts, one weight": ({"targets": ["up_proj"], "rank_stabilised": True}, (), MOE),
}


@pytest.mark.parametrize("case", OWN.values(), ids=OWN)
def test_our_own_exports_load(
    case: tuple[dict[str, Any], tuple[int, ...], dict[str, Any]], tmp_path: Path
) -> None:
    adapter, tokens, shape = case
    model, options = trained(adapter, tokens, **shape)
    base = merged(without_adapters(trained(adapter, (), **shape)[0]))
    save_hf(base, model.config, None, tmp_path / "base")
    (tmp_path / "base/tokenizer.json").write_text(json.dumps(TOKENIZER))
    save_peft(model, options, "base", tmp_path / "adapter")  # relative to the folder that contains both
    ours = load_model(tmp_path / "adapter").model
    with torch.no_grad():
        torch.testing.assert_close(ours(TOKENS), model(TOKENS), rtol=1e-5, atol=2e-5)
        assert float((base(TOKENS) - model(TOKENS)).abs().max()) > 0.1


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    """A directory with LoRA adapters."""
    adapted(tmp_path, QWEN, {}, {"target_modules": ATTENTION})
    return tmp_path / "adapter"


def change(folder: Path, **values: Any) -> None:
    file = folder / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


@pytest.mark.parametrize(
    ("saved", "tied", "stay_tied"),
    [
        (["embed_tokens"], True, True),
        (["embed_tokens"], True, False),
        (None, True, False),
        (None, False, False),
    ],
)
def test_tables_of_a_larger_vocabulary_are_taken_over(
    saved: list[str] | None, tied: bool, stay_tied: bool, tmp_path: Path
) -> None:
    base_model(QWEN, {"tie_word_embeddings": tied}, tmp_path / "base")
    larger = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    larger.resize_token_embeddings(70)
    options = {"modules_to_save": saved, "ensure_weight_tying": stay_tied}
    lora = peft.LoraConfig(r=4, target_modules=ATTENTION, **options)
    model = peft.get_peft_model(larger, lora).eval()
    move(model)
    model.save_pretrained(tmp_path / "adapter")
    loaded = load_model(tmp_path / "adapter")
    assert loaded.config.vocab_size == 70
    assert loaded.config.tie_word_embeddings == (tied and (saved is None or stay_tied))
    adapters = read_peft(tmp_path / "adapter")
    names = set(adapters.tensors)
    merge_peft(load_model(tmp_path / "base").model, adapters)
    assert set(adapters.tensors) == names  # they can be merged into another model as well
    with torch.no_grad():
        torch.testing.assert_close(loaded.model(TOKENS), model(TOKENS).logits, rtol=1e-4, atol=1e-4)


def test_the_base_can_be_named(plain: Path) -> None:
    change(plain, base_model_name_or_path="/nowhere/base")
    with pytest.raises(UsageError, match=r"/nowhere/base.*--base"):
        load_model(plain)
    base = plain.parent / "base"
    assert torch.isfinite(load_model(plain, base=base).model(TOKENS)).all()
    with pytest.raises(UsageError, match=r"--base: is for PEFT adapters"):
        load_model(base, base=base)
    with pytest.raises(UsageError, match=r"names itself"):
        load_model(plain, base=plain)
    other = plain.parent / "other"
    shutil.copytree(plain, other)
    change(other, base_model_name_or_path=str(plain))
    with pytest.raises(UsageError, match=r"names itself"):
        load_model(plain, base=other)
    change(plain, base_model_name_or_path=None)
    with pytest.raises(UsageError, match=r"names no base model.*--base"):
        load_model(plain)


def test_the_revision_of_the_base_is_kept(plain: Path) -> None:
    change(plain, base_model_name_or_path="owner/model", revision="v2")
    config = read_peft_config(plain)
    assert base_of(plain, config) == "owner/model@v2"
    change(plain, base_model_name_or_path="base")  # a path has none
    assert base_of(plain, read_peft_config(plain)) == str(plain.resolve().parent / "base")


def test_a_tokenizer_beside_the_adapters_is_used(plain: Path) -> None:
    assert load_model(plain).tokenizer_dir == plain.parent / "base"
    (plain / "tokenizer.json").write_text(json.dumps(TOKENIZER))
    (plain.parent / "base/generation_config.json").write_text(json.dumps({"eos_token_id": [0, 7]}))
    loaded = load_model(plain)
    assert loaded.tokenizer_dir == plain and loaded.eos_tokens == {0, 7}


def test_stacked_experts_with_other_names_are_refused(tmp_path: Path) -> None:
    shape = {"num_local_experts": 4, "num_experts_per_tok": 2}
    adapted(tmp_path, "Mixtral", shape, {"target_parameters": ["mlp.experts.down_proj"], "lora_dropout": 0.0})
    with pytest.raises(UsageError, match=r"MixtralForCausalLM.*experts.*merge_and_unload"):
        load_model(tmp_path / "adapter")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"peft_type": "VERA"}, r"VERA is not supported.*merge_and_unload"),
        ({"peft_type": "IA3"}, r"IA3 is not supported"),
        ({"peft_type": None}, r"peft_type"),
        ({"task_type": "SEQ_CLS"}, r"SEQ_CLS is not supported"),
        ({"layer_replication": [[0, 2], [1, 2]]}, r"layer_replication is not supported"),
        ({"use_qalora": True}, r"use_qalora is not supported"),
        ({"alora_invocation_tokens": [3]}, r"alora_invocation_tokens is not supported"),
        ({"lora_bias": True}, r"lora_bias is not supported"),
        ({"something_of_2027": 3}, r"something_of_2027 is not supported"),
        ({"init_lora_weights": "pissa_niter_4"}, r"pissa_niter_4 also changes the base weights"),
        ({"rank_pattern": {"q_proj[": 3}}, r"not a regular expression"),
    ],
)
def test_what_is_not_supported_is_refused(values: dict[str, Any], message: str, plain: Path) -> None:
    change(plain, **values)
    with pytest.raises(UsageError, match=message) as caught:
        load_model(plain)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"r": 8}, r"rank 8"),
        ({"r": -1}, r"\br\b.*greater than 0"),
        ({"bias": "some"}, r"bias"),
        ({"use_dora": True}, r"q_proj"),
        ({"trainable_token_indices": {"embed_tokens": 3}}, r"trainable_token_indices"),
    ],
)
def test_a_configuration_that_does_not_fit_the_tensors_is_named(
    values: dict[str, Any], message: str, plain: Path
) -> None:
    change(plain, **values)
    with pytest.raises((RunError, UsageError), match=message):
        load_model(plain)


def test_damaged_and_foreign_tensors_are_named(plain: Path) -> None:
    file = plain / "adapter_model.safetensors"
    whole, tensors = file.read_bytes(), load_file(file)
    file.write_bytes(whole[:-10])
    with pytest.raises(RunError, match=r"adapter_model.safetensors: cannot be read"):
        load_model(plain)
    prefix = "base_model.model.model.layers"
    a = tensors.pop(f"{prefix}.0.self_attn.q_proj.lora_A.weight")
    save_file(tensors, file)
    with pytest.raises(UsageError, match=r"layers.0.self_attn.q_proj that consist of lora_B"):
        load_model(plain)
    tensors[f"{prefix}.0.self_attn.q_proj.lora_A.weight"] = a[:, :-1].contiguous()
    save_file(tensors, file)
    with pytest.raises(RunError, match=r"q_proj has another shape in this base model"):
        load_model(plain)
    tensors[f"{prefix}.0.self_attn.q_proj.lora_A.weight"] = a
    save_file({**tensors, f"{prefix}.7.mlp.norm.weight": a[0].clone()}, file)
    with pytest.raises(UsageError, match=r"layers.7.mlp.norm.weight, which this base model does not have"):
        load_model(plain)
    save_file({}, file)
    with pytest.raises(RunError, match=r"holds no adapters"):
        load_model(plain)
    file.unlink()
    with pytest.raises(UsageError, match=r"has no adapter_model.safetensors"):
        load_model(plain)
