"""Every entry in the table of families: transformers computes the same from its export; see benchmarks/families.py."""

import json
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks.families import Parity, measure, small_config, table
from deskside.config.model import ModelConfig, ModelType
from deskside.utils.errors import RunError, UsageError
from deskside.weights.hf import load_hf, save_hf
from deskside.weights.hf_config import from_hf_config, nearest_family, to_hf_config
from deskside.weights.hf_families import FAMILIES
from deskside.weights.published import published_checkpoints
from tests.export.test_hf_parity import random_model


@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_family_is_that_of_transformers(model_type: str, tmp_path: Path) -> None:
    parity = measure(FAMILIES[model_type], tmp_path)
    assert parity.logits < 1e-4 and parity.back < 1e-4 and parity.adapters < 1e-4
    assert parity.gradients < 1e-4 and parity.losses < 1e-5
    assert parity.greedy == 1


@pytest.mark.parametrize("model_type", ["ministral", "dots1", "gemma2", "gemma3_text", "olmo3", "gpt_oss"])
def test_without_windows_a_family_that_has_them_is_that_of_transformers(
    model_type: str, tmp_path: Path
) -> None:
    options = small_config(FAMILIES[model_type]).model_dump(
        exclude={"window_pattern", "rope_local_base_freq"}
    )
    model = random_model(**{**options, "model_type": model_type, "sliding_window": None})
    save_hf(model, model.config, None, tmp_path / "hf")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", attn_implementation="eager")
    tokens = torch.arange(20)[None]
    torch.testing.assert_close(theirs(tokens).logits, model(tokens), atol=1e-4, rtol=1e-4)
    assert load_hf(tmp_path / "hf")[0].sliding_window is None


def test_the_table_of_the_document_is_that_of_its_data() -> None:
    root = Path(__file__).parents[2]
    rows = json.loads((root / "docs/data/2026-11-23-families/parity.json").read_text("utf-8"))
    results = [Parity(**row) for row in rows]
    assert [result.model_type for result in results] == list(FAMILIES)
    assert table(results) in (root / "docs/models.md").read_text("utf-8")


@pytest.mark.parametrize(
    ("config", "nearest"),
    [
        ({"model_type": "qwen3_next", "num_experts": 512}, {"qwen3_moe"}),
        ({"model_type": "gemma3n"}, {"gemma3_text"}),
        ({"model_type": "olmo"}, {"olmo2", "olmo3"}),
        ({"model_type": "deepseek_v3", "n_routed_experts": 256}, {"qwen3_moe"}),
        ({"model_type": "internlm"}, {"llama"}),
        ({}, {"llama"}),
    ],
)
def test_another_architecture_is_refused_with_the_nearest(config: dict[str, Any], nearest: set[str]) -> None:
    assert nearest_family(config) in nearest
    with pytest.raises(UsageError, match=nearest_family(config)):
        from_hf_config(config)


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ({"quantization_config": {"quant_method": "bitsandbytes"}}, UsageError),
        ({"quantization_config": {"quant_method": "mxfp4"}}, UsageError),  # only gpt-oss has these
        ({"layer_types": ["sliding_attention", "chunked_attention"] * 14}, UsageError),
        ({"layer_types": ["sliding_attention"]}, RunError),
    ],
)
def test_what_a_config_cannot_have(given: dict[str, Any], error: type[Exception]) -> None:
    source = {**published_checkpoints()[0].hf_config, "use_sliding_window": True, "sliding_window": 512}
    assert from_hf_config(source).model_type is None
    with pytest.raises(error, match=next(iter(given))):
        from_hf_config({**source, **given})


def test_quantized_weights_of_a_model_with_images_are_refused() -> None:
    text = {"hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 128}
    source = {"model_type": "gemma3", "text_config": text}
    assert from_hf_config(source).hidden_size == 64
    with pytest.raises(UsageError, match="quantization_config"):
        from_hf_config({**source, "quantization_config": {"quant_method": "bitsandbytes"}})


def published_config(model_type: str, **changes: Any) -> dict[str, Any]:
    """Return the config.json of the first published checkpoint of a family, with changes."""
    (first, *_) = (c for c in published_checkpoints() if c.family.model_type == model_type)
    return {**first.hf_config, **changes}


def test_values_that_fit_only_another_family_are_refused() -> None:
    with pytest.raises(UsageError, match="MixtralForCausalLM"):
        from_hf_config(published_config("mixtral", num_local_experts=0))


def test_no_rope_layers_must_name_every_layer() -> None:
    with pytest.raises(RunError, match="no_rope_layers"):
        from_hf_config(published_config("smollm3", no_rope_layers=[1, 1, 1, 0]))


def test_window_layers_with_the_base_of_the_others_are_exported_so() -> None:
    """transformers 4 uses 10,000 as the base of window layers if config.json has none."""
    config = from_hf_config(published_config("gemma3_text"))
    options = config.model_dump() | {"model_type": "gemma3_text", "rope_local_base_freq": None}
    assert to_hf_config(ModelConfig(**options))["rope_local_base_freq"] == config.rope_theta == 1e6


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [
        ("gemma2", {"embedding_multiplier": 48.003}),  # 48 is sqrt(hidden_size), and 48.003^2 rounds to 48^2
        ("phi3", {"rope_scaling": YARN}),
    ],
)
def test_what_an_export_would_lose_is_refused(model_type: str, changes: dict[str, Any]) -> None:
    options = from_hf_config(published_config(model_type)).model_dump() | {"model_type": model_type}
    to_hf_config(ModelConfig(**options))
    with pytest.raises(UsageError, match=next(iter(changes)).removesuffix("_scaling")):
        to_hf_config(ModelConfig(**options | changes))


def test_the_choices_of_model_type_are_the_families() -> None:
    assert set(get_args(ModelType)) == FAMILIES.keys()
