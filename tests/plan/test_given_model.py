"""The model that a question names, and its sequence length."""

from pathlib import Path
from typing import Any

import pytest

from deskside.budget.shape import num_params
from deskside.config.depth_series import of_depth
from deskside.config.model import ModelConfig
from deskside.plan.question import count
from deskside.utils.errors import UsageError
from tests.plan.made import ask


@pytest.mark.parametrize("written", ["124M", "350M", "1.5B", "3B", "7B"])
def test_params_are_the_nearest_depth(written: str, tmp_path: Path) -> None:
    given = ask(gpu="rtx4090", params=written, probes=str(tmp_path)).given
    assert given is not None
    wanted, found = count("", written), num_params(given.config.model)
    depth = given.config.model.num_hidden_layers
    for other in (depth - 2, depth + 2):
        size = num_params(ModelConfig(**of_depth(other)["model"]))
        assert max(found / wanted, wanted / found) <= max(size / wanted, wanted / size)


def test_a_longer_sequence_raises_the_positions_and_keeps_the_batch_whole(tmp_path: Path) -> None:
    given = ask(gpu="rtx4090", preset="124m", sequence=3000, probes=str(tmp_path)).given
    assert given is not None
    assert given.config.model.max_position_embeddings == 3000
    assert given.config.batch.sequence_length == 3000
    assert given.config.batch.tokens % 3000 == 0


def test_a_batch_by_hand_that_does_not_divide_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="not a multiple of the sequence length"):
        ask(
            gpu="rtx4090",
            preset="124m",
            sequence=3000,
            overrides={"batch": {"tokens": 65536}},
            probes=str(tmp_path),
        )


@pytest.mark.parametrize("model", [{"preset": "124m"}, {"hours": 5}])
def test_a_sequence_beside_stages_is_refused(model: dict[str, Any], tmp_path: Path) -> None:
    """The stages would win, silently."""
    stages = {"schedule": {"stages": [{"until": 1.0, "sequence_length": 1024}]}}
    with pytest.raises(UsageError, match=r"^--sequence: .*schedule.stages") as error:
        ask(gpu="rtx4090", sequence=4096, overrides=stages, probes=str(tmp_path), **model)
    assert "\n" not in str(error.value)
    kept = ask(gpu="rtx4090", overrides=stages, probes=str(tmp_path), **model)
    assert kept.sequence_length is None


def test_a_model_that_does_not_divide_is_refused_before_anything_is_planned(tmp_path: Path) -> None:
    model = {"model": {"intermediate_size": 2050}}
    with pytest.raises(
        UsageError, match=r"^model.intermediate_size: 2050 is not a multiple of 16.* use 2048$"
    ):
        ask(gpu="rtx4090", preset="124m", precision="fp8", overrides=model, probes=str(tmp_path))
