"""Runs whose tokens also predict the tokens after the next one."""

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from deskside.config.sections import MultiTokenConfig
from tests.train import tiny_run

STEPS = 9  # the third token ahead counts in the first three steps, the second in the first six
CHANGES: dict[str, Any] = {"schedule": {"length": f"{STEPS} steps"}, "data": {"document_mask": True}}


@pytest.fixture(scope="module")
def runs(data: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Runs with and without future tokens; the former in one pass and in four."""
    folder = tmp_path_factory.mktemp("multi-token")
    multi = {**CHANGES, "multi_token": {"weights": [0.5, 0.25], "until": 2 / 3}}
    kinds = {"plain": CHANGES, "one pass": multi, "four passes": {**multi, "batch": {"micro_tokens": 64}}}
    return {
        name: tiny_run.train(folder, tiny_run.config(data, **changes), name).run.path
        for name, changes in kinds.items()
    }


def test_the_loss_of_the_next_token_is_reported_alone(runs: dict[str, Path]) -> None:
    plain, multi = tiny_run.rows(runs["plain"]), tiny_run.rows(runs["one pass"])
    assert "future_token_loss" not in plain[0]
    assert multi[0]["loss"] == pytest.approx(plain[0]["loss"], abs=1e-6)  # the same weights and data
    assert multi[0]["grad_norm"] > plain[0]["grad_norm"]
    future = [row["future_token_loss"] for row in multi]
    # Documents have ten words, so almost every token has two later ones, and all are equally unlikely at first.
    assert future[0] == pytest.approx(0.75 * multi[0]["loss"], rel=0.1)
    assert all(loss > 0 for loss in future[:6]) and future[6:] == [0.0] * 3
    assert future[4] < 0.6 * multi[4]["loss"]


def test_passes_change_only_the_order_of_sums(runs: dict[str, Path]) -> None:
    for one, four in zip(tiny_run.rows(runs["one pass"]), tiny_run.rows(runs["four passes"]), strict=True):
        for key in ("loss", "future_token_loss"):
            assert four[key] == pytest.approx(one[key], abs=2e-3)


def test_the_export_is_that_of_a_plain_model(runs: dict[str, Path]) -> None:
    """Configuration, tensor names and shapes are the same."""
    models = [runs[name] / "model" for name in ("plain", "one pass")]
    assert len({(model / "config.json").read_text() for model in models}) == 1
    tensors = [load_file(model / "model.safetensors") for model in models]
    assert len({tuple((name, one.shape) for name, one in sorted(t.items())) for t in tensors}) == 1


def test_weights_decay_one_after_the_other() -> None:
    """The schedule in modded-nanogpt's docstring: [1, 0.5, 0.25 -> 0], [1, 0.5 -> 0], [1]."""
    schedule = MultiTokenConfig(weights=(0.5, 0.25), until=2 / 3)
    for progress, expected in {
        0.0: (0.5, 0.25),
        1 / 6: (0.5, 0.125),
        1 / 3: (0.5, 0),
        0.5: (0.25, 0),
    }.items():
        assert schedule.at(progress) == pytest.approx(expected)
    assert not any(schedule.at(2 / 3)) and not any(schedule.at(1.0))
    assert MultiTokenConfig().at(0.5) == ()
    with pytest.raises(ValueError, match="at most 2"):
        MultiTokenConfig(weights=(1.0, 0.9, 0.2))
