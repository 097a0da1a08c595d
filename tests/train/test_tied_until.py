"""Runs whose embedding equals the head at first."""

import json
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file

from deskside.config.run import RunConfig
from deskside.train.parallel import World
from deskside.train.prepare.setup import WeightSource, build_model
from deskside.train.state.init_weights import InitialWeights
from deskside.utils.errors import UsageError
from tests.train import tiny_run


@pytest.mark.parametrize("until", [0.5, 1.0])
def test_a_run_is_saved_as_an_untied_model(until: float, data: Path, tmp_path: Path) -> None:
    config = tiny_run.config(data, schedule={"length": "8 steps", "tied_until": until})
    tiny_run.train(tmp_path, config)
    saved = load_file(tmp_path / "run" / "model" / "model.safetensors")
    assert (
        json.loads((tmp_path / "run" / "model" / "config.json").read_text())["tie_word_embeddings"] is False
    )
    same = torch.equal(saved["model.embed_tokens.weight"], saved["lm_head.weight"])
    assert same == (until == 1.0)


@pytest.mark.full
def test_two_processes_train_the_same_model(data: Path, tmp_path: Path) -> None:
    """With all options that depend on whole matrices or on both tables."""
    optim = {"row_floor": 1.0, "radial_brake": 0.5, "table_weight_decay": 0.1}
    schedule = {"length": "12 steps", "tied_until": 0.5, "batch_growth": 4, "batch_lr": "sqrt"}
    config = tiny_run.config(data, batch={"tokens": 256}, optim=optim, schedule=schedule)
    tiny_run.train(tmp_path, config, "one")
    child = tiny_run.call(tiny_run.train, tmp_path, config, "two", ranks=2, log=tmp_path / "log")
    assert child.wait() == 0, child.text()
    one, two = (load_file(tmp_path / name / "model" / "model.safetensors") for name in ("one", "two"))
    for name, tensor in one.items():
        torch.testing.assert_close(two[name], tensor, atol=2e-4, rtol=0)


def test_random_tables_begin_equal_and_given_ones_are_not_overwritten(tmp_path: Path) -> None:
    config = RunConfig.model_validate(tiny_run.settings(tmp_path, schedule={"tied_until": 0.5}))
    model = build_model(config, World(torch.device("cpu")), "fp32")
    assert model.head is not None and torch.equal(model.head.weight, model.embed.weight)
    assert float(model.head.weight.detach().std()) == pytest.approx(0.02, rel=0.05)
    initial = cast("InitialWeights", object())
    with pytest.raises(UsageError, match="tied_until"):
        build_model(config, World(torch.device("cpu")), "fp32", WeightSource(initial, tmp_path, False, print))


@pytest.mark.parametrize(
    "changes",
    [
        {"model": {"tie_word_embeddings": True}},
        {"parallel": {"mode": "shard"}},
        {"optim": {"name": "muon", "weights": "bfloat16"}},
        {"optim": {"name": "muon", "offload": True}},
        {"optim": {"name": "muon", "gradients": "host"}},
    ],
)
def test_what_cannot_be_tied_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match="tied_until"):
        RunConfig.model_validate({"schedule": {"name": "wsd", "tied_until": 0.5}, **changes})
