"""The interpreted kernel of Muon's 8-bit momentum and its reference, step after step: see test_momentum_8bit.py."""

import torch

from deskside.kernels.adamw_state import BLOCK, num_blocks
from deskside.kernels.momentum_8bit import dequantize, look_ahead_8bit

ELEMENTS = 3 * 8 * BLOCK + 77  # not a multiple of a block


def steps(dtype: str) -> dict[str, float]:
    """Return the largest differences in three steps, relative to the largest value, and in a skipped one."""
    generator = torch.Generator().manual_seed(0)
    places = [[torch.zeros(ELEMENTS, dtype=torch.int8), torch.zeros(num_blocks(ELEMENTS))] for _ in range(2)]
    found = {"direction": 0.0, "momentum": 0.0, "codes": 0.0, "skipped": 0.0}
    clip = torch.tensor(0.5)
    for step in range(4):
        g = torch.randn(ELEMENTS, generator=generator).to(getattr(torch, dtype))
        g[: 2 * BLOCK] *= 1e-3
        g[2 * BLOCK : 3 * BLOCK] = 0
        skip = torch.tensor(float(step == 3))
        if step == 3:
            g.fill_(torch.nan)
        before = [tensor.clone() for tensor in places[1]]
        directions = [g.clone(), g.clone()]
        for direction, (codes, scales), fused in zip(directions, places, (False, True), strict=True):
            look_ahead_8bit(direction, codes, scales, 0.95, step % 2 == 0, skip, clip, fused)
        if step == 3:
            found["skipped"] = float(sum((a != b).sum() for a, b in zip(before, places[1], strict=True)))
            # The interpreter truncates where it converts to bfloat16.
            torch.testing.assert_close(directions[1].float(), dequantize(*before), rtol=2**-7, atol=0)
        values = [dequantize(*place) for place in places]
        for key, (plain, kernel) in (("direction", directions), ("momentum", values)):
            assert bool(torch.isfinite(plain).all() and torch.isfinite(kernel).all()), (step, key)
            error = (plain.float() - kernel.float()).abs().max() / plain.float().abs().max()
            found[key] = max(found[key], float(error))
        found["codes"] = max(found["codes"], float((places[0][0] != places[1][0]).float().mean()))
    return found
