"""The GPU's rates: every entry exists, is a rate, and agrees with another way of measuring it."""

import pytest
import torch

from deskside.probe import card_benchmark as card


@pytest.fixture(scope="module")
def measured() -> dict:
    torch.set_num_threads(1)
    return card.measure_card("cpu")


def test_everything_is_measured(measured: dict) -> None:
    assert (measured["device"], measured["dtype"]) == ("cpu", "float32")
    assert [(m["in"], m["out"]) for m in measured["matmul"]] == list(card.WEIGHTS["cpu"])
    assert len(measured["attention"]) == len(card.HEADS["cpu"]) * len(card.LENGTHS["cpu"])
    assert all(row["backend"] and row["flops"] > 0 for row in measured["attention"])
    assert 0 < measured["launch_seconds"] < 1e-3


def test_rates_are_within_reason(measured: dict) -> None:
    """The limits are wide and hold for any machine, because other processes may slow down single measurements."""
    for row in measured["matmul"]:
        for kind in ("forward", "input_gradient", "weight_gradient"):
            assert 1e6 < row[kind] < 1e14
    assert 1e7 < measured["copy_bandwidth"] < 1e12


def test_a_length_that_does_not_fit_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(need: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(card, "choose", fails)
    rows = card._attention(torch.device("cpu"), torch.float32)
    assert all(row["backend"] is None and "out of memory" in row["error"] for row in rows)
