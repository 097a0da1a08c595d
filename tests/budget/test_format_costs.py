"""The cost of formats agrees with the definitions of the recipes, and grows and shrinks where it must."""

from dataclasses import replace
from typing import get_args

import pytest

from deskside.budget.format_costs import (
    ALL_NATIVE,
    SQUARE_TILES,
    LowFormat,
    Precision,
    emulated,
    nvfp4_bytes,
    product_formats,
    quantized,
    runs_as,
    saved_input_bytes,
    weight_copies,
)
from deskside.budget.operators.products import grouped_rate
from deskside.budget.operators.step import step_operators
from deskside.budget.sizes import Sizes
from deskside.budget.speed import Rates, step_seconds
from deskside.budget.step_spec import StepSpec
from deskside.config.model import ModelConfig
from deskside.config.recipes import ALIASES, RECIPES, Operand, recipe_named

NONE: frozenset[str] = frozenset()
FP8_ONLY = frozenset({"fp8"})
WORK = StepSpec(2048, 65536, 65536)
CARD = Rates(790e12, 4.8e12, 1580e12, 3160e12)
SHAPE = ModelConfig()


def kind_of(operand: Operand) -> str:
    return {"float32": "fp32", "bfloat16": "bf16", "e4m3": "fp8", "e5m2": "fp8", "nvfp4": "nvfp4"}[
        operand.format
    ]


def test_every_recipe_is_priced_as_what_it_is() -> None:
    assert set(get_args(Precision)) == {*RECIPES, *ALIASES}
    for name in get_args(Precision):
        recipe = recipe_named(name)
        for operands, kind in zip(
            ((recipe.output,), (recipe.input_gradient, recipe.weight_gradient)),
            product_formats(name),
            strict=True,
        ):
            assert {kind_of(o) for p in operands for o in (p.left, p.right)} == {kind}
        assert quantized(name) == recipe.quantized
    with pytest.raises(ValueError, match="fp4"):
        product_formats("int8 and fp4")  # type: ignore[arg-type]


def test_emulation_follows_from_what_the_device_has() -> None:
    assert not emulated("bf16", frozenset())
    assert emulated("fp8", frozenset()) and not emulated("fp8", FP8_ONLY)  # type: ignore[arg-type]
    assert emulated("nvfp4", FP8_ONLY) and not emulated("nvfp4", ALL_NATIVE)  # type: ignore[arg-type]
    assert emulated("fp8-nvfp4", FP8_ONLY)  # type: ignore[arg-type]
    assert [runs_as(kind, FP8_ONLY) for kind in ("bf16", "fp8", "nvfp4")] == ["bf16", "fp8", "emulated"]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("precision", "native", "copies"),
    [
        ("fp32", ALL_NATIVE, 0.0),
        ("bf16", ALL_NATIVE, 2.0),
        ("fp8-delayed", FP8_ONLY, 2.0),  # W and W^T
        ("fp8-delayed", frozenset(), 2.0),  # the same codes, widened at each product
        ("nvfp4", frozenset(), 2.0),  # code x block scale in BF16, in tiles of 16 x 16
        ("nvfp4-unbiased", FP8_ONLY, 2.0),
        ("nvfp4-eden", FP8_ONLY, 4.0),  # forward and backward quantize separately
        ("nvfp4", ALL_NATIVE, 1.125),  # twice 4.5 bits
        ("fp8-nvfp4", FP8_ONLY, 3.0),
    ],
)
def test_copies_of_a_weight(precision: Precision, native: frozenset, copies: float) -> None:  # type: ignore[type-arg]
    assert weight_copies(precision, native) == copies


def test_what_is_kept_for_the_weight_gradient() -> None:
    """One cast writes FP8 in rows and in columns. NVFP4 is quantized from 16 bits for every product."""
    one_byte = {name for name in get_args(Precision) if saved_input_bytes(name) == 1.0}
    assert one_byte == {"fp8", "fp8-delayed", "fp8-tensorwise", "fp8-rowwise"}
    for name in get_args(Precision):
        recipe = recipe_named(name)
        same = recipe.output.left == recipe.weight_gradient.right
        whole = recipe.output.left.scaling in ("tensor", "delayed", "row")
        assert (saved_input_bytes(name) == 1.0) == (same and whole)
    assert nvfp4_bytes(ALL_NATIVE) < nvfp4_bytes(frozenset())


@pytest.mark.parametrize("precision", get_args(Precision))
@pytest.mark.parametrize("checkpointing", ["none", "attention", "mlp", "block"])
@pytest.mark.parametrize("native", [frozenset(), FP8_ONLY, ALL_NATIVE])
def test_formats_change_where_products_run_and_not_how_many(precision, checkpointing, native) -> None:  # type: ignore[no-untyped-def]
    spec = replace(
        WORK, precision=precision, activation_checkpointing=checkpointing, native=native, kept_blocks=3
    )
    plain = replace(spec, precision="bf16")

    def flops(of: StepSpec) -> dict[tuple[str, bool], float]:
        found: dict[tuple[str, bool], float] = {}
        for o in step_operators(SHAPE, of):
            if o.group in ("matmul", "head", "attention"):
                found[o.name, o.recompute] = found.get((o.name, o.recompute), 0.0) + o.amount
        return found

    assert flops(spec) == pytest.approx(flops(plain))
    rates = {o.runs_as for o in step_operators(SHAPE, spec)}
    assert ("emulated" in rates) == emulated(precision, native)


def test_the_order_of_speeds() -> None:
    def seconds(precision: Precision, native=ALL_NATIVE, **options: float) -> float:  # type: ignore[no-untyped-def]
        return sum(
            step_seconds(SHAPE, replace(WORK, precision=precision, native=native, **options), CARD).values()
        )

    bf16 = seconds("bf16")
    assert seconds("fp8") < seconds("fp8", kept_blocks=3) < bf16
    assert seconds("nvfp4", FP8_ONLY) > bf16 < seconds("fp8", frozenset())
    assert seconds("nvfp4") < seconds("nvfp4", FP8_ONLY)
    assert seconds("fp8-nvfp4", FP8_ONLY) < seconds("nvfp4-eden", FP8_ONLY)
    assert seconds("fp8", kept_blocks=12) == pytest.approx(bf16)
    assert seconds("fp8") < seconds("fp8", kept_weights=0.1) < seconds("fp8", kept_weights=0.5) < bf16
    assert seconds("nvfp4-eden", kept_weights=1.0) == pytest.approx(bf16)


def test_quantising_is_an_item_of_its_own_and_free_in_bf16() -> None:
    item = {
        p: step_seconds(SHAPE, replace(WORK, precision=p), CARD)["quantize"] for p in ("bf16", "fp8", "nvfp4")
    }
    assert item["bf16"] == 0 < item["fp8"] < item["nvfp4"]


def test_the_head_in_fp8_halves_its_products() -> None:
    half = step_seconds(SHAPE, replace(WORK, precision="fp8", fp8_head=True), CARD)["loss"]
    whole = step_seconds(SHAPE, replace(WORK, precision="fp8"), CARD)["loss"]
    head = 6.0 * 65536 * 768 * 32768 / (790e12 * CARD.efficiency.head)
    assert whole - half == pytest.approx(head / 2)


def test_square_tiles_are_those_of_the_recipes() -> None:
    weights = {name: recipe.output.right for name, recipe in RECIPES.items()}
    assert {name for name, weight in weights.items() if weight.scaling == "16x16"} == set(SQUARE_TILES)


EXPERTS = ModelConfig(
    hidden_size=2048,
    num_attention_heads=16,
    num_key_value_heads=4,
    num_experts=8,
    num_experts_per_tok=2,
    moe_intermediate_size=2176,
    num_hidden_layers=4,
)


def test_experts_are_priced_as_what_they_run_as() -> None:
    """Native FP8 is faster than BF16 at this size, and emulated FP8 is slower. NVFP4 is emulated on every GPU."""

    def seconds(precision: Precision, native: frozenset[LowFormat], checkpointing: str = "none") -> float:
        spec = replace(
            WORK,
            precision=precision,
            native=native,
            copies="step",
            activation_checkpointing=checkpointing,  # type: ignore[arg-type]
        )
        products = [o for o in step_operators(EXPERTS, spec) if o.name == "MLP" and o.runs_as != "bf16"]
        grouped = "fp8-grouped" in native and precision != "nvfp4"
        assert {o.runs_as for o in products} == {"fp8" if grouped else "emulated"} or precision == "bf16"
        assert all(
            not o.rowwise and o.grouped_rate < grouped_rate(Sizes(EXPERTS, spec)) for o in products if grouped
        )
        return sum(step_seconds(EXPERTS, spec, CARD).values())

    dense_only: frozenset[LowFormat] = ALL_NATIVE - {"fp8-grouped"}
    for checkpointing in ("none", "mlp", "block"):
        bf16 = seconds("bf16", ALL_NATIVE, checkpointing)
        assert seconds("fp8", ALL_NATIVE, checkpointing) < bf16 < seconds("fp8", frozenset(), checkpointing)
        assert seconds("fp8", ALL_NATIVE, checkpointing) < seconds("fp8", dense_only, checkpointing)
        assert seconds("nvfp4", ALL_NATIVE, checkpointing) > bf16
