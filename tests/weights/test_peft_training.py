"""Adapters created by PEFT and trained further by us: the same logits before
the first step, and refused directories.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from deskside.config.sections import AdapterConfig
from deskside.utils.errors import UsageError
from deskside.weights import frozen_base
from deskside.weights.load import load_base
from deskside.weights.peft_training import adapter_options, load_adapters
from tests.weights.test_peft_adapters import ATTENTION, LLAMA, QWEN, TIED, TOKENS, adapted

CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "lora": (QWEN, {}, {"target_modules": ATTENTION}),
    "rslora": (LLAMA, {"attention_bias": True}, {"target_modules": "all-linear", "use_rslora": True, "r": 9}),
    "dora": (LLAMA, {"mlp_bias": True}, {"target_modules": ["up_proj", "o_proj"], "use_dora": True}),
    "tables": (QWEN, {}, {"target_modules": ATTENTION, "modules_to_save": ["lm_head", "embed_tokens"]}),
    "tied table": (
        QWEN,
        TIED,
        {"target_modules": ATTENTION, "modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
    ),
    "stacked": ("Phi3", {"pad_token_id": None}, {"target_modules": ["qkv_proj", "down_proj"]}),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_training_begins_with_the_logits_of_peft(
    case: tuple[str, dict[str, Any], dict[str, Any]], tmp_path: Path
) -> None:
    theirs = adapted(tmp_path, *case)
    loaded, adapters = load_base(tmp_path / "adapter", None)
    options = adapter_options(adapters, loaded.config)
    assert options["dropout"] == 0.1 and options["rank"] == case[2].get("r", 4)
    weights = {name: parameter.detach() for name, parameter in loaded.model.named_parameters()}
    model = frozen_base.build(loaded.config, AdapterConfig(**options), 0, weights, "cpu")
    load_adapters(model, adapters)
    model.embed.output_dtype = torch.float32
    with torch.no_grad():
        torch.testing.assert_close(model(TOKENS), theirs(TOKENS).logits, rtol=1e-4, atol=1e-4)
        assert float((model(TOKENS) - loaded.model(TOKENS)).abs().max()) > 0.1


@pytest.mark.parametrize(
    ("shape", "lora", "reason"),
    [
        ({}, {"rank_pattern": {"q_proj": 2}}, "ranks or factors differ"),
        ({}, {"alpha_pattern": {"q_proj": 2}}, "ranks or factors differ"),
        ({}, {"layers_to_transform": [1]}, "only some layers"),
        ({}, {"modules_to_save": ["norm"]}, "norm.weight"),
        ({}, {"trainable_token_indices": [3]}, "model.embed_tokens"),
        ({}, {"target_modules": ["lm_head"]}, "lm_head"),
        (TIED, {"modules_to_save": ["embed_tokens"]}, "untie"),
    ],
)
def test_what_a_run_cannot_have_is_refused(
    shape: dict[str, Any], lora: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    adapted(tmp_path, QWEN, shape, {"target_modules": ATTENTION, **lora})
    loaded, adapters = load_base(tmp_path / "adapter", None)
    with pytest.raises(UsageError, match=rf"--resume-from .*{reason}.*--adapter.rank"):
        adapter_options(adapters, loaded.config)
