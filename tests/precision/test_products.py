"""The three products in every format, with the tensor cores' function and
emulated, compared with float64 of the operands.
"""

import pytest
import torch
from torch import Tensor

from deskside.config.recipes import RECIPES, Operand, Product
from deskside.precision.products import Kind, product
from deskside.precision.quantized_operand import Draws, QuantizedOperand, quantize_operand

N, K, M = 256, 128, 384
KINDS: tuple[Kind, ...] = ("output", "input_gradient", "weight_gradient")
QUANTIZED = [(name, kind) for name in RECIPES for kind in KINDS if RECIPES[name].quantized]


def operands(kind: Kind, asked: Product) -> tuple[QuantizedOperand, QuantizedOperand, Tensor, Tensor]:
    """Return (left, right) and both as float64 matrices of the represented
    values, to be summed over their last dimension.
    """
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).bfloat16()

    draws = Draws(0)
    draws.begin(1)
    if kind == "output":
        tensors, along = (random(N, K), random(M, K)), ("columns", "columns")
    elif kind == "input_gradient":
        tensors, along = (random(N, M), random(M, K)), ("columns", "rows")
    else:
        tensors, along = (random(N, M), random(N, K)), ("rows", "rows")
    made = [
        quantize_operand(x, operand, way, draws, 7)  # type: ignore[arg-type]
        for x, operand, way in zip(tensors, (asked.left, asked.right), along, strict=True)
    ]
    wide = [summed_last(x, way) for x, way in zip(made, along, strict=True)]
    return made[0], made[1], wide[0], wide[1]


def summed_last(x: QuantizedOperand, along: str) -> Tensor:
    values = x.values.double()
    if along == "rows" and not x.transposed:
        values = values.T
    if x.scale is None:
        return values
    return values * (x.scale.double() if x.scale.ndim == 0 else x.scale.double()[:, None])


def relative(found: Tensor, truth: Tensor) -> float:
    return float((found.double() - truth).norm() / truth.norm())


def asked(name: str, kind: Kind) -> Product:
    return RECIPES[name].products[KINDS.index(kind)]


@pytest.mark.parametrize(("name", "kind"), QUANTIZED)
def test_an_emulated_product_is_exact_but_for_its_sums(name: str, kind: Kind) -> None:
    left, right, a, b = operands(kind, asked(name, kind))
    truth = a @ b.T
    found = product(kind, left, right, torch.float32, native=False)
    assert found.shape == truth.shape and found.dtype == torch.float32
    assert relative(found, truth) < 1e-6
    low = product(kind, left, right, torch.bfloat16, native=False)
    assert torch.equal(low, found.bfloat16())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["fp8-tensorwise", "fp8-delayed", "fp8-rowwise"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_torchs_own_product_of_fp8_is_the_emulated_one(name: str, kind: Kind, dtype: torch.dtype) -> None:
    """torch._scaled_mm on a CPU is an independent implementation. It takes the same operands in the same layouts."""
    left, right, *_ = operands(kind, asked(name, kind))
    native = product(kind, left, right, dtype, native=True)
    emulated = product(kind, left, right, dtype, native=False)
    assert native.dtype == emulated.dtype == dtype and native.shape == emulated.shape
    rounded = dtype == torch.bfloat16 or name == "fp8-rowwise"  # which is computed with a bfloat16 result
    assert relative(native, emulated.double()) < (3e-3 if rounded else 1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_plain_products_are_matrix_products(kind: Kind) -> None:
    plain = Product(Operand("bfloat16"), Operand("bfloat16"))
    left, right, a, b = operands(kind, plain)
    assert left.scale is None and right.scale is None
    low = product(kind, left, right, torch.bfloat16, native=True)
    assert low.dtype == torch.bfloat16 and relative(low, a @ b.T) < 3e-3
    wide = [QuantizedOperand(x.values.double()) for x in (left, right)]
    assert relative(product(kind, wide[0], wide[1], torch.float64, native=False), a @ b.T) < 1e-15


def test_scales_per_row_reach_their_own_rows() -> None:
    """One row is a million times larger than the rest. It loses nothing, and does not affect the others."""
    generator = torch.Generator().manual_seed(0)
    x, w = (torch.randn(rows, K, generator=generator).bfloat16() for rows in (N, M))
    x[5] *= 1e6
    w[9] *= 1e-6
    by_row = asked("fp8-rowwise", "output")
    left, right = (
        quantize_operand(t, o, "columns", Draws(0), 0) for t, o in ((x, by_row.left), (w, by_row.right))
    )
    found, truth = product("output", left, right, torch.float32, native=False), x.double() @ w.double().T
    errors = (found - truth).norm(dim=1) / truth.norm(dim=1)
    assert float(errors.max()) < 0.06
    columns = (found - truth)[6:].norm(dim=0) / truth[6:].norm(dim=0)
    assert float(columns.max()) < 0.06
