"""Every entry of the table of families: what it exports, transformers computes equally; see benchmarks/families.py."""

import json
from pathlib import Path
from typing import Any, get_args

import pytest

from benchmarks.families import Parity, measure, table
from deskside.config.model import ModelType
from deskside.utils.errors import RunError, UsageError
from deskside.weights.hf_config import from_hf_config, nearest_family
from deskside.weights.hf_families import FAMILIES
from deskside.weights.published import published_checkpoints


@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_family_is_that_of_transformers(model_type: str, tmp_path: Path) -> None:
    parity = measure(FAMILIES[model_type], tmp_path)
    assert parity.logits < 1e-4 and parity.back < 1e-4 and parity.adapters < 1e-4
    assert parity.gradients < 1e-4 and parity.losses < 1e-5
    assert parity.greedy == 1


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


def test_the_choices_of_model_type_are_the_families() -> None:
    assert set(get_args(ModelType)) == FAMILIES.keys()
