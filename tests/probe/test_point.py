"""A point is a real training run: its numbers agree with the budget's arithmetic and with the wall clock."""

import math
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from deskside.budget.shape import flops_per_token, num_params
from deskside.probe import point
from deskside.probe.grid import calibration_points
from deskside.probe.point import (
    RandomRows,
    measure_point,
    memory_peaks,
    point_config,
    prepare_step,
    random_batches,
    used_by_others,
)
from deskside.train import parallel
from deskside.train.parallel import World
from deskside.train.prepare import attention_choice, setup
from deskside.utils import child_process
from deskside.utils.errors import UsageError
from deskside.utils.machine import this_cpu
from tests.train import tiny_run

SHAPE = {
    "vocab_size": 128, "num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 16, "intermediate_size": 64, "max_position_embeddings": 64,
}  # fmt: skip
SPEC: dict[str, Any] = {
    "model": SHAPE, "sequence_length": 32, "tokens": 256, "micro_tokens": 64, "device": "cpu",
    "warmup_seconds": 0.0, "seconds": 0.0,
}  # fmt: skip


@pytest.fixture(scope="module")
def result() -> dict[str, Any]:
    torch.set_num_threads(1)
    return measure_point(SPEC)


def test_numbers_agree_with_each_other(result: dict[str, Any]) -> None:
    config = point_config(SPEC)
    step = result["step_seconds"]
    assert step["p10"] <= step["median"] <= step["p90"]
    assert result["tokens_per_second"] == pytest.approx(256 / step["median"])
    assert (result["micro_tokens"], result["accumulation"]) == (64, 4)
    assert result["params"] == num_params(config.model)
    assert result["flops_per_token"] == flops_per_token(config.model, 32)
    achieved = result["tokens_per_second"] * result["flops_per_token"]
    assert result["mfu"] == pytest.approx(achieved / (result["matmul_peak_tflops"] * 1e12))
    assert 0 < result["optimizer_seconds"] < step["p90"]
    assert result["steps"] >= 5
    assert (result["device"], result["precision"], result["compile"]) == ("cpu", "fp32", "off")
    assert (result["cuda_graph"], result["replays"]) == ("auto", False)


def test_it_really_trains(result: dict[str, Any]) -> None:
    """The loss starts at that of a uniform guess and changes, and nothing is infinite."""
    assert result["loss_first"] == pytest.approx(math.log(128), abs=0.1)
    assert result["loss_last"] != result["loss_first"]
    assert result["finite"]


@pytest.mark.parametrize(("others", "used"), [(3, 7), (0, 10), (9, 4)])
def test_the_memory_of_other_programs_is_not_the_points(
    others: int, used: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plan for this machine leaves it out of the memory that is free. No less than the allocator has is used."""
    gpu = replace(this_cpu(), device="cuda", memory_bytes=24, free_bytes=24 - others)
    monkeypatch.setattr(point, "this_machine", lambda: gpu)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (14, 24))
    for name in ("max_memory_allocated", "max_memory_reserved", "memory_reserved"):
        monkeypatch.setattr(torch.cuda, name, lambda device: 4)
    of_others = used_by_others({"device": "cuda"})
    assert memory_peaks(torch.device("cuda"), of_others)["device_used_bytes"] == used
    assert used_by_others({"device": "cpu"}) == 0


def test_a_step_takes_as_long_as_it_takes() -> None:
    """The sum of the counted steps cannot exceed the wall-clock time of the measurement."""
    began = time.perf_counter()
    found = measure_point({**SPEC, "seconds": 0.3, "optimizer": "adamw"})
    assert found["steps"] * found["step_seconds"]["p10"] < time.perf_counter() - began


def test_passes_are_replayed_as_in_a_run_unless_the_point_times_the_host() -> None:
    assert point_config(SPEC).compute.cuda_graph == "auto"
    *others, host = calibration_points(24 * 2**30, "cuda")
    assert point_config(dict(host.spec)).compute.cuda_graph == "off"
    assert {point_config(dict(point.spec)).compute.cuda_graph for point in others} == {"auto"}


def test_out_of_reach_is_one_line() -> None:
    with pytest.raises(UsageError, match="not a multiple"):
        point_config({**SPEC, "tokens": 100})
    with pytest.raises(UsageError, match="hidden_siz"):
        point_config({**SPEC, "model": {**SHAPE, "hidden_siz": 3}})


def test_tokens_fall_as_one_over_rank() -> None:
    (batch, *_) = random_batches(RandomRows(64, 100), 64, 128, World(torch.device("cpu")))
    counts = torch.bincount(batch.tokens_BT.flatten(), minlength=100).double()
    expected = 64 * 64 / torch.arange(1, 101).double() / (1 / torch.arange(1, 101).double()).sum()
    assert float((counts[:5] / expected[:5] - 1).abs().max()) < 0.15
    assert (batch.num_valid, batch.num_valid_step) == (64 * 64, 128 * 64)


def test_through_a_child() -> None:
    outcome = child_process.run(
        "deskside.probe.point:measure_point", {"spec": SPEC}, 120, {"OMP_NUM_THREADS": "1"}
    )
    assert outcome.status == "ok", outcome.output
    assert outcome.value["setup_seconds"] < outcome.seconds


def two_steps(folder: Path) -> None:
    """Save losses and gradient norms of two steps: of this rank's tokens, or of one process with those of two ranks.

    Only rank 0 may choose the recipe and the attention backends.
    """
    for module, name in ((setup, "choose_recipe"), (attention_choice, "choose_attention")):
        choose = getattr(module, name)
        setattr(module, name, choose if os.environ.get("RANK", "0") == "0" else None)
    world = parallel.init_distributed("cpu", "auto")
    prepared = prepare_step(point_config({**SPEC, "micro_tokens": 128, "optimizer": "adamw"}), world=world)
    readers = [world] if world.size > 1 else [World(world.device, rank, 2) for rank in range(2)]
    batches = [random_batches(prepared.rows, 4, 4, reader) for reader in readers]
    found = []
    for step, micro_batches in enumerate(list(zip(*batches, strict=True))[:2], start=1):
        prepared.stepper.set_progress(0.1, 0.0, step)
        found.append(prepared.stepper.run(list(micro_batches), step).read())
    torch.save((found, prepared.attention), folder / f"{world.size}-{world.rank}.pt")
    parallel.destroy_distributed(world)


def test_ranks_train_on_their_own_tokens_with_the_loss_of_all(tmp_path: Path) -> None:
    for ranks in (1, 2):
        child = tiny_run.call(two_steps, tmp_path, log=tmp_path / f"log-{ranks}", ranks=ranks)
        assert child.wait() == 0, child.text()
    (alone, _), (first, attention), (second, received) = (
        torch.load(tmp_path / f"{name}.pt") for name in ("1-0", "2-0", "2-1")
    )
    assert first == second and attention == received
    assert alone[0][0] == pytest.approx(math.log(128), abs=0.1)
    for one, both in zip(alone, first, strict=True):
        assert both[:2] == pytest.approx(one[:2], rel=1e-5) and not both[2]


def test_processes_that_share_rows_have_the_same_tokens() -> None:
    def of(rank: int, context: int) -> Any:
        ranks = parallel.ContextRanks(None, rank % context, context) if context > 1 else None
        (batch, *_) = random_batches(
            RandomRows(64, 100), 2, 2, World(torch.device("cpu"), rank, 4, False, ranks)
        )
        return batch

    assert torch.equal(of(0, 2).tokens_BT, of(1, 2).tokens_BT)
    assert not torch.equal(of(1, 2).tokens_BT, of(2, 2).tokens_BT)
    assert not torch.equal(of(0, 1).tokens_BT, of(1, 1).tokens_BT)
    assert [of(0, context).num_valid_step for context in (1, 2, 4)] == [4 * 128, 2 * 128, 128]
