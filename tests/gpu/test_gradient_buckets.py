"""Gradient sums during the backward on GPUs: two processes that share one
(gloo), and two GPUs (NCCL), bitwise equal.
"""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from deskside.optim.groups import classify_parameters
from deskside.train.loop import gradient_buckets
from deskside.train.loop.gradient_buckets import GradientBuckets
from deskside.train.loop.gradient_sums import GradientSums
from deskside.train.parallel import World
from tests.gpu.card import NEEDS_CARD, SHAPE, losses
from tests.train import tiny_run
from tests.train.loop.test_gradient_buckets import PASSES, Loss, micro_batch, model

pytestmark = NEEDS_CARD


def one_step(folder: Path, weights: torch.dtype) -> None:
    """Save each rank's own gradients of a step of two passes, and their sums.
    NCCL refuses two processes on one GPU.
    """
    dist.init_process_group("gloo")
    world = World(torch.device("cuda", 0), dist.get_rank(), dist.get_world_size())
    gradient_buckets.BUCKET_BYTES = 4 * 3000
    made = model(weights).to(world.device)
    infos = classify_parameters(made)
    sums, own = GradientSums(made), {}
    for info in infos:

        def copy(parameter: torch.Tensor, name: str = info.name) -> None:
            if parameter.grad is not None:  # in the last pass: the input of its bucket
                own[name] = parameter.grad.clone()

        info.parameter.register_post_accumulate_grad_hook(copy)
    buckets = GradientBuckets(infos, world, {}, torch.float32)
    loss = Loss(made)
    sums.begin_step(1)
    buckets.begin_step(True)
    sums.begin_passes(PASSES)
    for index in range(PASSES):
        buckets.begin_pass(index == PASSES - 1)
        tokens = micro_batch(world.rank, index).to(world.device)
        loss(tokens[:, :-1], tokens[:, 1:]).backward()
        sums.end_pass()
    buckets.finish()
    found = {info.name: info.parameter.grad for info in infos}
    torch.save((own, found), folder / f"{world.rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16])
def test_two_processes_on_one_card_sum_exactly(weights: torch.dtype, tmp_path: Path) -> None:
    child = tiny_run.call(one_step, tmp_path, weights, log=tmp_path / "log", ranks=2)
    assert child.wait() == 0, child.text()
    (mine, found), (theirs, same) = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    for name, gradient in found.items():
        assert torch.equal(gradient, (mine[name].float() + theirs[name].float()).to(weights)), name
        assert torch.equal(gradient, same[name]), name


def deterministic(function: Any, *arguments: Any) -> None:
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # before CUDA starts
    function(*arguments)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_two_cards_share_muon_and_resume_to_the_last_bit(dtype: str, data: Path, tmp_path: Path) -> None:
    changes: dict[str, Any] = {
        "model": SHAPE,
        "batch": {"sequence_length": 128, "tokens": 2048, "micro_tokens": 512},
        "schedule": {"length": "30 steps"},
        "compute": {"device": "cuda", "attention": "sdpa"},
        "deterministic": True,
    }
    alone = tiny_run.call(
        deterministic,
        tiny_run.train,
        tmp_path,
        tiny_run.config(data, **changes),
        "alone",
        log=tmp_path / "log",
    )
    assert alone.wait(300) == 0, alone.text()
    config = tiny_run.config(data, **changes, parallel={"gradient_dtype": dtype})

    def start(name: str) -> tiny_run.Child:
        log = tmp_path / f"{name}.log"
        return tiny_run.call(deterministic, tiny_run.train, tmp_path, config, name, log=log, ranks=2)

    straight = start("straight")
    assert straight.wait(300) == 0, straight.text()
    killed, run = start("killed"), tmp_path / "killed"
    tiny_run.kill_at_step(run, 14, killed.kill, killed.alive)
    assert killed.wait() == -signal.SIGKILL
    resumed = tiny_run.call(deterministic, tiny_run.resume, run, log=tmp_path / "resumed.log", ranks=2)
    assert resumed.wait(300) == 0, resumed.text()
    assert tiny_run.curve(run) == tiny_run.curve(tmp_path / "straight")
    assert losses(run) == pytest.approx(losses(tmp_path / "alone"), abs=3e-2)
