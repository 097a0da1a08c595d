"""Precision recipes as data: the number format of each operand of the three products of a linear layer.

A linear layer y = x W^T runs three products in a training step: the output (x, W), the input gradient (dy, W) and the
weight gradient (dy, x). A recipe names the format of both operands of each. NVIDIA's NVFP4 recipe, the ones that
beat it, and the FP8 recipes are all combinations of the few parts below; `precision/` carries them out.

Sources: FP8 formats, Micikevicius et al. 2022 (arXiv 2209.05433); NVFP4 pretraining, NVIDIA 2025 (arXiv 2509.25149);
four over six, Cook et al. 2025 (arXiv 2512.02010); MS-EDEN, Panferov et al. 2026 (arXiv 2601.22813); FP8 by rows
with E4M3 throughout, torchao's recipe of that name.
"""

import math
from dataclasses import dataclass
from typing import Literal

from deskside.utils.errors import UsageError

Format = Literal["float32", "bfloat16", "e4m3", "e5m2", "nvfp4"]
Scaling = Literal["none", "tensor", "delayed", "row", "1x16", "16x16"]
Rounding = Literal["nearest", "stochastic", "eden"]


@dataclass(frozen=True)
class Operand:
    """Quantization of one operand of a product.

    scaling: what shares a scale. "tensor": the largest value of this very tensor; "delayed": the largest of the last
        `Recipe.amax_history` steps; "row": each row of the product's left operand, each column of its right one;
        "1x16": 16 values along the summed dimension; "16x16": a tile, so that W and W^T are the same numbers.
    hadamard: size of the random Hadamard transform along the summed dimension, 0 for none. Both operands of a product
        carry the same, so that it cancels.
    fresh_signs: draw the transform's signs anew at every step; else one fixed vector.
    rounding: of the values. "eden": nearest, with block scales corrected and rounded stochastically (MS-EDEN).
    four_over_six: each block chooses the better of a largest value of 6 and of 4.
    scale_up: round block scales up, so that no value is clipped and stochastic rounding is truly unbiased.
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
        return self.format not in ("float32", "bfloat16")


@dataclass(frozen=True)
class Product:
    """The two operands of a product, in the order left (activations or gradients) and right."""

    left: Operand
    right: Operand

    @property
    def quantized(self) -> bool:
        return self.left.quantized


@dataclass(frozen=True)
class Recipe:
    """The three products, and where and when they apply.

    keep_first, keep_last: share of the blocks, from the front and from the back, that stays in BF16 (rounded up).
    tolerance: relative Frobenius error against float64 that the self-check allows to one product of this recipe.
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
        return any(p.quantized for p in self.products)

    @property
    def products(self) -> tuple[Product, Product, Product]:
        """Output, input gradient, weight gradient."""
        return self.output, self.input_gradient, self.weight_gradient

    @property
    def formats(self) -> frozenset[Format]:
        """Every format of its operands."""
        return frozenset(o.format for p in self.products for o in (p.left, p.right))

    def kept_blocks(self, layers: int) -> tuple[int, int]:
        """Blocks at the front and at the back of a model of `layers` that stay in BF16."""
        return kept_blocks(self.keep_first, layers), kept_blocks(self.keep_last, layers)


_FP32, _BF16 = Operand("float32"), Operand("bfloat16")


def _plain(name: str, operand: Operand, tolerance: float) -> Recipe:
    product = Product(operand, operand)
    return Recipe(name, product, product, product, tolerance)


def _fp8(name: str, scaling: Scaling, of_gradients: Format = "e5m2") -> Recipe:
    """E4M3 for activations and weights. Gradients under one scale per tensor are in E5M2, for its range; a scale per
    row has to cover a row only, so there E4M3's precision is the better use of the bits."""
    value, gradient = Operand("e4m3", scaling), Operand(of_gradients, scaling)
    return Recipe(
        name, Product(value, value), Product(gradient, value), Product(gradient, value), tolerance=0.12
    )


_FP8_PRODUCT = Product(Operand("e4m3", "tensor"), Operand("e4m3", "tensor"))
_NVIDIA_GRADIENT = Operand("nvfp4", "1x16", rounding="stochastic")
_EDEN = Operand("nvfp4", "1x16", hadamard=128, fresh_signs=True, rounding="eden")

# NVIDIA's 12B model keeps 2 blocks at the front and 8 at the back of its 62 (arXiv 2509.25149), so 1 and 2 of 12. Every
# recipe with an NVFP4 forward gets the same shares, so that two of them differ in their numbers alone; MS-EDEN was
# published with none (precision.keep_first = 0, keep_last = 0).
_KEPT_FIRST, _KEPT_LAST = 2 / 62, 8 / 62

# Two operands of 9.5 % noise give 13 %. Stochastic rounding has twice the variance of nearest, a third more with scales
# rounded up, and a 16x16 tile's noise is 11 %: 19 % at worst. A gradient off by a factor of 0.75 is caught.
_NVFP4_TOLERANCE = 0.25


def _nvfp4(name: str, activation: Operand, weight: Operand, gradient: Operand) -> Recipe:
    """NVIDIA's arrangement: a Hadamard transform on the operands of the weight gradient alone."""
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
    # Four over six chooses on the forward's values; after a transform they are close to Gaussian and it gains nothing.
    return Operand("nvfp4", operand.scaling, 16, rounding=operand.rounding, scale_up=operand.scale_up)


def _eden(name: str, output: Product, keep_first: float, keep_last: float) -> Recipe:
    """MS-EDEN in the backward: weights and activations are quantized again, unbiased, with fresh transforms."""
    product = Product(_EDEN, _EDEN)
    return Recipe(
        name, output, product, product, _NVFP4_TOLERANCE, keep_first=keep_first, keep_last=keep_last
    )


_ACTIVATION, _WEIGHT = Operand("nvfp4", "1x16"), Operand("nvfp4", "16x16")
_BETTER = Operand("nvfp4", "1x16", four_over_six=True)

RECIPES: dict[str, Recipe] = {
    recipe.name: recipe
    for recipe in (
        # 256-long sums of float32 products: about 1e-6; TF32, where someone switched it on, gives 3e-4.
        _plain("fp32", _FP32, 2e-5),
        # Rounding both operands and the result to 8 bits: about 3e-3.
        _plain("bf16", _BF16, 1e-2),
        # Both operands lose 2 to 4 % in E4M3 and 4 to 6 % in E5M2: 4 to 7 % together.
        _fp8("fp8-tensorwise", "tensor"),
        _fp8("fp8-delayed", "delayed"),
        _fp8("fp8-rowwise", "row", of_gradients="e4m3"),
        _nvfp4("nvfp4", _ACTIVATION, _WEIGHT, _NVIDIA_GRADIENT),
        _nvfp4(
            "nvfp4-4o6",
            _BETTER,
            Operand("nvfp4", "16x16", four_over_six=True),
            _NVIDIA_GRADIENT,
        ),
        _nvfp4(
            "nvfp4-unbiased",
            _ACTIVATION,
            _WEIGHT,
            Operand("nvfp4", "1x16", rounding="stochastic", scale_up=True),
        ),
        # Weights in 1x16 too: the backward quantizes anew, so W and W^T need not be the same numbers.
        _eden("nvfp4-eden", Product(_BETTER, _BETTER), _KEPT_FIRST, _KEPT_LAST),
        # Nearly all of NVFP4's loss comes from the forward (precision tables of arXiv 2601.22813), which is FP8 here:
        # no block needs to stay behind.
        _eden("fp8-nvfp4", _FP8_PRODUCT, 0.0, 0.0),
    )
}


ALIASES = {"fp8": "fp8-delayed"}


def kept_blocks(share: float, layers: int) -> int:
    """Return the number of blocks in a share, rounded up."""
    return math.ceil(share * layers - 1e-9)


def recipe_named(name: str) -> Recipe:
    """Return a recipe by name. "fp8" is delayed scaling: no separate pass for the amax. Raises UsageError."""
    name = ALIASES.get(name, name)
    if name not in RECIPES:
        raise UsageError(f"precision '{name}' does not exist; use one of {', '.join(RECIPES)}")
    return RECIPES[name]
