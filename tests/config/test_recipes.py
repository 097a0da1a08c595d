"""Recipes equal the published ones, and their operands combine options validly."""

from typing import get_args

import pytest

from deskside.config.recipes import ALIASES, RECIPES, Operand, Recipe, default_precision, recipe_named
from deskside.config.sections import BACKEND_RECIPES, PrecisionConfig, PrecisionName
from deskside.utils.errors import UsageError

ALL = [pytest.param(recipe, id=recipe.name) for recipe in RECIPES.values()]


def test_the_configuration_accepts_exactly_the_recipes() -> None:
    assert set(get_args(PrecisionName)) == {"auto", *ALIASES, *RECIPES}
    assert recipe_named("fp8") is RECIPES["fp8-delayed"]
    for names in BACKEND_RECIPES.values():
        assert set(names) <= set(RECIPES)
    with pytest.raises(
        UsageError, match="precision 'fp4' does not exist; use one of fp32, bf16, fp8-tensorwise"
    ):
        recipe_named("fp4")


def test_auto_is_what_the_device_computes_best() -> None:
    assert [default_precision(on_cpu) for on_cpu in (True, False)] == ["fp32", "bf16"]


@pytest.mark.parametrize("recipe", ALL)
def test_both_operands_of_a_product_have_the_same_transform(recipe: Recipe) -> None:
    for product in recipe.products:
        assert product.left.quantized == product.right.quantized
        assert product.left.hadamard == product.right.hadamard
        assert product.left.fresh_signs == product.right.fresh_signs


@pytest.mark.parametrize("recipe", ALL)
def test_options_of_an_operand_fit_its_format(recipe: Recipe) -> None:
    for operand in (o for p in recipe.products for o in (p.left, p.right)):
        if operand.format == "nvfp4":
            assert operand.scaling in ("1x16", "16x16")
        else:
            plain = Operand(operand.format, operand.scaling)
            assert operand == plain
            assert (operand.scaling == "none") == (not operand.quantized)
        # Four over six chooses the smaller error, which is biased, so it cannot be combined with unbiased rounding.
        assert not (operand.four_over_six and (operand.rounding != "nearest" or operand.hadamard))
        # A transform along one dimension would break the symmetry of a 16x16 tile.
        assert not (operand.scaling == "16x16" and operand.hadamard)


@pytest.mark.parametrize("recipe", ALL)
def test_the_forward_rounds_to_nearest(recipe: Recipe) -> None:
    assert {recipe.output.left.rounding, recipe.output.right.rounding} == {"nearest"}


@pytest.mark.parametrize("name", ["nvfp4", "nvfp4-4o6", "nvfp4-unbiased"])
def test_nvidias_arrangement(name: str) -> None:
    """arXiv 2509.25149: W and W^T are equal, gradients are rounded stochastically, and one product is transformed."""
    recipe = RECIPES[name]
    assert recipe.output.right == recipe.input_gradient.right
    assert recipe.output.right.scaling == "16x16"
    assert [p.left.rounding for p in recipe.products] == ["nearest", "stochastic", "stochastic"]
    assert [p.right.rounding for p in recipe.products] == ["nearest"] * 3
    assert [p.left.hadamard for p in recipe.products] == [0, 0, 16]
    assert not any(p.left.fresh_signs for p in recipe.products)


@pytest.mark.parametrize("name", ["nvfp4-eden", "fp8-nvfp4"])
def test_ms_eden_in_the_backward(name: str) -> None:
    """arXiv 2601.22813: MS-EDEN for all operands of the backward, fresh signs over 128 values, no 16x16 tiles."""
    recipe = RECIPES[name]
    for product in (recipe.input_gradient, recipe.weight_gradient):
        for operand in (product.left, product.right):
            assert (operand.rounding, operand.hadamard, operand.fresh_signs) == ("eden", 128, True)
            assert operand.scaling == "1x16"
    assert all(o.scaling != "16x16" for p in recipe.products for o in (p.left, p.right))


@pytest.mark.parametrize(
    ("name", "layers", "kept"),
    [
        ("nvfp4", 62, (2, 8)),  # the 12B model of arXiv 2509.25149
        ("nvfp4", 12, (1, 2)),
        ("nvfp4", 24, (1, 4)),
        ("nvfp4-eden", 48, (2, 7)),
        ("fp8-nvfp4", 12, (0, 0)),
        ("fp8-delayed", 12, (0, 0)),
    ],
)
def test_blocks_that_stay_in_bf16(name: str, layers: int, kept: tuple[int, int]) -> None:
    assert RECIPES[name].kept_blocks(layers) == kept
    assert PrecisionConfig(name=name).recipe().kept_blocks(layers) == kept  # type: ignore[arg-type]


def test_given_kept_shares_replace_the_recipes() -> None:
    assert PrecisionConfig(name="nvfp4", keep_first=0).recipe().kept_blocks(12) == (0, 2)
    assert PrecisionConfig(name="fp8", keep_last=0.25).recipe().kept_blocks(12) == (0, 3)
    assert PrecisionConfig(name="auto").recipe("bf16") == RECIPES["bf16"]
    with pytest.raises(UsageError):
        PrecisionConfig(name="auto").recipe()
