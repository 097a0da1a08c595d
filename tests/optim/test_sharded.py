"""Two processes with FSDP2 compared with one: the same norms and weights, and a sharded state that can be restored."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from deskside.config.optim import AdamWConfig, MuonConfig
from deskside.optim.build import Optimizer, build
from tests.optim.models import NO_SCALING, Tiny, backward, make

CONFIGS: dict[str, Any] = {"adamw": AdamWConfig(), "muon": MuonConfig()}


def steps(model: Tiny, optimizer: Optimizer, which: range) -> list[float]:
    norms = []
    for step in which:
        backward(model, step)
        optimizer.set_progress(1.0, step / 8, step)
        norms.append(optimizer.clip_and_norm(0.5).item())
        optimizer.step(torch.tensor(1.0 if step == 1 else 0.0))
        optimizer.zero_grad()
    return norms


def sharded() -> Tiny:
    model = make(moe=True)
    mesh = init_device_mesh("cpu", (2,))  # on a machine with a GPU, the default is the GPU
    for layer in model.qkv:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)  # 11 rows of the head and 3 experts do not divide evenly by two
    return model


def whole(t: torch.Tensor) -> torch.Tensor:
    return (t.full_tensor() if isinstance(t, DTensor) else t).detach().clone()


def worker(rank: int, name: str, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    model = sharded()
    optimizer = build(model, CONFIGS[name], NO_SCALING)
    norms = steps(model, optimizer, range(3))
    tensors, data = optimizer.state_dict_flat()
    for key, t in tensors.items():
        assert isinstance(t, DTensor) == (key.split("/")[0] not in ("step", "row_sizes")), key

    second = sharded()
    with torch.no_grad():
        for mine, theirs in zip(second.parameters(), model.parameters(), strict=True):
            mine.to_local().copy_(theirs.to_local())  # type: ignore[attr-defined]
    resumed = build(second, CONFIGS[name], NO_SCALING)
    resumed.load_state_dict_flat({key: t.clone() for key, t in tensors.items()}, data)
    norms += steps(model, optimizer, range(3, 5))
    steps(second, resumed, range(3, 5))
    for mine, theirs in zip(second.parameters(), model.parameters(), strict=True):
        assert torch.equal(mine.to_local(), theirs.to_local())  # type: ignore[attr-defined]

    weights = {key: whole(p) for key, p in model.named_parameters()}
    state = {key: whole(t) for key, t in optimizer.state_dict_flat()[0].items()}
    if rank == 0:
        torch.save((norms, weights, state), f"{folder}/result.pt")
    dist.barrier()  # gloo aborts a process if its peer leaves while it still communicates
    dist.destroy_process_group()


@pytest.mark.full
@pytest.mark.parametrize("name", ["muon", "adamw"])
def test_two_shards_train_like_one_process(name: str, tmp_path: Path) -> None:
    mp.spawn(worker, (name, str(tmp_path)), nprocs=2)
    norms, weights, state = torch.load(tmp_path / "result.pt")
    model = make(moe=True)
    optimizer = build(model, CONFIGS[name], NO_SCALING)
    assert norms == pytest.approx(steps(model, optimizer, range(5)), rel=1e-4)
    for key, p in model.named_parameters():
        torch.testing.assert_close(weights[key], p.detach(), atol=1e-4, rtol=0)
    for key, t in optimizer.state_dict_flat()[0].items():
        torch.testing.assert_close(state[key], t, atol=1e-4, rtol=0)
