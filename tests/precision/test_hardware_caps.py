"""Native NVFP4 and MXFP8 without a GPU that supports them.

Their kernels are replaced by their definition in plain torch, so the tests check that every product gets the
right operands in the right orientation.
"""

import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from deskside.config.recipes import RECIPES, Operand
from deskside.ops.linear import Linear
from deskside.precision import nvfp4, products
from deskside.precision.convert import convert
from deskside.precision.formats import e2m1_decode, pack, unpack
from deskside.precision.hardware_caps import HardwareCaps, hardware_caps
from deskside.precision.quantized_operand import QuantizedOperand

pytest.importorskip("triton")

from deskside.kernels.nvfp4 import native, quantize


def packed_on_cpu(
    x: Tensor, operand: Operand, along: str, *, signs: Tensor | None = None, seed: int = 0
) -> quantize.Packed:
    """Return what `quantize_packed` is defined to return: the reference's codes
    and scales, with the summed dimension last.
    """
    generator = torch.Generator().manual_seed(seed)
    exact = nvfp4.quantize(x, operand, along, signs=signs, generator=generator)  # type: ignore[arg-type]
    codes, scales = exact.codes, exact.block_scale
    if along == "rows":
        codes, scales = codes.T.contiguous(), scales.T.contiguous()
    return quantize.Packed(pack(codes), scales, exact.global_scale)


def values(packed: quantize.Packed) -> Tensor:
    scale = packed.block_scale.float().repeat_interleave(16, dim=1)
    return e2m1_decode(unpack(packed.codes)) * scale * packed.global_scale


def product_on_cpu(left: quantize.Packed, right: quantize.Packed, dtype: torch.dtype) -> Tensor:
    return (values(left) @ values(right).T).to(dtype)


def fp8_on_cpu(
    left: Tensor, right: Tensor, scale_a: Tensor, *, scale_b: Tensor, dtype: torch.dtype
) -> Tensor:
    return ((left.float() @ right.float().T) * scale_a * scale_b).to(dtype)


def gradients(recipe: str, monkeypatch: pytest.MonkeyPatch, found: HardwareCaps) -> list[Tensor]:
    torch.manual_seed(0)
    model = torch.nn.Sequential()
    layer = Linear(128, [("out", 256)])
    torch.nn.init.normal_(layer.weight, std=0.1)
    model.append(layer)
    monkeypatch.setattr(sys.modules["deskside.precision.convert"], "hardware_caps", lambda device: found)
    applied = convert(
        model, replace(RECIPES[recipe], keep_first=0.0, keep_last=0.0), native=found != HardwareCaps()
    )
    applied.begin_step(1)
    x = torch.randn(64, 128).repeat(2, 1).bfloat16().requires_grad_()
    y = layer(x)
    return [y.detach(), *torch.autograd.grad(y, (x, layer.weight), torch.randn_like(y))]


@pytest.mark.parametrize("recipe", ["nvfp4", "nvfp4-4o6", "nvfp4-unbiased", "nvfp4-eden"])
def test_native_nvfp4_is_the_emulated_layer(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    def counted(*arguments: Any) -> Tensor:
        calls.append(arguments)
        return product_on_cpu(*arguments)

    monkeypatch.setattr(quantize, "quantize_packed", packed_on_cpu)
    monkeypatch.setattr(native, "nvfp4_matmul", counted)
    ours = gradients(recipe, monkeypatch, HardwareCaps(fp4=True))
    assert len(calls) == 3
    emulated = gradients(recipe, monkeypatch, HardwareCaps())
    for got, expected in zip(ours, emulated, strict=True):
        torch.testing.assert_close(
            got.float(), expected.float(), rtol=1e-2, atol=1e-2 * float(expected.std())
        )


def test_fp8_as_mxfp8_is_the_plain_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    def counted(*arguments: Any, **named: Any) -> Tensor:
        calls.append(arguments)
        return fp8_on_cpu(*arguments, **named)

    monkeypatch.setattr(native, "fp8_matmul", counted)
    ours = gradients("fp8-tensorwise", monkeypatch, HardwareCaps(mxfp8=True))
    assert len(calls) == 3
    plain = gradients("fp8-tensorwise", monkeypatch, HardwareCaps())
    for got, expected in zip(ours, plain, strict=True):
        torch.testing.assert_close(
            got.float(), expected.float(), rtol=1e-2, atol=1e-2 * float(expected.std())
        )


@pytest.mark.parametrize("size", [16, 32, 48])
def test_a_sum_that_no_block_of_32_divides_is_a_plain_product(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[str] = []
    monkeypatch.setattr(native, "fp8_matmul", lambda *_, **__: taken.append("blocks"))
    monkeypatch.setattr(products, "_native", lambda *_: taken.append("plain"))
    x = QuantizedOperand(torch.ones(64, size).to(torch.float8_e4m3fn), torch.ones(()))
    products.product("output", x, x, torch.bfloat16, native=True, mxfp8=True)
    assert taken == ["blocks" if size == 32 else "plain"]


@pytest.mark.parametrize("major", [9, 10, 12])
def test_the_stopwatch_is_asked_once_in_a_run(major: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is called on compute capability 12.x only, whatever a run on another GPU recorded."""
    module = sys.modules["deskside.precision.hardware_caps"]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (major, 0))
    monkeypatch.setattr(module, "_mxfp8_is_faster", lambda device: pytest.fail("timed again"))
    card = torch.device("cuda")
    for before in (True, False):
        expected = HardwareCaps(fp4=major > 9, mxfp8=before and major == 12, grouped_fp8=major < 12)
        assert hardware_caps(card, before) == expected
    monkeypatch.setattr(module, "_mxfp8_is_faster", lambda device: True)
    assert hardware_caps(card).mxfp8 == (major == 12)


def test_a_cpu_has_neither() -> None:
    assert hardware_caps(torch.device("cpu")) == HardwareCaps(fp4=False, mxfp8=False)
