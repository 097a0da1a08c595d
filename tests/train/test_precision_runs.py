"""Runs below 16 bits: a killed and resumed run is bitwise equal to an uninterrupted one, and replicas agree."""

from pathlib import Path
from typing import Any

import pytest
import torch

from deskside.train.loop.step import StepMetrics, Stepper
from tests.train import tiny_run
from tests.train.tiny_run import curve, kill_at_step, rows

STEPS = 40
SLOWER = {"sequence_length": 32, "tokens": 1024}
EVERYWHERE = {"keep_first": 0.0, "keep_last": 0.0}
SWITCHES = {"warmup_steps": 12, "bf16_from": 0.8}
LONGER = {"sequence_length": 128, "tokens": 1024}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
HADAMARD = {"hidden_size": 128, "intermediate_size": 128, "head_dim": 32}


def settings(data: Path, name: str, **changes: Any) -> tiny_run.RunConfig:
    parts: dict[str, Any] = {
        "precision": {"name": name, **EVERYWHERE},
        "batch": SLOWER,
        "schedule": {"length": f"{STEPS} steps"},
    }
    for part, values in changes.items():
        parts[part] = {**parts.get(part, {}), **values}
    return tiny_run.config(data, **parts)


def same(run: Path, other: Path) -> None:
    assert [row["step"] for row in rows(run)] == list(range(1, STEPS + 1))
    assert curve(run) == curve(other)
    weights = "model/model.safetensors"
    assert (run / weights).read_bytes() == (other / weights).read_bytes()


@pytest.mark.parametrize(
    ("name", "changes", "ranks"),
    [
        pytest.param(
            "fp8-delayed",
            {"precision": SWITCHES, "batch": {"micro_tokens": 256}},
            1,
            marks=pytest.mark.full,
        ),
        pytest.param(
            "fp8-delayed",
            {"model": EXPERTS, "precision": SWITCHES, "batch": {"micro_tokens": 512}},
            1,
            marks=pytest.mark.full,
        ),
        pytest.param("nvfp4-unbiased", {"model": EXPERTS}, 1, marks=pytest.mark.full),
        pytest.param(
            "fp8-delayed",
            {"model": EXPERTS, "compute": {"activation_checkpointing": "block"}},
            2,
            marks=pytest.mark.full,
        ),
        ("fp8-delayed", {}, 1),
        pytest.param("fp8-delayed", {}, 2, marks=pytest.mark.full),
        pytest.param("nvfp4", {"compute": {"activation_checkpointing": "block"}}, 1, marks=pytest.mark.full),
        pytest.param("fp8-nvfp4", {"model": HADAMARD, "batch": LONGER}, 1, marks=pytest.mark.full),
        pytest.param("nvfp4-unbiased", {"optim": {"name": "adamw", "lr": 3e-3}}, 2, marks=pytest.mark.full),
    ],
)
def test_killed_and_resumed(
    name: str, changes: dict[str, Any], ranks: int, data: Path, tmp_path: Path
) -> None:
    """Killed at step 25 and resumed at 20. With delayed scaling, the checkpoint contains the history of 16 steps."""
    config = settings(data, name, **changes)
    child = tiny_run.call(tiny_run.train, tmp_path, config, log=tmp_path / "log", ranks=ranks)
    run = tmp_path / "run"
    kill_at_step(run, 25, child.kill, child.alive)
    child.wait()
    if ranks == 1:
        tiny_run.resume(run)
        tiny_run.train(tmp_path, config, "whole")
    else:
        again = tiny_run.call(tiny_run.resume, run, log=tmp_path / "log", ranks=ranks)
        assert again.wait() == 0, again.text()
        whole = tiny_run.call(tiny_run.train, tmp_path, config, "whole", log=tmp_path / "log", ranks=ranks)
        assert whole.wait() == 0, whole.text()
    assert "resumed at step 20" in tiny_run.events(run)
    same(run, tmp_path / "whole")


def test_a_recipe_learns_as_well_as_fp32(data: Path, tmp_path: Path) -> None:
    """With the same seed and data, a recipe with wrong gradients would differ by much more."""
    final = {}
    batch = {"sequence_length": 32, "tokens": 512}
    for name in ("fp32", "fp8-delayed", "nvfp4"):
        precision = {"name": name} if name == "fp32" else {"name": name, **EVERYWHERE}
        config = tiny_run.config(data, precision=precision, batch=batch, schedule={"length": "40 steps"})
        losses = [row["loss"] for row in rows(tiny_run.train(tmp_path, config, name).run.path)]
        final[name] = sum(losses[-5:]) / 5
        assert final[name] < losses[0] - 0.8
    assert final["fp8-delayed"] == pytest.approx(final["fp32"], rel=0.02)
    assert final["nvfp4"] == pytest.approx(final["fp32"], rel=0.08)


@pytest.mark.full
def test_experts_learn_as_well_as_in_fp32(data: Path, tmp_path: Path) -> None:
    final = {}
    batch = {"sequence_length": 32, "tokens": 512}
    for name in ("fp32", "fp8-delayed"):
        precision = {"name": name} if name == "fp32" else {"name": name, **EVERYWHERE}
        changes = {"batch": batch, "schedule": {"length": "40 steps"}, "model": EXPERTS}
        config = tiny_run.config(data, precision=precision, **changes)
        losses = [row["loss"] for row in rows(tiny_run.train(tmp_path, config, name).run.path)]
        final[name] = sum(losses[-5:]) / 5
        assert final[name] < losses[0] - 0.8
    assert final["fp8-delayed"] == pytest.approx(final["fp32"], rel=0.02)


def poisoned(root: Path, config: tiny_run.RunConfig) -> None:
    """In step 7, one of two processes has a value that saturation hides. Neither may take the step."""
    original = Stepper.forward_backward

    def forward_backward(stepper: Stepper, batches: Any) -> torch.Tensor:
        total = original(stepper, batches)
        scales = stepper.precision.scales
        if stepper.world.rank == 1 and stepper.optimizer_step == 7:  # type: ignore[attr-defined]
            scales.amax[3] = float("inf")
        return total

    run = Stepper.run

    def counted(stepper: Stepper, batches: Any, step: int, dry: bool = False) -> StepMetrics:
        stepper.optimizer_step = 0 if dry else step  # type: ignore[attr-defined]
        numbers = run(stepper, batches, step, dry)
        stepper.wait_for_weights()
        mine = torch.cat([p.detach().flatten() for p in stepper.model.parameters()])
        whole = stepper.world.all_reduce_max(mine.clone())
        assert torch.equal(whole, mine), f"replicas differ after step {step}"
        return numbers

    Stepper.forward_backward, Stepper.run = forward_backward, counted  # type: ignore[method-assign]
    tiny_run.train(root, config)


@pytest.mark.full
def test_replicas_skip_a_step_together(data: Path, tmp_path: Path) -> None:
    config = settings(data, "fp8-delayed", schedule={"length": "12 steps"})
    child = tiny_run.call(poisoned, tmp_path, config, log=tmp_path / "log", ranks=2)
    assert child.wait() == 0, child.text()
    assert "step 7" in tiny_run.events(tmp_path / "run") and "not finite" in tiny_run.events(tmp_path / "run")
