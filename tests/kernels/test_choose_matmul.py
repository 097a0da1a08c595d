"""The trial of products with quack-kernels, whose kernels and times are made up here."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from deskside.kernels import choose_matmul as trial
from deskside.kernels import quack_matmul
from deskside.kernels.choose_matmul import MatmulChoice, MatmulShape, choose_matmul
from deskside.kernels.quack_matmul import MatmulTile
from deskside.utils.trials import TrialCache
from tests.kernels.quack_reference import launch

FAST, WRONG, UNABLE = MatmulTile(128, 192, True, 2), MatmulTile(1, 1, False, 1), MatmulTile(2, 2, False, 1)
SHAPE = MatmulShape(64, ((48, 32),), (32, 96))
CPU = torch.device("cpu")
LONG = float("inf")


class Card:
    """Kernels with these times, relative to torch's 1 ms."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, fast: float = 0.5):
        self.times = {FAST: fast, WRONG: 0.1, UNABLE: 0.1}
        self.tile: MatmulTile | None = None
        self.launches = 0
        monkeypatch.setattr(trial, "tiles_of", lambda device: tuple(self.times))
        monkeypatch.setattr(trial, "device_seconds", self.seconds)
        monkeypatch.setattr(trial, "load", lambda: None)
        monkeypatch.setattr(quack_matmul, "_launch", self.launch)

    def seconds(self, run: Any, device: torch.device) -> float:
        self.tile = None
        run()
        return 1e-3 * (1.0 if self.tile is None else self.times[self.tile])

    def launch(self, name: str, tile: MatmulTile, *operands: Tensor, out: dict[str, Tensor]) -> None:
        self.tile = tile
        self.launches += 1
        if tile == UNABLE:
            raise RuntimeError("too much shared memory")
        launch(name, tile, *operands, out=out)
        if tile == WRONG:
            out["D"][-1, -1] += 10.0


def test_the_fastest_right_kernel_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    Card(monkeypatch)
    facts = choose_matmul(SHAPE, CPU, LONG, TrialCache(None))
    assert facts is not None and facts["trial"] == "measured"
    choice = MatmulChoice.of(facts)
    assert choice.plain == {("output", 48, 32): FAST, ("input_gradient", 48, 32): FAST}
    assert choice.gated == (FAST, FAST)
    assert facts["plain"][0]["microseconds"] == {"cuBLAS": 1000.0, "128 x 192 x True x 2": 500.0}


def test_a_tie_keeps_cublas(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    Card(monkeypatch, fast=0.99)
    monkeypatch.setattr(TrialCache, "machine", {"card": "made up"})
    for how in ("measured", "cached"):
        facts = choose_matmul(SHAPE, CPU, LONG, TrialCache(tmp_path))
        assert facts is not None and MatmulChoice.of(facts) == MatmulChoice({}, None)
        assert facts["trial"] == how and "none is faster" in trial.summary(facts)


def test_a_run_too_short_to_win_the_trial_back_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four products of 1 ms and 5 % of them: 15 s come back after 75,000 passes."""
    card = Card(monkeypatch)
    assert choose_matmul(SHAPE, CPU, 74_000, TrialCache(None)) is None
    assert card.launches == 0
    assert choose_matmul(SHAPE, CPU, 76_000, TrialCache(None)) is not None


def test_a_kept_trial_is_not_repeated(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    card = Card(monkeypatch)
    monkeypatch.setattr(TrialCache, "machine", {"card": "made up"})
    first = choose_matmul(SHAPE, CPU, LONG, TrialCache(tmp_path))
    launches = card.launches
    again = choose_matmul(SHAPE, CPU, 10_000, TrialCache(tmp_path))
    assert first is not None and again == {**first, "trial": "cached"} and card.launches == launches
    # 2 s would be saved, and it takes 5 s to start the package.
    assert choose_matmul(SHAPE, CPU, 1_000, TrialCache(tmp_path)) is None
    monkeypatch.setattr(trial, "package_version", lambda package: "another")
    changed = choose_matmul(SHAPE, CPU, LONG, TrialCache(tmp_path))
    assert changed is not None and changed["trial"] == "measured"


@pytest.mark.parametrize("place", [(-1, slice(None)), (slice(None), -1), (slice(128, 256), slice(0, 16))])
def test_one_wrong_row_or_column_is_found(place: Any) -> None:
    expected = torch.randn(20_000, 48)
    ours = expected.bfloat16()
    assert trial._error(ours, expected) < trial.TOLERANCE
    ours[place] = 0
    assert trial._error(ours, expected) > trial.TOLERANCE
    ours[0, 0] = float("nan")
    assert trial._error(ours, expected) == float("inf")


def test_faster_plain_products_are_what_the_gate_has_to_beat(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything takes 0.5 ms: with a kernel for the gate that takes no time, its epilogue wins nothing."""
    Card(monkeypatch)
    shape = MatmulShape(64, ((192, 32), (32, 96)), (32, 96))
    facts = choose_matmul(shape, CPU, LONG, TrialCache(None))
    assert facts is not None and facts["gated"]["tiles"] is None
    assert trial.saved_seconds(facts) == pytest.approx(4 * 0.5e-3)


def test_too_little_memory_leaves_the_products_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    Card(monkeypatch)

    def full(run: Any, device: torch.device) -> float:
        raise torch.OutOfMemoryError("full")

    monkeypatch.setattr(trial, "device_seconds", full)
    assert choose_matmul(SHAPE, CPU, LONG, TrialCache(None)) is None


def test_there_is_no_trial_without_kernels() -> None:
    assert choose_matmul(SHAPE, CPU, LONG, TrialCache(None)) is None
