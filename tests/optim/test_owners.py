"""Matrices with one owner: an even division of the work, and two or three processes (gloo) compared with one."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from deskside.config.optim import MuonConfig
from deskside.optim.build import Optimizer, build
from deskside.optim.owners import Replicas, assign_owners
from tests.optim.models import NO_SCALING, Tiny, backward, make, weights


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_work_is_divided_evenly_and_always_alike(ranks: int) -> None:
    """Longest processing time first: no rank has more than 4/3 of an even share (Graham 1969)."""
    costs = {
        f"layers.{i}.{name}": cost
        for i in range(12)
        for name, cost in (("qkv", 3.0), ("up", 8.0), ("o", 1.0))
    }
    owners = assign_owners(costs, ranks)
    loads = [sum(cost for name, cost in costs.items() if owners[name] == rank) for rank in range(ranks)]
    assert owners.keys() == costs.keys() and max(loads) <= 4 / 3 * sum(loads) / ranks
    assert assign_owners(dict(reversed(costs.items())), ranks) == owners
    assert assign_owners(costs, 1) == {}


def made(config: MuonConfig) -> Tiny:
    model = make(moe=True)
    for parameter in model.parameters():
        if parameter.ndim > 1 and config.weights != "float32":
            parameter.data = parameter.data.bfloat16()
    return model


def steps(model: Tiny, optimizer: Optimizer, which: range) -> list[float]:
    """Run steps in which every process computes all gradients, but only owners keep those of their matrices."""
    norms = []
    for step in which:
        backward(model, step)
        for info in optimizer.parameters:
            if optimizer.muon is not None and not optimizer.muon.owns(info.name):
                info.parameter.grad = None
        optimizer.set_progress(1.0, step / 8, step)
        norms.append(optimizer.clip_and_norm(0.5).item())
        optimizer.step(torch.tensor(1.0 if step == 1 else 0.0))
        optimizer.zero_grad()
        optimizer.wait_for_weights()
    return norms


def worker(rank: int, ranks: int, config: MuonConfig, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=ranks)
    model = made(config)
    optimizer = build(model, config, NO_SCALING, replicas=Replicas(rank, ranks))
    empty = optimizer.state_dict_flat()[0]
    norms = steps(model, optimizer, range(3))
    tensors, data = optimizer.state_dict_flat()
    box: list[Any] = [{key: t.clone() for key, t in tensors.items()}]
    dist.broadcast_object_list(box, src=0)  # the state of rank 0, as a checkpoint gives it to all

    second = made(config)
    with torch.no_grad():
        for mine, theirs in zip(second.parameters(), model.parameters(), strict=True):
            mine.copy_(theirs)
    resumed = build(second, config, NO_SCALING, replicas=Replicas(rank, ranks))
    resumed.load_state_dict_flat(box[0], data)
    steps(second, resumed, range(3, 5))
    norms += steps(model, optimizer, range(3, 5))
    assert optimizer.muon is not None
    held = set(optimizer.muon.momentum_buffers)
    final = optimizer.state_dict_flat()[0]
    torch.save((empty, norms, weights(model), weights(second), held, final, data), f"{folder}/{rank}.pt")
    dist.barrier()  # gloo aborts a process if its peer leaves while it still communicates
    dist.destroy_process_group()


CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "two": (2, {}),
    "three, bfloat16 momentum": (3, {"states": "bfloat16"}),
    "two, momentum on the host": (2, {"offload": True}),
    "two, momentum in 8 bits": (2, {"states": "8bit"}),
    "three, momentum in 8 bits on the host": (3, {"states": "8bit", "offload": True}),
    "two, weights in 24 bits": (2, {"weights": "24bit"}),
    "more ranks than matrices": (5, {"normalize": "none"}),
}


@pytest.mark.full
@pytest.mark.parametrize("case", CASES)
def test_owners_train_like_one_process(case: str, tmp_path: Path) -> None:
    ranks, changes = CASES[case]
    config = MuonConfig(**changes)
    mp.spawn(worker, (ranks, config, str(tmp_path)), nprocs=ranks)
    results = [torch.load(tmp_path / f"{rank}.pt") for rank in range(ranks)]
    model = made(config)
    optimizer = build(model, config, NO_SCALING)
    norms = steps(model, optimizer, range(5))
    state, _ = optimizer.state_dict_flat()
    matrices = {key.split("/")[1] for key in state if key.startswith("momentum/")}
    # Each matrix has one owner.
    assert sorted(name for *_, held, _, _ in results for name in held) == sorted(matrices)
    for rank, (empty, their_norms, theirs, resumed, _, found, data) in enumerate(results):
        assert not empty and their_norms == pytest.approx(norms, rel=1e-5)
        for name, value in weights(model).items():
            torch.testing.assert_close(theirs[name], value, atol=1e-5, rtol=1e-5)
            assert torch.equal(theirs[name], results[0][2][name]) and torch.equal(theirs[name], resumed[name])
        if rank == 0:
            assert found.keys() == state.keys()
            for key, tensor in state.items():
                assert found[key].dtype == tensor.dtype
                torch.testing.assert_close(found[key], tensor, atol=1e-4, rtol=1e-2)
            build(made(config), config, NO_SCALING).load_state_dict_flat(found, data)


def test_weights_are_awaited_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    arrived: list[Tensor] = []

    class Work:
        def __init__(self, tensor: Tensor):
            self.tensor = tensor

        def wait(self) -> None:
            arrived.append(self.tensor)

    monkeypatch.setattr(dist, "broadcast", lambda tensor, src, async_op: Work(tensor))
    model = make()
    optimizer = build(model, MuonConfig(), NO_SCALING, replicas=Replicas(0, 2))
    assert optimizer.muon is not None
    sent = [info for info in optimizer.parameters if info.name in optimizer.owners]
    optimizer.muon.new_weights.send(sent, optimizer.owners)
    optimizer.wait_for_weights([sent[1].name, "gain"])
    assert [t.data_ptr() for t in arrived] == [sent[1].parameter.data_ptr()]
    optimizer.wait_for_weights()
    assert len(arrived) == len(sent) and not optimizer.muon.new_weights.pending
