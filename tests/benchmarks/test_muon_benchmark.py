"""The shapes and the time floor of benchmarks/muon.py, and its comparison of singular values."""

import pytest

from benchmarks import muon
from deskside.config.optim import MuonConfig
from deskside.kernels.newton_schulz import iteration_flops
from deskside.optim.muon import Muon


def test_shapes_and_floor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(muon, "DEVICE", "cpu")
    shapes = muon.stacks(Muon(muon.infos("demo"), MuonConfig()))
    weights = sum(batch * rows * columns for batch, rows, columns in shapes)
    assert weights == sum(info.parameter.numel() for info in muon.infos("demo"))
    assert all(info.parameter.grad is not None for info in muon.infos("demo"))
    one = [(3, 2048, 768)]
    flops = 3 * 5 * iteration_flops(2048, 768, symmetric=True)
    assert flops == 3 * 5 * (3 * 2048 * 768**2 + 768**3)
    assert muon.floor_ms(one, 1e12, float("inf")) == pytest.approx(flops / 1e9)
    assert muon.floor_ms(one, float("inf"), 1e9) == pytest.approx(30 * 3 * 2048 * 768 / 1e6)


def test_experts_are_matrices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(muon, "DEVICE", "cpu")
    shapes = muon.stacks(Muon(muon.infos("demo:4x64"), MuonConfig()))
    assert sum(batch for batch, *_ in shapes) > sum(
        batch for batch, *_ in muon.stacks(Muon(muon.infos("demo"), MuonConfig()))
    )


def test_deviation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(muon, "DEVICE", "cpu")
    assert 0 < muon.deviation((96, 64), False) < 0.03
