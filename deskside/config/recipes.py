"""Precision recipes as data: the number format of each operand of the three products of a linear layer.

A linear layer y = x W^T runs three products in a training step: the output (x, W), the input gradient (dy, W) and the
weight gradient (dy, x). A recipe names the formats of both operands of each product. NVIDIA's NVFP4 recipe, its
improved variants and the FP8 recipes are combinations of the options of `Operand`; `precision/` implements them.

Sources: FP8 formats, Micikevicius et al. 2022 (arXiv 2209.05433); NVFP4 pretraining, NVIDIA 2025 (arXiv 2509.25149);
four over six, Cook et al. 2025 (arXiv 2512.02010); MS-EDEN, Panferov et al. 2026 (arXiv 2601.22813); row-wise FP8
with E4M3 for all operands, torchao's "rowwise" recipe.
"""

import math
from dataclasses import dataclass, replace
from typing import Literal

from deskside.utils.errors import UsageError

Format = Literal["float32", "bfloat16", "e4m3", "e5m2", "nvfp4"]
Scaling = Literal["none", "tensor", "delayed", "row", "1x16", "16x16"]
Rounding = Literal["nearest", "stochastic", "eden"]


@dataclass(frozen=True)
class Operand:
    """Quantization of one operand of a product.

    scaling: the values that share a scale. "tensor": all, scaled by their current maximum; "delayed": all, scaled by
        the maximum of the last `Recipe.amax_history` steps; "row": each row of a product's left operand or column of
        its right operand; "1x16": 16 values along the summed dimension; "16x16": a tile, so that quantizing W and W^T
        gives the same numbers.
    hadamard: size of the random Hadamard transform along the summed dimension, 0 for none. Both operands of a product
        have the same transform, so that it cancels.
    fresh_signs: draw new random signs for the transform at every step, instead of using one fixed vector.
    rounding: rounding of the values. "eden": nearest, with block scales corrected and rounded stochastically (MS-EDEN).
    four_over_six: scale each block to a maximum of 6 or 4, whichever gives the smaller error.
    scale_up: round block scales up, so that no value is clipped and stochastic rounding is unbiased.
    """

    format: Format
    scaling: Scaling = "none"
    hadamard: Literal[0, 16, 128] = 0
    fresh_signs: bool = False
    rounding: Rounding = "nearest"
    four_over_six: bool = False
    scale_up: bool = False

    @property
    def quantized(self) -> bool:
        """True if the format has fewer than 16 bits."""
        return self.format not in ("float32", "bfloat16")


@dataclass(frozen=True)
class Product:
    """The two operands of a product, in the order left (activations or gradients) and right."""

    left: Operand
    right: Operand

    @property
    def quantized(self) -> bool:
        """True if the operands are quantized: always both or neither."""
        return self.left.quantized


@dataclass(frozen=True)
class Recipe:
    """The formats of the three products of a linear layer, and the blocks that stay in BF16.

    tolerance: relative Frobenius error against float64 that the self-check allows for one product.
    amax_history: number of steps over which delayed scaling takes the maximum.
    keep_first, keep_last: shares of the blocks, from the front and from the back, that stay in BF16 (rounded up).
    """

    name: str
    output: Product
    input_gradient: Product
    weight_gradient: Product
    tolerance: float
    amax_history: int = 16
    keep_first: float = 0.0
    keep_last: float = 0.0

    @property
    def quantized(self) -> bool:
        """True if any of the three products is quantized."""
        return any(product.quantized for product in self.products)

    @property
    def products(self) -> tuple[Product, Product, Product]:
        """The products output, input gradient and weight gradient."""
        return self.output, self.input_gradient, self.weight_gradient

    @property
    def formats(self) -> frozenset[Format]:
        """The formats of all operands."""
        return frozenset(
            operand.format for product in self.products for operand in (product.left, product.right)
        )

    def kept_blocks(self, layers: int) -> tuple[int, int]:
        """Return how many of the first and of the last blocks of a model with `layers` blocks stay in BF16."""
        return kept_blocks(self.keep_first, layers), kept_blocks(self.keep_last, layers)


_FP32, _BF16 = Operand("float32"), Operand("bfloat16")


def _unquantized(name: str, operand: Operand, tolerance: float) -> Recipe:
    product = Product(operand, operand)
    return Recipe(name, product, product, product, tolerance)


def _fp8(name: str, scaling: Scaling, gradient_format: Format = "e5m2") -> Recipe:
    """Return an FP8 recipe with activations and weights in E4M3.

    Gradients with one scale per tensor need the range of E5M2. With a scale per row, the range of E4M3 is enough, and
    its additional bit of precision is more useful.
    """
    value, gradient = Operand("e4m3", scaling), Operand(gradient_format, scaling)
    return Recipe(
        name, Product(value, value), Product(gradient, value), Product(gradient, value), tolerance=0.12
    )


_FP8_PRODUCT = Product(Operand("e4m3", "tensor"), Operand("e4m3", "tensor"))
_NVIDIA_GRADIENT = Operand("nvfp4", "1x16", rounding="stochastic")
_EDEN = Operand("nvfp4", "1x16", hadamard=128, fresh_signs=True, rounding="eden")

# NVIDIA's 12B model keeps the first 2 and the last 8 of its 62 blocks in BF16 (arXiv 2509.25149); of 12 blocks, these
# shares are the first one and the last two. All recipes with an NVFP4 forward have these shares, so that they differ
# only in their quantization. MS-EDEN was published without blocks in BF16 (precision.keep_first = 0, keep_last = 0).
_KEPT_FIRST, _KEPT_LAST = 2 / 62, 8 / 62

# Noise is the relative RMS error. Two operands with 9.5 % each give 13 %. Stochastic rounding doubles the variance of
# nearest rounding, and scales that are rounded up add a third; with a weight in 16x16 tiles (11 %), a product has at
# most sqrt(9.5^2 * 2 * 4/3 + 11^2) = 19 %. With 25 %, a gradient that is wrong by a factor of 0.75 is still detected.
_NVFP4_TOLERANCE = 0.25


def _nvfp4(name: str, activation: Operand, weight: Operand, gradient: Operand) -> Recipe:
    """Return a recipe in NVIDIA's arrangement: a Hadamard transform only in the weight gradient."""
    return Recipe(
        name,
        Product(activation, weight),
        Product(gradient, weight),
        Product(_with_hadamard(gradient), _with_hadamard(activation)),
        tolerance=_NVFP4_TOLERANCE,
        keep_first=_KEPT_FIRST,
        keep_last=_KEPT_LAST,
    )


def _with_hadamard(operand: Operand) -> Operand:
    # Four over six is left out: transformed values are close to Gaussian, where it gains nothing.
    return Operand("nvfp4", operand.scaling, 16, rounding=operand.rounding, scale_up=operand.scale_up)


def _eden(name: str, output: Product, keep_first: float, keep_last: float) -> Recipe:
    """Return a recipe with MS-EDEN in the backward: operands are quantized again, unbiased, with fresh transforms."""
    product = Product(_EDEN, _EDEN)
    return Recipe(
        name, output, product, product, _NVFP4_TOLERANCE, keep_first=keep_first, keep_last=keep_last
    )


_ACTIVATION, _WEIGHT = Operand("nvfp4", "1x16"), Operand("nvfp4", "16x16")
_FOUR_OVER_SIX = Operand("nvfp4", "1x16", four_over_six=True)

RECIPES: dict[str, Recipe] = {
    recipe.name: recipe
    for recipe in (
        # The error of a sum of 256 float32 products is about 1e-6; it would be 3e-4 with TF32.
        _unquantized("fp32", _FP32, 2e-5),
        # The error of rounding both operands and the result to 8 bits is about 3e-3.
        _unquantized("bf16", _BF16, 1e-2),
        # An operand loses 2 to 4 % in E4M3 and 4 to 6 % in E5M2, so a product 4 to 7 %.
        _fp8("fp8-tensorwise", "tensor"),
        _fp8("fp8-delayed", "delayed"),
        _fp8("fp8-rowwise", "row", gradient_format="e4m3"),
        _nvfp4("nvfp4", _ACTIVATION, _WEIGHT, _NVIDIA_GRADIENT),
        _nvfp4(
            "nvfp4-4o6",
            _FOUR_OVER_SIX,
            Operand("nvfp4", "16x16", four_over_six=True),
            _NVIDIA_GRADIENT,
        ),
        _nvfp4(
            "nvfp4-unbiased",
            _ACTIVATION,
            _WEIGHT,
            Operand("nvfp4", "1x16", rounding="stochastic", scale_up=True),
        ),
        # Weights are in 1x16 too: the backward quantizes them again, so W and W^T need not be the same numbers.
        _eden("nvfp4-eden", Product(_FOUR_OVER_SIX, _FOUR_OVER_SIX), _KEPT_FIRST, _KEPT_LAST),
        # Nearly all of NVFP4's increase in loss comes from the forward (tables of arXiv 2601.22813), which is in FP8
        # here, so no block needs to stay in BF16.
        _eden("fp8-nvfp4", _FP8_PRODUCT, 0.0, 0.0),
    )
}
ALIASES = {"fp8": "fp8-delayed"}


def expert_recipe(recipe: Recipe) -> Recipe:
    """Return the recipe in which the experts of a mixture are computed when a run uses `recipe`.

    FP8 operands of experts are E4M3 in every FP8 recipe: no grouped product of torch takes E5M2, and an expert sees too
    few tokens of a step for a history of its magnitudes. The output and the input gradient have a scale per row, as in
    torchao's training of experts. The weight gradient has one for all rows of an expert, found from theirs without
    reading the values again. NVFP4 operands are those of `recipe`. The name is that of `recipe`, or fp8-rowwise.
    """
    row, of_expert = Operand("e4m3", "row"), Operand("e4m3", "tensor")

    def of_experts(product: Product, operand: Operand) -> Product:
        return Product(operand, operand) if product.left.format in ("e4m3", "e5m2") else product

    output, input_gradient = (of_experts(p, row) for p in (recipe.output, recipe.input_gradient))
    return replace(
        recipe,
        name="fp8-rowwise" if output.left == input_gradient.left == row else recipe.name,
        output=output,
        input_gradient=input_gradient,
        weight_gradient=of_experts(recipe.weight_gradient, of_expert),
    )


def kept_blocks(share: float, layers: int) -> int:
    """Return the number of blocks in a share, rounded up."""
    return math.ceil(share * layers - 1e-9)  # 1e-9: share * layers may be slightly above an integer


def recipe_named(name: str) -> Recipe:
    """Return a recipe by name. "fp8" is "fp8-delayed", which needs no separate pass for the amax. Raises UsageError."""
    name = ALIASES.get(name, name)
    if name not in RECIPES:
        raise UsageError(f"precision '{name}' does not exist; use one of {', '.join(RECIPES)}")
    return RECIPES[name]


def default_precision(on_cpu: bool) -> Literal["fp32", "bf16"]:
    """Return the precision that "auto" stands for. A run on a GPU that fails the self-check of BF16 uses fp32 too."""
    return "fp32" if on_cpu else "bf16"
