"""Checkpoints that are written from page-locked memory while the GPU continues to train."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from deskside.optim.sharded import local
from deskside.train.state.staging import Staging
from deskside.weights import checkpoint as files
from tests.gpu.card import ADAMW, NEEDS_CARD, QUICK, config, spin
from tests.gpu.test_training import deterministic
from tests.train import tiny_run
from tests.train.state.test_background import contents, train_with_late_writes

pytestmark = NEEDS_CARD


@pytest.mark.parametrize(
    "changes",
    [
        {"optim": {"name": "muon"}, "precision": {"name": "fp8-delayed", "keep_first": 0.0}},
        {"optim": {**ADAMW, "weights": "bfloat16", "states": "8bit", "offload": True, "gradients": "host"}},
        {"optim": ADAMW, "compute": {"compile": "fused"}},
    ],
)
def test_written_later_it_is_the_same_byte_for_byte(
    changes: dict[str, Any], data: Path, tmp_path: Path
) -> None:
    given = {"compute": QUICK, "deterministic": True, "schedule": {"length": "40 steps"}, **changes}
    found = {}
    for background in (True, False):
        checkpoint = {"background": background, "keep": 10, "every": "10 steps"}
        asked = config(data, checkpoint=checkpoint, **given)
        name = f"background-{background}".lower()
        log = tmp_path / f"{name}.log"
        child = tiny_run.call(deterministic, train_with_late_writes, tmp_path, asked, name, log=log)
        assert child.wait(300) == 0, child.text()
        found[background] = contents(tmp_path / name / "checkpoints")
    assert found[True] == found[False] and len(found[True]) >= 5 * 4


def test_a_copy_waits_for_the_work_before_it_and_not_for_the_work_after_it() -> None:
    values = torch.zeros(2**22, device="cuda")
    place = Staging([{"values": values}], values.device)
    for number in range(1, 4):
        spin(20)
        values.fill_(number)
        (copies,) = place.copy([{"values": values}])
        spin(20)
        values.zero_()
        assert copies["values"].is_pinned() and bool((copies["values"] == number).all())
        torch.cuda.synchronize()
        assert bool((copies["values"] == number).all())


def test_shards_are_copied_and_written_by_a_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs in one process, because several need several GPUs. Tensors of a CUDA mesh are copied to one on the CPU."""
    for name, value in (("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", str(tiny_run.free_port()))):
        monkeypatch.setenv(name, value)
    torch.cuda.set_device(0)
    dist.init_process_group("cpu:gloo,cuda:nccl", rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cuda", (1,))
        whole = torch.randn(64, 32, device="cuda")
        shard = distribute_tensor(whole, mesh, [Shard(0)])
        groups = [{"a": shard}, {"b": distribute_tensor(whole + 1, mesh, [Shard(0)])}]
        group = dist.new_group(backend="gloo")
        weights, states = Staging(groups, whole.device).copy(groups)
        with ThreadPoolExecutor(1) as thread:
            saved = thread.submit(
                files.save, tmp_path, 1, {"model": weights, "optimizer": states}, {}, True, group
            )
            shard.to_local().zero_()
            made = saved.result(60)
        files.verify(made)
        found = [{"a": torch.zeros_like(shard)}, {"b": torch.zeros_like(shard)}]
        files.load_sharded(made, {"model": found[0], "optimizer": found[1]})
        assert torch.equal(local(found[0]["a"]), whole)
        assert torch.equal(local(found[1]["b"]), whole + 1)
    finally:
        dist.destroy_process_group()
