"""The trial of tiles on a fake device: which tiles are tried, chosen and cached."""

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from deskside.kernels.fused import choose_tiles as trial
from deskside.kernels.fused.choose_tiles import MlpShape, Problem, choose, choose_tiles, use_tiles
from deskside.kernels.fused.tiles import CANDIDATES, Tile, temporarily, tile_of
from deskside.utils.trials import TrialCache

pytest.importorskip("triton")

CPU = torch.device("cpu")
SHAPE = MlpShape(16384, 768, 2048, "silu", True, torch.bfloat16, "delayed")
KERNEL = "gated"
FIRST, SECOND, THIRD, FOURTH = CANDIDATES[KERNEL]
BANDWIDTH = 1e9
TRAFFIC = 1000  # bytes, a microsecond


class Card:
    """A device with the seconds of a launch for each tile. wrong: tiles with other
    bits. impossible: tiles that do not run.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seconds: dict[Tile, float]):
        self.seconds, self.launches = seconds, Counter[Tile]()
        self.wrong: set[Tile] = set()
        self.impossible: set[Tile] = set()
        monkeypatch.setattr(trial, "device_seconds", self.time)
        monkeypatch.setattr(trial, "bandwidth", lambda device: BANDWIDTH)
        monkeypatch.setattr(trial, "problems_of", lambda shape, device: self.problems)

    @property
    def problems(self) -> dict[str, Problem]:
        return {KERNEL: Problem(self.run, TRAFFIC)}

    def run(self) -> tuple[Tensor, ...]:
        tile = tile_of(KERNEL)
        self.launches[tile] += 1
        if tile in self.impossible:
            raise RuntimeError("out of resources: shared memory")
        return (torch.tensor(float(tile in self.wrong)),)

    def time(self, run: Callable[[], object], device: torch.device) -> float:
        run()
        return self.seconds[tile_of(KERNEL)]


MICROSECONDS = {FIRST: 2e-6, SECOND: 1.5e-6, THIRD: 1.2e-6, FOURTH: 1.1e-6}


def chosen(card: Card, passes: float = 1e9) -> tuple[Tile, bool]:
    choices, complete = choose(card.problems, BANDWIDTH, passes, CPU)
    assert choices.keys() == {KERNEL} and tile_of(KERNEL) == FIRST  # trying tiles changes nothing
    return Tile(*choices[KERNEL]["tile"]), complete


def test_the_fastest_tile_with_the_same_bits_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    card = Card(monkeypatch, MICROSECONDS)
    assert chosen(card) == (FOURTH, True)
    card.wrong = {FOURTH}
    assert chosen(card) == (THIRD, True)
    card.impossible = {THIRD}
    assert chosen(card) == (SECOND, True)


def test_a_tie_keeps_the_first_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    assert chosen(Card(monkeypatch, dict.fromkeys(MICROSECONDS, 1.99e-06) | {FIRST: 2e-6})) == (FIRST, True)


@pytest.mark.parametrize(
    ("first", "passes", "complete"),
    [
        (1.09e-6, 1e9, True),  # close to the memory traffic
        (2e-6, 1.9e6, False),  # could save 1.9 s, but compiling takes 2
    ],
)
def test_what_cannot_pay_is_not_tried(
    first: float, passes: float, complete: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    card = Card(monkeypatch, MICROSECONDS | {FIRST: first})
    assert chosen(card, passes) == (FIRST, complete)
    assert set(card.launches) == {FIRST}


def test_slow_compilation_takes_no_time_from_the_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the compiled tiles would not be tried, and the first would be cached for later runs."""
    now = 0.0

    @contextlib.contextmanager
    def slow(device: torch.device) -> Iterator[None]:
        nonlocal now
        yield
        now += 60.0

    monkeypatch.setattr(trial, "compile_ahead", slow)
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    assert chosen(Card(monkeypatch, MICROSECONDS)) == (FOURTH, True)


def test_a_choice_is_kept_and_a_longer_run_tries_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    card = Card(monkeypatch, MICROSECONDS)

    def found(passes: float) -> tuple[Tile, str, int]:
        before = card.launches.total()
        choice = choose_tiles(SHAPE, CPU, passes, TrialCache(tmp_path))[KERNEL]
        return Tile(*choice["tile"]), choice["trial"], card.launches.total() - before

    assert found(100.0)[:2] == (FIRST, "measured")
    assert found(50.0) == (FIRST, "cached", 0)
    assert found(1e9)[:2] == (FOURTH, "measured")
    assert found(50.0) == found(1e10) == (FOURTH, "cached", 0)


def test_chosen_tiles_are_used() -> None:
    with temporarily(KERNEL, FIRST):
        use_tiles({KERNEL: {"tile": [THIRD.rows, THIRD.columns, THIRD.num_warps]}})
        assert tile_of(KERNEL) == THIRD
        with pytest.raises(ValueError, match="gated"):
            use_tiles({KERNEL: {"tile": [3, 5, 1]}})
    assert tile_of(KERNEL) == FIRST


@pytest.mark.parametrize("scaling", ["none", "delayed", "tensor", "row"])
def test_every_recipe_has_the_launches_of_its_kernels(scaling: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The launches equal those on a GPU, with the kernels left out, and their traffic is counted by hand."""
    from triton.runtime.jit import JITFunction

    launched: list[str] = []

    def run(kernel: Any, *args: Any, **options: Any) -> None:
        launched.append(kernel.fn.__name__)

    monkeypatch.setattr(JITFunction, "run", run)
    shape = MlpShape(64, 32, 48, "silu", True, torch.bfloat16, scaling)
    problems = trial.problems_of(shape, CPU)
    for problem in problems.values():
        assert all(isinstance(x, Tensor) for x in problem.run())
    assert launched == list(problems)
    expected = {
        "none": {"gated", "gated_backward"},
        "delayed": {"gated_fp8", "gated_backward_fp8", "cast_fp8"},
        "tensor": {"gated", "gated_backward", "cast_fp8"},
        "row": {"gated", "gated_backward", "row_col_amax", "cast_both"},
    }
    assert problems.keys() == expected[scaling]
    # Reads gate and up and writes the product; with a gradient, it reads three and writes two.
    if scaling == "none":
        assert problems["gated"].traffic == 64 * 48 * 2 * 3
        assert problems["gated_backward"].traffic == 64 * 48 * 2 * 5
    if scaling == "delayed":  # FP8 in rows and in columns
        assert problems["gated_fp8"].traffic == 64 * 48 * (4 + 2)
        assert problems["gated_backward_fp8"].traffic == 64 * 48 * (6 + 4)
