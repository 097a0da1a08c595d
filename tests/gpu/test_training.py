"""Complete tiny runs on a GPU: they learn, compile to the same numbers,
recompute, change stages and resume exactly.
"""

import math
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from deskside.config.run import RunConfig
from deskside.kernels.attention import AttentionContext
from deskside.train.parallel import World
from deskside.train.prepare import setup
from tests.gpu.card import ADAMW, DEVICE, NEEDS_CARD, QUICK, config, losses
from tests.train import tiny_run
from tests.train.test_resume import check_same
from tests.train.tiny_run import rows

pytestmark = NEEDS_CARD


@pytest.fixture(scope="module")
def trained(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of twenty steps as a user would start it: everything on auto."""
    changes: dict[str, Any] = {"compute": {"attention": "auto"}, "checkpoint": {"every": "10 steps"}}
    outcome = tiny_run.train(tmp_path_factory.mktemp("runs"), config(data, **changes))
    assert outcome.status == "finished"
    return outcome.run.path


def test_a_run_learns_and_measures(trained: Path) -> None:
    seen = losses(trained)
    assert len(seen) == 20 and abs(seen[0] - math.log(300)) < 0.5
    assert sum(seen[-3:]) / 3 < seen[0] - 1.0
    for row in rows(trained):
        assert row["memory_gib"] > 0 and not row["skipped"]
    for row in rows(trained)[5:]:
        assert 0 < row["mfu"] < 1 and row["tokens_per_second"] > 0


def test_the_plan_says_how_it_runs(trained: Path) -> None:
    plan = tiny_run.plan(trained)
    attention = plan["attention"]["full"]
    assert attention["name"] not in {"reference", "chunked"}
    assert attention["milliseconds"][attention["name"]] == min(attention["milliseconds"].values()) > 0
    assert plan["precision"]["chosen"] == "bf16" and plan["compile"] == "fused"
    assert plan["fit"][0]["micro_rows"] == 16 and plan["initial"]["memory_gib"] > 0
    assert tiny_run.checkpoints(trained) == ["step-000000010", "step-000000020"]


def test_every_execution_computes_the_same(trained: Path, data: Path, tmp_path: Path) -> None:
    """Hand-written kernels, which `trained` uses, and blocks compiled by torch are compared with eager execution."""

    def run(mode: str) -> list[float]:
        changes: dict[str, Any] = {"compute": {"compile": mode, "attention": "sdpa"}}
        path = tiny_run.train(tmp_path, config(data, **changes), mode).run.path
        assert tiny_run.plan(path)["compile"] == mode
        return losses(path)

    eager = run("off")
    for faster in (losses(trained), run("block")):
        assert faster[0] == pytest.approx(eager[0], abs=5e-3)  # forward
        assert faster[1] == pytest.approx(eager[1], abs=2e-2)  # backward and update
        assert faster[:5] == pytest.approx(eager[:5], abs=1e-1)  # rounding errors have grown since


# Activation checkpointing


def first_loss(data: Path, what: str, compile: str = "off") -> tuple[float, int]:
    """Return the loss per token, and the peak bytes of forward and backward, of the model before its first step."""
    changes: dict[str, Any] = {
        "model": {"num_hidden_layers": 4},
        "compute": {**QUICK, "compile": compile, "activation_checkpointing": what},
    }
    given, world = config(data, **changes), World(torch.device(DEVICE))
    model = setup.build_model(given, world, "bf16")
    setup.prepare_execution(given, model, world, "bf16")
    generator = torch.Generator().manual_seed(0)
    tokens_BT = torch.randint(300, (128, 128), generator=generator).to(DEVICE)

    def once() -> float:
        loss, _ = model.loss_and_router(tokens_BT, tokens_BT.roll(-1, 1), AttentionContext(backend="sdpa"))
        (loss / tokens_BT.numel()).backward()
        model.zero_grad(set_to_none=True)
        return loss.item() / tokens_BT.numel()

    loss = once()  # this call compiles
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    assert once() == pytest.approx(loss, abs=1e-4)
    return loss, torch.cuda.max_memory_allocated() - before


def test_every_rung_gives_the_same_loss_and_takes_less_memory(data: Path) -> None:
    loss, peak = first_loss(data, "none")
    used = {}
    for what in ("attention", "mlp", "block"):
        other, used[what] = first_loss(data, what)
        assert other == pytest.approx(loss, abs=1e-3), what
        assert used[what] < 0.95 * peak, what
    assert used["block"] == min(used.values())


def test_recomputing_compiled_blocks_takes_less_memory(data: Path) -> None:
    loss, peak = first_loss(data, "none", "block")
    other, used = first_loss(data, "block", "block")
    assert other == pytest.approx(loss, abs=1e-3) and used < 0.8 * peak


# Compilation


def test_no_stage_falls_back_to_eager(data: Path, tmp_path: Path) -> None:
    """At its limit of recompilations, torch.compile continues without compiling, and reports it only in a log line."""
    stages = [{"until": (n + 1) / 3, "sequence_length": length} for n, length in enumerate((32, 64, 128))]
    changes: dict[str, Any] = {
        "schedule": {"length": "9 steps", "stages": stages},
        "optim": ADAMW,
        "compute": {"compile": "block"},
    }
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        run = tiny_run.train(tmp_path, config(data, **changes)).run.path
    assert len(rows(run)) == 9 and "stage 3 of 3" in tiny_run.events(run)
    counters = torch._dynamo.utils.counters
    # At least a graph for each length with its backward, and one for evaluation.
    assert counters["stats"]["unique_graphs"] >= 4
    assert counters["frames"]["ok"] == counters["frames"]["total"]
    assert not counters["graph_break"]


# Resume


def deterministic(function: Any, *arguments: Any) -> None:
    """Run in a child process, with the settings that the command line makes before CUDA starts."""
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    function(*arguments)


def test_a_deterministic_run_resumes_to_the_last_bit(data: Path, tmp_path: Path) -> None:
    """Straight, and killed with SIGKILL and resumed: in three processes, each loss has the same bits."""
    changes: dict[str, Any] = {
        "deterministic": True,
        "schedule": {"length": "60 steps"},
        "checkpoint": {"every": "10 steps"},
    }
    given: RunConfig = config(data, **changes)

    def start(name: str) -> tiny_run.Child:
        log = tmp_path / f"{name}.log"
        return tiny_run.call(deterministic, tiny_run.train, tmp_path, given, name, log=log)

    straight, killed = start("straight"), start("killed")
    run = tmp_path / "killed"
    tiny_run.kill_at_step(run, 25, killed.kill, killed.alive)
    assert killed.wait() == -signal.SIGKILL
    log = tmp_path / "resumed.log"
    resumed = tiny_run.call(deterministic, tiny_run.resume, run, log=log)
    assert straight.wait() == 0, straight.text()
    assert resumed.wait() == 0, resumed.text()
    assert "later steps are repeated" in tiny_run.events(run)
    check_same(run, tmp_path / "straight", 60)
