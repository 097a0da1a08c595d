"""The plain torch reference of NVFP4 gives the same bits on the GPU as on the CPU, and never waits for the GPU."""

import pytest
import torch

from deskside.precision.nvfp4 import draw_signs, quantize
from tests.gpu.card import DEVICE, NEEDS_CARD
from tests.precision.test_nvfp4 import DISTRIBUTIONS, VARIANTS, draw

pytestmark = NEEDS_CARD


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("data", DISTRIBUTIONS)
def test_bits_are_those_of_the_cpu(data: str, name: str) -> None:
    torch.manual_seed(0)
    operand, x = VARIANTS[name], DISTRIBUTIONS[data](256, 384).bfloat16()
    given = draw(operand, 256, 384)
    on_card = {key: value.to(DEVICE) for key, value in given.items()}
    wanted, got = (
        quantize(x, operand, "columns", **given),
        quantize(x.to(DEVICE), operand, "columns", **on_card),
    )
    assert torch.equal(got.global_scale.cpu(), wanted.global_scale)
    if operand.rounding != "eden":
        assert torch.equal(got.codes.cpu(), wanted.codes)
        assert torch.equal(got.emulated.cpu(), wanted.emulated)
        return
    # EDEN's correction is a sum of 128, whose order depends on the device, so a scale close to its noise may differ.
    assert torch.equal(got.codes.cpu(), wanted.codes)
    ours, theirs = got.block_scale.float().cpu(), wanted.block_scale.float()
    # 1e37 overflows in the rotation; NaN has two signs.
    differ = (ours != theirs) & ~(ours.isnan() & theirs.isnan())
    assert differ.double().mean() < 1e-3


@pytest.mark.parametrize("name", VARIANTS)
def test_it_never_waits_for_the_card(name: str) -> None:
    operand, x = VARIANTS[name], torch.randn(256, 384, device=DEVICE)
    signs = draw_signs(128, x.device) if operand.hadamard == 128 else None
    # the first call of an operation may wait until it is loaded
    quantize(x, operand, "columns", signs=signs)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for along in ("columns", "rows"):
            quantized = quantize(x, operand, along, signs=signs)
            quantized.dequantized()
    finally:
        torch.cuda.set_sync_debug_mode("default")
