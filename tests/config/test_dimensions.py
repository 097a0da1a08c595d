"""Sizes that do not fit a recipe are refused with the key and a size that fits."""

from typing import Any

import pytest

from deskside.config import presets
from deskside.config.merge import build
from deskside.config.recipes import RECIPES
from deskside.utils.errors import UsageError

QUANTIZED = [name for name, recipe in RECIPES.items() if recipe.quantized]


def refused(**parts: Any) -> str:
    with pytest.raises(UsageError) as error:
        build([parts])
    line = str(error.value)
    assert "\n" not in line
    return line


@pytest.mark.parametrize("recipe", QUANTIZED)
@pytest.mark.parametrize(
    "preset",
    [
        *(n for n in presets.names() if n not in ("demo", "gpt2") and not n.startswith("indicmoe")),
        "d12",
        "d14",
        "d20",
    ],
)
def test_presets_fit_every_recipe(preset: str, recipe: str) -> None:
    build([*presets.layers(preset), {"precision": {"name": recipe, "head": "fp8"}}])


@pytest.mark.parametrize(
    ("recipe", "model", "key", "remedy"),
    [
        ("fp8", {"hidden_size": 770, "head_dim": 64}, "model.hidden_size: 770", {"hidden_size": 768}),
        ("nvfp4", {"intermediate_size": 2050}, "model.intermediate_size: 2050", {"intermediate_size": 2048}),
        ("nvfp4-eden", {"hidden_size": 832, "head_dim": 64}, "model.hidden_size: 832", {"hidden_size": 896}),
        ("fp8", {"head_dim": 62}, "model.head_dim: 12 query", {"head_dim": 64}),
        # 12 query heads of 64 have 768 = 6 x 128 rows, but the 3 heads of k alone have 192, which is no multiple of
        # 128.
        ("fp8-nvfp4", {"fused_qkv": False}, "model.head_dim: 12 query", {"head_dim": 128}),
        ("fp8-nvfp4", {"intermediate_size": 2112, "fused_gate_up": False}, "model.intermediate_size: 2112",
         {"intermediate_size": 2176}),
    ],
)  # fmt: skip
def test_a_size_that_does_not_fit(
    recipe: str, model: dict[str, Any], key: str, remedy: dict[str, Any]
) -> None:
    line = refused(model=model, precision={"name": recipe})
    assert line.startswith(key)
    assert str(next(iter(remedy.values()))) in line
    build([{"model": {**model, **remedy}, "precision": {"name": recipe}}])
    build([{"model": model, "precision": {"name": "bf16"}}])


def test_a_fused_gate_and_up_has_twice_the_rows() -> None:
    """Gate and up have 2 x 2112 = 33 x 128 rows together. The columns of the down projection need a multiple of 16."""
    build([{"model": {"intermediate_size": 2112}, "precision": {"name": "nvfp4-eden"}}])


@pytest.mark.parametrize(
    ("recipe", "parts", "key"),
    [
        ("nvfp4", {}, None),
        ("nvfp4", {"model": {"hidden_size": 784, "head_dim": 64}}, "model.hidden_size: 784"),
        ("nvfp4-4o6", {"model": {"intermediate_size": 2064}}, "model.intermediate_size: 2064"),
        ("nvfp4", {"batch": {"sequence_length": 208, "tokens": 2080}}, "batch.sequence_length: 208"),
        ("nvfp4", {"batch": {"sequence_length": 208, "tokens": 2080, "micro_tokens": 416}}, None),
        ("fp8", {"model": {"hidden_size": 784, "head_dim": 64}}, None),
    ],
)
def test_native_nvfp4_needs_multiples_of_two_blocks(
    recipe: str, parts: dict[str, Any], key: str | None
) -> None:
    """Other sizes are allowed but emulated, and the reason names the size."""
    reason = build([{**parts, "precision": {"name": recipe}}]).native_fp4_problem()
    if key is None:
        assert reason is None
    else:
        assert reason is not None and reason.startswith(f"{key} is not a multiple of 32, as {recipe} needs")


def test_the_vocabulary_matters_only_with_a_quantized_head() -> None:
    model = {"vocab_size": 32770}
    build([{"model": model, "precision": {"name": "fp8"}}])
    assert refused(model=model, precision={"name": "fp8", "head": "fp8"}).startswith(
        "model.vocab_size: 32770 is not a multiple of 16, as fp8-delayed needs; use 32768"
    )


def test_micro_tokens_must_fit_the_weight_gradient() -> None:
    rows = {"sequence_length": 200, "tokens": 64000}
    build([{"batch": {**rows, "micro_tokens": 3200}, "precision": {"name": "fp8"}}])
    assert refused(batch=rows, precision={"name": "fp8"}).startswith("batch.sequence_length: 200")
    line = refused(batch={**rows, "micro_tokens": 1000}, precision={"name": "fp8"})
    assert line.startswith("batch.micro_tokens: 1000") and line.endswith("use 1200")
    build([{"batch": {**rows, "micro_tokens": 6400}, "precision": {"name": "nvfp4-eden"}}])  # 50 x 128


def test_an_odd_head_dim_fits_if_the_projections_do() -> None:
    model = {"position_embedding": "learned", "num_attention_heads": 16, "num_key_value_heads": 16}
    build([{"model": {**model, "head_dim": 65}, "precision": {"name": "fp8"}}])


def test_loss_chunks_matter_only_with_a_quantized_head() -> None:
    """The gradient of the head's weight sums over the tokens of a chunk."""
    compute = {"loss_chunk_tokens": 1000}
    build([{"compute": compute, "precision": {"name": "fp8"}}])
    with pytest.raises(
        UsageError, match=r"compute\.loss_chunk_tokens: 1000 is not a multiple of 16.*use 1008"
    ):
        build([{"compute": compute, "precision": {"name": "fp8", "head": "fp8"}}])
