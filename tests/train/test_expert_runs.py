"""Runs of a mixture of experts: metrics, and router biases that are updated, resumed and equal on all processes."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from deskside.config.model import ModelConfig
from deskside.model import init
from deskside.model.init import initialize
from deskside.model.transformer import Transformer
from deskside.train.loop.routers import Routers
from deskside.weights.load import load_model
from tests.train import tiny_run
from tests.train.tiny_run import curve, kill_at_step, rows

EXPERTS: dict[str, Any] = {
    **tiny_run.SHAPE,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}
BIASED = {**EXPERTS, "scoring_func": "sigmoid", "router_bias_update_rate": 0.01, "router_aux_loss_coef": 0.0}
CHANGES: dict[str, Any] = {
    "optim": {"name": "adamw", "lr": 2e-3, "embedding_lr": None, "head_lr": None},
    "schedule": {"length": "30 steps"},
    "checkpoint": {"keep": 9},
}


def biases(run: Path, step: int) -> list[torch.Tensor]:
    weights = load_file(run / "checkpoints" / f"step-{step:09d}" / "model.safetensors")
    return [tensor for name, tensor in sorted(weights.items()) if name.endswith("e_score_correction_bias")]


@pytest.fixture(scope="module")
def balanced(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("balanced")
    return tiny_run.train(root, tiny_run.config(data, model=BIASED, **CHANGES), "run").run.path


def test_metrics_by_layer_are_those_of_every_choice(balanced: Path) -> None:
    found = rows(balanced)
    assert [row["step"] for row in found if "experts" in row] == [10, 20, 30]
    for row in found:
        assert 1 <= row["load_imbalance"] <= 2 and 0 < row["router_entropy"] <= 1.39
        assert row["router_balance_loss"] >= 1.9 and row["router_z_loss"] >= 0
    experts = found[-1]["experts"]
    for layer in range(2):
        load = experts["load"][layer]
        assert sum(load) == pytest.approx(1, abs=1e-5)
        assert (experts["largest_load"][layer], experts["smallest_load"][layer]) == (max(load), min(load))
    assert experts["dropped_tokens"] == [0, 0]
    mean = sum(experts["largest_load"]) / 2 * 4
    assert found[-1]["load_imbalance"] == pytest.approx(mean, abs=1e-4)
    assert found[-1]["router_entropy"] == pytest.approx(sum(experts["entropy"]) / 2, abs=1e-5)


def test_the_summary_has_the_load_on_the_validation_text(balanced: Path) -> None:
    summary = json.loads((balanced / "summary.json").read_text())
    assert list(summary["val_expert_load"]) == ["all"]  # text in one language
    assert [len(layer) for layer in summary["val_expert_load"]["all"]] == [4, 4]


def test_biases_move_by_whole_rates_and_a_resumed_run_is_the_same(
    balanced: Path, data: Path, tmp_path: Path
) -> None:
    found = biases(balanced, 30)
    assert len(found) == 2
    for bias in found:
        steps = bias / 0.01
        torch.testing.assert_close(steps, steps.round(), atol=1e-3, rtol=0)
        assert bias.any() and steps.abs().max() <= 30.01
    config = tiny_run.config(data, model=BIASED, **CHANGES)
    child = tiny_run.call(tiny_run.train, tmp_path, config, "killed", log=tmp_path / "log")
    kill_at_step(tmp_path / "killed", 14, child.kill, child.alive)
    child.wait()
    tiny_run.resume(tmp_path / "killed")
    assert curve(tmp_path / "killed") == curve(balanced)
    weights = "model/model.safetensors"
    assert (tmp_path / "killed" / weights).read_bytes() == (balanced / weights).read_bytes()


@pytest.mark.full
def test_two_processes_update_the_biases_like_one(balanced: Path, data: Path, tmp_path: Path) -> None:
    config = tiny_run.config(data, model=BIASED, **CHANGES)
    child = tiny_run.call(tiny_run.train, tmp_path, config, "two", log=tmp_path / "log", ranks=2)
    assert child.wait() == 0, child.text()
    one, two = rows(balanced), rows(tmp_path / "two")
    # Counts are equal at first. Later rounding differs, so a token near a tie chooses another expert.
    assert two[9]["experts"]["load"] == one[9]["experts"]["load"]
    assert all(map(torch.equal, biases(tmp_path / "two", 10), biases(balanced, 10)))
    assert two[-1]["loss"] == pytest.approx(one[-1]["loss"], abs=1e-3)


def test_skipped_and_dry_steps_leave_the_biases(balanced: Path) -> None:
    assert not any(bias.any() for bias in biases(balanced, 0))  # written after the dry steps
    model = Transformer(ModelConfig(**BIASED))
    initialize(model, 0)
    routers = Routers(model)
    sums = torch.arange(float(routers.num_sums))
    routers.update_biases(sums, torch.tensor(1.0))
    assert not any(bias.any() for bias in routers.biases)
    routers.update_biases(sums, torch.tensor(0.0))
    assert all(bias.tolist() == pytest.approx([0.01, 0.01, -0.01, -0.01]) for bias in routers.biases)


def test_a_choice_that_was_not_computed_is_counted() -> None:
    model = Transformer(ModelConfig(**EXPERTS))
    routers = Routers(model)
    layers, experts = len(model.layers), EXPERTS["num_experts"]
    counts_LE = torch.full((layers, experts), 5.0)
    values_LR = torch.cat((counts_LE, torch.zeros(layers, experts + 2)), dim=1)
    choices = 5 * experts
    tokens = (choices + 6) // EXPERTS["num_experts_per_tok"]
    metrics = routers.metrics([0.0, 0.0, tokens, *values_LR.flatten().tolist()], by_layer=True)
    dropped = tokens * EXPERTS["num_experts_per_tok"] - choices
    assert dropped > 0 and metrics["experts"]["dropped_tokens"] == [dropped] * layers


def test_the_bias_balances_a_router_that_prefers_one_expert(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(init, "ROUTER_STD", 0.5)
    imbalance = {}
    for rate in (0.0, 0.05):
        model = {**BIASED, "router_bias_update_rate": rate, "initializer_range": 0.5}
        config = tiny_run.config(data, model=model, **CHANGES)
        run = tiny_run.train(tmp_path, config, f"rate {rate}").run.path
        imbalance[rate] = sum(row["load_imbalance"] for row in rows(run)[-10:]) / 10
    assert imbalance[0.05] < imbalance[0.0] - 0.1


def test_the_z_loss_keeps_the_logits_small(data: Path, tmp_path: Path) -> None:
    found = {}
    for weight in (0.0, 0.1):
        model = {**EXPERTS, "router_z_loss_coef": weight}
        config = tiny_run.config(data, model=model, **CHANGES)
        found[weight] = rows(tiny_run.train(tmp_path, config, f"weight {weight}").run.path)[-1]
    assert found[0.1]["router_z_loss"] < 0.9 * found[0.0]["router_z_loss"]


@pytest.mark.parametrize(
    "changes",
    [
        {"scoring_func": "sigmoid", "shared_expert_intermediate_size": 64, "router_bias_update_rate": 0.01},
        {"shared_expert_intermediate_size": 48, "qk_norm": False},
    ],
    ids=["dots1", "qwen2_moe"],
)
def test_a_finished_run_loads_in_transformers(changes: dict[str, Any], data: Path, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = tiny_run.config(
        data,
        model={**EXPERTS, **changes},
        schedule={"length": "12 steps"},
        compute={"compile": "fused"},
        precision={"name": "fp32"},
    )
    run = tiny_run.train(tmp_path, config).run.path
    losses = [row["loss"] for row in rows(run)]
    assert losses[-1] < losses[0] - 0.2
    theirs = transformers.AutoModelForCausalLM.from_pretrained(run / "model", dtype=torch.float32)
    ours = load_model(run).model
    tokens_BT = torch.arange(40)[None]
    with torch.no_grad():
        torch.testing.assert_close(ours(tokens_BT), theirs(tokens_BT).logits, atol=1e-4, rtol=1e-4)
