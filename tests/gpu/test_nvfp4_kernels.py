"""The NVFP4 kernels on a GPU: equal to the torch reference, unbiased, and with exact products."""

import pytest
import torch
from torch import Tensor

from deskside.config.recipes import Operand
from deskside.kernels.nvfp4.operand import Along
from deskside.precision import formats, nvfp4
from tests.gpu.card import DEVICE, NEEDS_CARD
from tests.kernels.nvfp4_cases import LAYOUTS, OPERANDS, data, oriented, uniform

pytestmark = NEEDS_CARD

KINDS = ("gauss", "outliers", "grid", "lognormal", "tiny", "zeros", "constant")
SHAPE = (1040, 1152)
SEED = 0x1234_5678_9ABC_DEF0


def signs_for(operand: Operand) -> Tensor | None:
    return torch.randint(0, 2, (128,)).float().to(DEVICE) * 2 - 1 if operand.fresh_signs else None


def share(a: Tensor, b: Tensor) -> float:
    assert a.shape == b.shape
    return float((a != b).double().mean())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bfloat16", "float32"])
@pytest.mark.parametrize("along", ["columns", "rows"])
@pytest.mark.parametrize("name", OPERANDS)
def test_equals_the_reference(name: str, along: Along, dtype: torch.dtype) -> None:
    """Every value, code and scale is compared, with the same noise. Tensor cores
    sum a transform's values in another order.
    """
    from deskside.kernels.nvfp4 import quantize

    operand = OPERANDS[name]
    allowed = 2e-3 if operand.hadamard else 0.0
    for kind in KINDS:
        if operand.hadamard and (kind == "tiny" or (kind, dtype) == ("constant", torch.float32)):
            # tensor cores flush subnormals; a constant has only ties, which the order of the sums decides
            continue
        x = data(kind, SHAPE if operand.hadamard < 128 else (1024, 1152)).to(DEVICE, dtype)
        N, K = x.shape
        noise = None
        if operand.rounding == "stochastic":
            noise = uniform((N, K), SEED).to(DEVICE)
        elif operand.rounding == "eden":
            shape = (N, K // 16) if along == "columns" else (N // 16, K)
            noise = uniform(shape, SEED).to(DEVICE)
        signs = signs_for(operand)
        expected = nvfp4.quantize(x, operand, along, signs=signs, noise=noise)
        made = quantize.quantize(x, operand, along, signs=signs, seed=SEED)
        packed = quantize.quantize_packed(x, operand, along, signs=signs, seed=SEED)
        codes, scale = expected.codes, expected.block_scale.float()
        if along == "rows":
            codes, scale = codes.T, scale.T
        off = {
            "values": share(made.values, expected.emulated),
            "codes": share(packed.codes, formats.pack(codes)),
            "scales": share(packed.block_scale.float(), scale),
        }
        assert max(off.values()) <= allowed, (kind, off)
        error = float((made.global_scale / expected.global_scale - 1).abs())
        assert error <= (1e-5 if operand.hadamard else 0), (kind, error)


@pytest.mark.parametrize("scale_up", [False, True])
def test_stochastic_rounding_is_unbiased_with_scales_rounded_up(scale_up: bool) -> None:
    """<q(x), x> / <x, x> is 1 within the standard error with scale_up, and about 0.997 if scales clip values."""
    from deskside.kernels.nvfp4.quantize import quantize

    x = data("gauss", (4096, 4096)).to(DEVICE)
    operand = Operand("nvfp4", "1x16", rounding="stochastic", scale_up=scale_up)
    slopes = []
    for seed in range(8):
        made = quantize(x, operand, "columns", seed=seed)
        q = made.values.double() * made.global_scale.double()
        slopes.append(float((q * x).sum() / x.double().square().sum()))
    mean = sum(slopes) / len(slopes)
    # Noise of 14 % per value, 16.8 million values, 8 draws: 2e-5.
    assert abs(mean - (1.0 if scale_up else 0.9967)) < (1e-4 if scale_up else 5e-4), slopes


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["plain", "4/6", "Hadamard 16", "eden"])
def test_what_is_not_finite_reaches_the_product(name: str, poison: float) -> None:
    from deskside.kernels.nvfp4.quantize import quantize

    x = data("gauss", (256, 256)).to(DEVICE, torch.bfloat16)
    x[17, 33] = poison
    made = quantize(x, OPERANDS[name], "columns", signs=signs_for(OPERANDS[name]))
    assert not torch.isfinite(made.global_scale)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bfloat16", "float32"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "sizes", [(256, 512, 256), (1000, 1152, 768), (16, 48, 80), (768, 768, 16400)], ids=str
)
def test_product_against_float64(sizes: tuple[int, int, int], layout: str, dtype: torch.dtype) -> None:
    from deskside.kernels.nvfp4.matmul import Layout, scaled_matmul

    L, R, S = sizes
    if layout == "tn":
        L = -(-L // 16) * 16
    left, right = (data("gauss", (n, S), seed).to(DEVICE, torch.bfloat16) for seed, n in enumerate((L, R)))
    alpha, second = torch.tensor(0.75, device=DEVICE), torch.tensor(-2.0, device=DEVICE)
    kind: Layout = layout  # type: ignore[assignment]
    a, b = oriented(left, right, layout)
    made = scaled_matmul(a, b, alpha, kind, scale_b=second, dtype=dtype)
    again = scaled_matmul(a, b, alpha, kind, scale_b=second, dtype=dtype)
    exact = -1.5 * (left.double() @ right.double().T)
    error = float((made.double() - exact).norm() / exact.norm())
    # Hopper's tensor cores truncate sums: half a last bit towards zero at each of the 148 additions of a part of the
    # longest sum, 3e-6 in all where rounding would give 2e-7. One omitted value would give 8e-3.
    assert error < (3e-3 if dtype == torch.bfloat16 else 1e-5), error
    assert torch.equal(made, again)


def test_emulated_product_is_the_product_of_the_dequantised() -> None:
    from deskside.kernels.nvfp4.matmul import scaled_matmul
    from deskside.kernels.nvfp4.quantize import quantize

    x, w = (data("gauss", (n, 512), n).to(DEVICE, torch.bfloat16) for n in (384, 256))
    operand = OPERANDS["4/6"]
    left, right = quantize(x, operand, "columns"), quantize(w, operand, "columns")
    made = scaled_matmul(
        left.values, right.values, left.global_scale, "nt", scale_b=right.global_scale, dtype=torch.float32
    )
    exact = (left.values.double() @ right.values.double().T) * left.global_scale * right.global_scale
    assert float((made - exact).norm() / exact.norm()) < 2e-6
    assert float((made - x.double() @ w.double().T).norm() / exact.norm()) < 0.16


NATIVE = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] not in (10, 12),
    reason="needs block-scaled tensor cores",
)


@NATIVE
@pytest.mark.parametrize("sizes", [(256, 384, 512), (200, 80, 96)], ids=str)
def test_native_product_equals_the_emulated(sizes: tuple[int, int, int]) -> None:
    from deskside.kernels.nvfp4.native import nvfp4_matmul
    from deskside.kernels.nvfp4.quantize import quantize, quantize_packed

    L, R, S = sizes
    operand = OPERANDS["plain"]
    left, right = (data("gauss", (n, S), n).to(DEVICE, torch.bfloat16) for n in (L, R))
    made = nvfp4_matmul(
        quantize_packed(left, operand, "columns"), quantize_packed(right, operand, "columns"), torch.float32
    )
    a, b = quantize(left, operand, "columns"), quantize(right, operand, "columns")
    exact = (a.values.double() @ b.values.double().T) * a.global_scale * b.global_scale
    assert float((made - exact).norm() / exact.norm()) < 1e-4


@NATIVE
def test_fp8_as_mxfp8_against_float64() -> None:
    from deskside.kernels.nvfp4.native import fp8_matmul

    if torch.cuda.get_device_capability()[0] != 12:
        pytest.skip("for compute capability 12.x")
    left = data("gauss", (200, 160), 0).to(DEVICE).to(torch.float8_e5m2)
    right = data("gauss", (96, 160), 1).to(DEVICE).to(torch.float8_e4m3fn)
    alpha = torch.tensor(0.5, device=DEVICE)
    made = fp8_matmul(left, right, alpha, dtype=torch.float32)
    exact = 0.5 * (left.double() @ right.double().T)
    assert float((made - exact).norm() / exact.norm()) < 1e-4
