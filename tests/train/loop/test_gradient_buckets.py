"""Buckets of gradients: their order, and their sums over two and three processes
(gloo) compared with each process's own.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from deskside.config.model import ModelConfig
from deskside.model.init import initialize
from deskside.model.transformer import Transformer
from deskside.optim.groups import classify_parameters
from deskside.train import parallel
from deskside.train.loop import gradient_buckets
from deskside.train.loop.gradient_buckets import Bucket, GradientBuckets, make_buckets, make_transfers
from deskside.train.loop.gradient_sums import GradientSums
from tests.train import tiny_run

PASSES = 2


def model(dtype: torch.dtype = torch.float32, **changes: Any) -> Transformer:
    made = Transformer(ModelConfig(**{**tiny_run.SHAPE, **changes}))
    initialize(made, 0)
    return made.to(dtype)


def micro_batch(rank: int, index: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * rank + index)
    return torch.randint(0, 300, (2, 17), generator=generator)


def backward(made: nn.Module, rank: int, index: int) -> None:
    tokens = micro_batch(rank, index)
    made(tokens[:, :-1], tokens[:, 1:]).backward()


class Loss(nn.Module):
    """Computes the model's loss in forward, so that torch.compile can compile it."""

    def __init__(self, made: Transformer):
        super().__init__()
        self.model = made

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        return self.model.loss(tokens, targets)


def own_gradients(made: Transformer, forward: nn.Module, rank: int) -> list[Tensor]:
    """Return the sums over this process's passes, which the buckets should receive."""
    sums = GradientSums(made)
    sums.begin_step(1)
    sums.begin_passes(PASSES)
    for index in range(PASSES):
        backward(forward, rank, index)
        sums.end_pass()
    return [info.parameter.grad for info in classify_parameters(made) if info.parameter.grad is not None]


def summed(folder: Path, case: dict[str, Any]) -> None:
    """Run, on each rank, a step of two passes with small buckets, summed during the backward or after it."""
    world = parallel.init_distributed("cpu", "auto")
    gradient_buckets.BUCKET_BYTES = 4 * 3000
    order: list[str] = []
    for name in ("all_reduce", "reduce", "all_to_all_single"):
        original = getattr(dist, name)

        def logged(*given: Any, name: str = name, original: Any = original, **options: Any) -> Any:
            order.append(name)
            return original(*given, **options)

        setattr(dist, name, logged)
    weights, wire = getattr(torch, case["weights"]), getattr(torch, case["wire"])
    compiled = case.get("compiled", False)
    alone = model(weights, **case.get("model", {}))
    own = own_gradients(alone, Loss(alone), world.rank)
    made = model(weights, **case.get("model", {}))
    infos = classify_parameters(made)
    matrices = [info.name for info in infos if info.role == "matrix"] if case.get("owned") else []
    owners = {name: index % world.size for index, name in enumerate(matrices)}
    sums = GradientSums(made)
    buckets = GradientBuckets(infos, world, owners, wire, case.get("transfer_bytes", 0.0))
    forward: Any = torch.compile(Loss(made), backend="aot_eager") if compiled else Loss(made)
    results = []
    for overlap in (True, False):
        sums.begin_step(1)
        buckets.begin_step(overlap)
        sums.begin_passes(PASSES)
        for index in range(PASSES):
            buckets.begin_pass(index == PASSES - 1)
            backward(forward, world.rank, index)
            sums.end_pass()
            order.append("end of pass")
        buckets.finish()
        results.append([info.parameter.grad for info in infos])
        made.zero_grad()
    torch.save((own, *results, owners, order, [info.name for info in infos]), folder / f"{world.rank}.pt")
    parallel.destroy_distributed(world)


def ranks_of(tmp_path: Path, case: dict[str, Any], ranks: int) -> list[Any]:
    child = tiny_run.call(summed, tmp_path, case, log=tmp_path / "log", ranks=ranks)
    assert child.wait() == 0, child.text()
    return [torch.load(tmp_path / f"{rank}.pt") for rank in range(ranks)]


EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
TWO_RANKS: dict[str, dict[str, Any]] = {
    "plain": {},
    "owned": {"owned": True},
    "compiled": {"compiled": True},
    "experts": {"model": EXPERTS, "owned": True},
    "tied": {"model": {"tie_word_embeddings": True}},
    "together": {"transfer_bytes": 4 * 20_000},
    "together, owned": {"transfer_bytes": 4 * 20_000, "owned": True},
    "bfloat16 weights": {"weights": "bfloat16", "owned": True},
}


EVERY_RUN = ("owned", "experts", "bfloat16 weights", "together")


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=() if case in EVERY_RUN else pytest.mark.full) for case in TWO_RANKS]
)
def test_sums_of_two_ranks_are_exact(case: str, tmp_path: Path) -> None:
    """a + b does not depend on the order, so each sum is one addition of the two processes' own gradients."""
    made = ranks_of(tmp_path, {"weights": "float32", "wire": "float32", **TWO_RANKS[case]}, 2)
    (mine, *_), (theirs, *_) = made
    names, owners = made[0][5], made[0][3]
    assert bool(owners) == bool(TWO_RANKS[case].get("owned"))
    for rank, (_, overlapped, after, _, order, _) in enumerate(made):
        for name, a, b, beside, later in zip(names, mine, theirs, overlapped, after, strict=True):
            if owners.get(name, rank) != rank:
                assert beside is None and later is None
                continue
            assert torch.equal(beside, (a.float() + b.float()).to(a.dtype)), name
            assert torch.equal(later, beside), name
        ends = [i for i, entry in enumerate(order) if entry == "end of pass"]
        first, second = order[ends[0] : ends[1]], order[ends[3] :]
        assert len(first) > 3 and first[1:] == second[1:]  # all buckets in the last backward, or all after it
        assert order[: ends[0]] == [] and order[ends[1] + 1 : ends[3]] == ["end of pass"]
    assert made[0][4] == made[1][4]


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("weights", ["float32", "bfloat16"])
def test_bfloat16_sums_are_within_their_bound(weights: str, ranks: int, tmp_path: Path) -> None:
    """Compared with float64: one rounding of each gradient and one of each sum. All ranks have the same bits."""
    made = ranks_of(tmp_path, {"weights": weights, "wire": "bfloat16", "owned": True}, ranks)
    owners, names = made[0][3], made[0][5]
    u = 2.0**-8
    different = 0
    for number, name in enumerate(names):
        each = torch.stack([own[number].double() for own, *_ in made])
        exact, size = each.sum(0), each.abs().sum(0)
        holders = [owners[name]] if name in owners else range(ranks)
        results = [made[rank][1][number] for rank in holders]
        results += [made[rank][2][number] for rank in holders]
        assert all(torch.equal(result, results[0]) for result in results), name
        error = (results[0].double() - exact).abs()
        assert bool((error <= u * (size + exact.abs()) + u * u * size + 1e-6 * size).all()), name
        different += int((error > 0).sum())
    assert different > 1000


@pytest.mark.parametrize("owned", [False, True])
def test_three_ranks_agree_and_repeat(owned: bool, tmp_path: Path) -> None:
    made = ranks_of(tmp_path, {"weights": "float32", "wire": "float32", "owned": owned}, 3)
    for number, name in enumerate(made[0][5]):
        holders = [made[0][3][name]] if name in made[0][3] else range(3)
        results = [made[rank][which][number] for rank in holders for which in (1, 2)]
        assert all(torch.equal(result, results[0]) for result in results), name
        exact = torch.stack([own[number].double() for own, *_ in made]).sum(0)
        torch.testing.assert_close(results[0].double(), exact, rtol=1e-5, atol=1e-7)


def test_buckets_follow_the_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each parameter is in one bucket, a bucket ends with a sublayer, the head is first and the embedding last."""
    monkeypatch.setattr(gradient_buckets, "BUCKET_BYTES", 4 * 3000)
    infos = classify_parameters(model(num_hidden_layers=4))
    name_of = {id(info.parameter): info.name for info in infos}
    buckets = [[name_of[id(p)] for p in bucket.parameters] for bucket in make_buckets(infos, {})]
    assert sorted(name for bucket in buckets for name in bucket) == sorted(name_of.values())
    assert buckets[0] == ["head.weight"] and buckets[-1] == ["embed.weight"]
    sublayers = [{".".join(name.split(".")[:3]) for name in bucket if "layers" in name} for bucket in buckets]
    large = {info.name for info in infos if info.parameter.numel() >= 3000}
    for one, names in enumerate(sublayers):
        for other in sublayers[one + 1 :]:
            shared = names & other
            assert all(any(name.startswith(part) for name in large) for part in shared)
    owners = {info.name: 0 for info in infos if info.role == "matrix"}
    owned = make_buckets(infos, owners)
    assert {name_of[id(b.parameters[0])] for b in owned if b.owner is not None} == set(owners)
    assert all(len(b.parameters) == 1 for b in owned if b.owner is not None)


def test_transfers_are_full_but_for_the_last_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradient_buckets, "BUCKET_BYTES", 4 * 3000)
    infos = classify_parameters(model(num_hidden_layers=4))

    def size(transfer: Sequence[Bucket]) -> int:
        return 4 * sum(parameter.numel() for bucket in transfer for parameter in bucket.parameters)

    buckets = make_buckets(infos, {})
    assert make_transfers(buckets, 0.0) == [[bucket] for bucket in buckets]
    limit = 4 * 8000
    transfers = make_transfers(buckets, limit)
    assert [bucket for transfer in transfers for bucket in transfer] == buckets and transfers[-1] == buckets[
        -1:
    ]
    assert 3 < len(transfers) < len(buckets)
    assert all(size(transfer) >= limit > size(transfer[:-1]) for transfer in transfers[:-2])
    owned = make_transfers(make_buckets(infos, {i.name: 0 for i in infos if i.role == "matrix"}), limit)
    assert all(
        len(transfer) == 1 for transfer in owned if any(bucket.owner is not None for bucket in transfer)
    )


def lacking(folder: Path) -> None:
    world = parallel.init_distributed("cpu", "auto")
    made = model()
    buckets = GradientBuckets(classify_parameters(made), world, {}, torch.float32)
    buckets.begin_step(True)
    buckets.begin_pass(True)
    made.embed.weight.sum().backward()
    try:
        buckets.finish()
    except RuntimeError as error:
        (folder / f"{world.rank}").write_text(str(error))
    parallel.destroy_distributed(world)


def test_a_missing_gradient_is_an_error(tmp_path: Path) -> None:
    child = tiny_run.call(lacking, tmp_path, log=tmp_path / "log", ranks=2)
    assert child.wait() == 0, child.text()
    assert all("no gradient on this rank" in (tmp_path / rank).read_text() for rank in "01")
