"""The benchmark of the casts of experts: what it compares exists, and its functions run on a small shape."""

import pytest

pytest.importorskip("triton")

from benchmarks import expert_casts
from deskside.kernels.moe import fp8_launch


def test_ways_consist_of_steps_that_give_what_their_reference_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expert_casts, "DEVICE", "cpu")
    steps = expert_casts.steps_of(40, 3, 2, 64, 48)
    names = {*steps, *expert_casts.products_of(steps)}
    assert {name for parts in expert_casts.WAYS.values() for name in parts} <= names
    for step in steps.values():
        assert expert_casts.checked(step) == {"differ": 0.0, "error": 0.0} and step.size > 0
        assert set(step.tiles) <= set(expert_casts.TILES)


def test_tiles_differ_and_the_one_in_use_comes_back_after_a_failure() -> None:
    for name, tiles in expert_casts.TILES.items():
        used = getattr(fp8_launch, name)
        assert len(set(tiles)) == len(tiles) and used in tiles
        with pytest.raises(KeyError), expert_casts.tile_set(name, (1, 2, 3)):
            assert getattr(fp8_launch, name) == (1, 2, 3)
            raise KeyError
        assert getattr(fp8_launch, name) == used
