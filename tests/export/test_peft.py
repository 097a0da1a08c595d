"""Adapters compared with PEFT on the same weights (output, gradients and
merge), and NF4 with bitsandbytes' own layers.
"""

import importlib
import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file

from deskside.export.peft import save_peft, to_peft
from deskside.utils.errors import RunError, UsageError
from deskside.weights import frozen_base
from deskside.weights.hf import save_hf, to_hf
from deskside.weights.merge_adapters import merged
from tests.export.adapted import BIASED_MOE, MOE, trained, without_adapters

transformers = pytest.importorskip("transformers")

TOKENS = torch.tensor([[3, 5, 17, 60, 3, 9, 11, 2, 44, 5], [5, 5, 1, 0, 30, 31, 32, 33, 3, 3]])
Case = tuple[dict[str, Any], tuple[int, ...], dict[str, Any]]
CASES: dict[str, Case] = {
    "qwen3": ({}, (), {}),
    "stabilised": ({"rank_stabilised": True}, (), {}),
    "some": ({"targets": ["q_proj", "v_proj", "down_proj"]}, (), {}),
    "separate": ({}, (), {"fused_qkv": False, "fused_gate_up": False}),
    "llama with bias": ({}, (), {"qk_norm": False, "attention_bias": True, "mlp_bias": True}),
    "new tokens": ({}, (3, 5, 60), {}),
    "new tokens, tied": ({"targets": ["o_proj"]}, (60, 3), {"tie_word_embeddings": True}),
    "dora": ({"dora": True}, (), {}),
    "dora, stabilised, some": (
        {"dora": True, "rank_stabilised": True, "targets": ["v_proj", "up_proj"]},
        (),
        {},
    ),
    "dora, llama with bias": (
        {"dora": True},
        (),
        {"qk_norm": False, "attention_bias": True, "mlp_bias": True},
    ),
    "tables": ({"modules_to_save": ["embed_tokens", "lm_head"]}, (), {}),
    "table, tied, dora": (
        {"dora": True, "modules_to_save": ["embed_tokens"]},
        (),
        {"tie_word_embeddings": True},
    ),
    "table beside new tokens": ({"modules_to_save": ["embed_tokens"]}, (60, 3), {}),
    "experts": ({}, (), MOE),
    "experts, dora in attention": ({"dora": True, "targets": ["q_proj", "o_proj"]}, (), MOE),
    "experts, stabilised": ({"rank_stabilised": True, "targets": ["gate_proj", "up_proj"]}, (), MOE),
    "experts, some": ({"targets": ["up_proj", "o_proj"]}, (3,), {**MOE, "tie_word_embeddings": True}),
    "experts, sigmoid": ({}, (), {**MOE, "scoring_func": "sigmoid"}),
    "gated shared expert": ({}, (), {**MOE, "shared_expert_intermediate_size": 48, "qk_norm": False}),
    "experts, down": ({"targets": ["down_proj"]}, (), {**MOE, "norm_topk_prob": False}),
}


@pytest.fixture(scope="module")
def peft() -> Any:
    return pytest.importorskip("peft")


def test_peft_imports_in_this_environment() -> None:
    """transformer-engine without its compiled library made it fail, so `make install` keeps its sources apart."""
    if importlib.util.find_spec("peft") is None:
        pytest.skip("needs peft")
    assert importlib.import_module("peft").PeftModel is not None


def stored_name(name: str) -> str:
    """Return the name of a parameter of PEFT's model in PEFT's files."""
    return name.replace(".default", "").replace(".modules_to_save", "").replace("_vector.weight", "_vector")


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_output_gradients_and_merge_are_peft_s(case: Case, peft: Any, tmp_path: Path) -> None:
    adapter, tokens, shape = case
    model, options = trained(adapter, tokens, **shape)
    frozen = without_adapters(trained({**adapter, "modules_to_save": ()}, (), **shape)[0])
    before = frozen(TOKENS).detach()
    save_hf(merged(frozen), model.config, None, tmp_path / "base")
    save_peft(model, options, str(tmp_path / "base"), tmp_path / "adapter")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    torch.testing.assert_close(theirs(TOKENS).logits, before, rtol=1e-5, atol=2e-5)
    theirs = peft.PeftModel.from_pretrained(theirs, tmp_path / "adapter", is_trainable=True)
    expected = theirs(TOKENS).logits
    ours = model(TOKENS)
    assert float((ours - before).detach().abs().max()) > 0.1
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=2e-5)

    targets = TOKENS.roll(-1, 1)
    model.loss(TOKENS, targets).backward()
    F.cross_entropy(expected.flatten(0, 1), targets.flatten(), reduction="sum").backward()
    _, names = to_peft(model, options, None)
    if model.head is None:
        names.pop("base_model.model.lm_head.weight", None)  # a copy of the embedding
    gradients = {stored_name(name): p.grad for name, p in theirs.named_parameters() if p.requires_grad}
    assert gradients.keys() == names.keys() and all(g is not None for g in gradients.values())
    for parameter in model.parameters():
        if parameter.requires_grad:
            assert parameter.grad is not None
            parameter.data = parameter.grad
    computed = to_peft(model, options, None)[1]
    for name in names:
        gradient = computed[name]
        # PEFT's single B of an expert's gate and up is block diagonal in ours, with zeros elsewhere.
        theirs_of_ours = gradients[name] * (names[name] != 0)
        torch.testing.assert_close(
            gradient, theirs_of_ours, rtol=1e-4, atol=2e-5, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_merged_model_is_peft_s_and_computes_the_same(case: Case, peft: Any, tmp_path: Path) -> None:
    adapter, tokens, shape = case
    model, options = trained(adapter, tokens, **shape)
    plain = merged(model)
    assert not any("adapter" in name for name, _ in plain.named_parameters())
    torch.testing.assert_close(plain(TOKENS), model(TOKENS), rtol=1e-5, atol=2e-5)
    frozen = without_adapters(trained({**adapter, "modules_to_save": ()}, (), **shape)[0])
    save_hf(merged(frozen), model.config, None, tmp_path / "base")
    save_peft(model, options, None, tmp_path / "adapter")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    theirs = peft.PeftModel.from_pretrained(theirs, tmp_path / "adapter").merge_and_unload()
    theirs.save_pretrained(tmp_path / "merged")  # under their names in files, where experts are not stacked
    expected = load_file(tmp_path / "merged/model.safetensors")
    for name, tensor in to_hf(plain, model.config)[1].items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("shape", [{}, MOE, BIASED_MOE], ids=["dense", "experts", "experts with biases"])
@pytest.mark.parametrize("format", ["nf4", "int8"])
def test_codes_with_adapters_compute_what_the_merged_model_does(format: str, shape: dict[str, Any]) -> None:
    pytest.importorskip("bitsandbytes")
    model, _ = trained({"base": format}, (3, 60), **shape)
    torch.testing.assert_close(merged(model)(TOKENS), model(TOKENS), rtol=1e-4, atol=2e-4)


def test_nf4_with_adapters_is_peft_on_bitsandbytes(peft: Any, tmp_path: Path) -> None:
    """Compared with bitsandbytes' own 4-bit layers and adapters. Not fused, because 256 magnitudes share a scale, and
    in a fused weight such groups cross the border of two projections.
    """
    pytest.importorskip("bitsandbytes")
    from transformers import BitsAndBytesConfig

    apart = {"fused_qkv": False, "fused_gate_up": False}
    model, options = trained({"base": "nf4"}, (), **apart)
    whole = without_adapters(trained({}, (), **apart)[0])
    save_hf(merged(whole), model.config, None, tmp_path / "base")
    save_peft(model, options, None, tmp_path / "adapter")
    how = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.float32,
    )
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "base", quantization_config=how, dtype=torch.float32, device_map="cpu"
    )
    theirs = peft.PeftModel.from_pretrained(theirs, tmp_path / "adapter").train()
    expected = theirs(
        TOKENS
    ).logits  # with gradients and in training they dequantize; otherwise a CPU kernel in BF16 runs
    torch.testing.assert_close(model(TOKENS), expected, rtol=1e-4, atol=2e-4)


def test_what_peft_has_no_form_for_is_refused() -> None:
    gpt2: dict[str, Any] = {
        "num_key_value_heads": 4, "position_embedding": "learned", "hidden_act": "gelu_new", "gated_mlp": False,
        "mlp_bias": True, "attention_bias": True, "norm": "layernorm", "norm_bias": True, "qk_norm": False,
    }  # fmt: skip
    shared = {**MOE, "shared_expert_intermediate_size": 64, "scoring_func": "sigmoid"}
    with pytest.raises(UsageError, match=r"--to peft: .*shared expert.*; use --to hf"):
        to_peft(*trained({}, (), **shared), None)
    model, options = trained({}, (), **gpt2)
    with pytest.raises(
        UsageError, match=r"--to peft: GPT2LMHeadModel has q, k and v in one module; use --to hf"
    ):
        to_peft(model, options, None)


def test_the_directory_is_replaced_only_when_it_is_ours(tmp_path: Path) -> None:
    model, options = trained()
    out = save_peft(model, options, "Qwen/Qwen3-0.6B", tmp_path / "adapter")
    content = json.loads((out / "adapter_config.json").read_text())
    assert content["base_model_name_or_path"] == "Qwen/Qwen3-0.6B" and content["r"] == 4
    save_peft(model, options, None, out)
    (out / "notes.txt").write_text("mine")
    with pytest.raises(UsageError, match=r"notes.txt, which `deskside export` did not write"):
        save_peft(model, options, None, out)


def test_a_full_disk_is_a_run_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, options = trained()

    def full_disk(*args: Any, **kwargs: Any) -> None:
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr("deskside.weights.hf.save_file", full_disk)
    with pytest.raises(RunError, match=r"adapter: cannot be written: .*No space left"):
        save_peft(model, options, None, tmp_path / "adapter")
    assert not list(tmp_path.iterdir())


def test_weights_of_another_architecture_are_named() -> None:
    from deskside.config.model import ModelConfig
    from deskside.config.sections import AdapterConfig
    from tests.export.adapted import TINY, weights_of

    config = ModelConfig(**TINY)
    given = weights_of(config)
    other = ModelConfig(**{**TINY, "intermediate_size": 32})
    with pytest.raises(
        RunError, match=r"another architecture: 'layers.0.mlp.*' is \(256, 64\), \(64, 64\) is needed"
    ):
        frozen_base.build(other, AdapterConfig(), 0, given, "cpu")
    del given["embed.weight"]
    with pytest.raises(RunError, match=r"only one of weights and model has 'embed.weight'"):
        frozen_base.build(config, AdapterConfig(), 0, given, "cpu")
