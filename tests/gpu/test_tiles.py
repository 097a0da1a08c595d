"""The fused kernels' tiles on a GPU: all give the same bits, and a trial ends with one of the candidates."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from deskside.kernels.fused import writes_fp8
from deskside.kernels.fused.choose_tiles import MlpShape, choose_tiles, problems_of
from deskside.kernels.fused.tiles import CANDIDATES, Tile, temporarily
from deskside.utils.trials import TrialCache
from tests.gpu.card import NEEDS_CARD

pytestmark = NEEDS_CARD

CARD = torch.device("cuda", 0)
SHAPE = MlpShape(1040, 768, 2048 + 48, "silu", True, torch.bfloat16, "none")
SCALINGS = ("none", "delayed", "row")


@pytest.mark.parametrize("scaling", SCALINGS)
def test_every_tile_gives_the_same_bits(scaling: str) -> None:
    if scaling != "none" and not writes_fp8(CARD):
        pytest.skip("this card cannot convert to FP8")
    for kernel, problem in problems_of(replace(SHAPE, scaling=scaling), CARD).items():
        expected = problem.run()
        for tile in CANDIDATES[kernel][1:]:
            with temporarily(kernel, tile):
                results = problem.run()
            for ours, theirs in zip(results, expected, strict=True):
                assert torch.equal(ours, theirs), (kernel, tile)


def test_a_trial_is_kept(tmp_path: Path) -> None:
    scaling = "delayed" if writes_fp8(CARD) else "none"
    shape = replace(SHAPE, tokens=16384, scaling=scaling)
    found = choose_tiles(shape, CARD, 1e9, TrialCache(tmp_path))
    again = choose_tiles(shape, CARD, 1e9, TrialCache(tmp_path))
    for kernel, choice in found.items():
        assert Tile(*choice["tile"]) in CANDIDATES[kernel]
        assert again[kernel] == {**choice, "trial": "cached"}
