"""Shards written by some processes and read by others: every number of
processes, with torch's own placement of DTensors.
"""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from deskside.train import parallel
from deskside.weights import sharded_files
from deskside.weights.checkpoint_folder import Checkpoint
from tests.train import tiny_run


def model() -> dict[str, Tensor]:
    """Return tensors with rows that no number of processes divides, with fewer rows than processes,
    and with the dtypes of optimizer states.
    """
    draw = torch.Generator().manual_seed(0)
    return {
        "wide": torch.randn(5, 7, generator=draw),
        "few": torch.randn(3, 2, generator=draw),
        "one": torch.randn(1, 4, generator=draw),
        "codes": torch.randint(-9, 9, (9, 3), generator=draw, dtype=torch.int8),
        "half": torch.randn(8, generator=draw).bfloat16(),
    }


def state() -> dict[str, Tensor]:
    """Return tensors that every process holds completely."""
    return {"step": torch.tensor(3.0), "rows": torch.tensor([1, 2, 3])}


def work(folder: Path, write: bool) -> None:
    """Run on each rank: write the shards, or read them into zeros and compare."""
    world = parallel.init_distributed("cpu", "shard")
    sharded_files.FILE_BYTES = 64
    mesh = init_device_mesh("cpu", (world.size,))
    mine = {
        name: distribute_tensor(tensor if write else torch.zeros_like(tensor), mesh, [Shard(0)])
        for name, tensor in model().items()
    }
    rest = {name: tensor if write else torch.zeros_like(tensor) for name, tensor in state().items()}
    if write:
        sharded_files.write(folder / "sharded", {"model": mine, "optimizer": rest})
    else:
        sharded_files.read(Checkpoint(folder, 0), {"model": mine, "optimizer": rest})
        assert all(torch.equal(mine[name].full_tensor(), tensor) for name, tensor in model().items())
        assert all(torch.equal(rest[name], tensor) for name, tensor in state().items())
    dist.barrier()
    parallel.destroy_distributed(world)


@pytest.mark.full
@pytest.mark.parametrize(
    "writers, readers",
    [(3, 2), *(pytest.param(*numbers, marks=pytest.mark.full) for numbers in ((4, 2), (2, 4)))],
)
def test_another_number_of_processes_reads_the_same(writers: int, readers: int, tmp_path: Path) -> None:
    for ranks, write in ((writers, True), (readers, False)):
        child = tiny_run.call(work, tmp_path, write, log=tmp_path / "log", ranks=ranks)
        assert child.wait() == 0, child.text()
    files = sorted((tmp_path / "sharded").iterdir())
    assert {file.suffix for file in files} == {".safetensors"} and len(files) > writers
    stored = 0
    for file in files:
        with safe_open(file, "pt") as opened:
            stored += sum(opened.get_tensor(key).numel() for key in opened.keys())  # noqa: SIM118
    # No tensor is written twice.
    assert stored == sum(t.numel() for t in (*model().values(), *state().values()))
    alone = {name: torch.zeros_like(tensor) for name, tensor in model().items()}
    sharded_files.read(Checkpoint(tmp_path, 0), {"model": alone}, no_dist=True)
    assert all(torch.equal(alone[name], tensor) for name, tensor in model().items())
