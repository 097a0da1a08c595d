"""A point is a real training run: its numbers agree with the budget's arithmetic and with the wall clock."""

import math
import time
from typing import Any

import pytest
import torch

from deskside.budget.shape import flops_per_token, num_params
from deskside.probe.point import RandomRows, measure_point, point_config, random_batches
from deskside.utils import child_process
from deskside.utils.errors import UsageError

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


def test_it_really_trains(result: dict[str, Any]) -> None:
    """The loss starts at that of a uniform guess and changes, and nothing is infinite."""
    assert result["loss_first"] == pytest.approx(math.log(128), abs=0.1)
    assert result["loss_last"] != result["loss_first"]
    assert result["finite"]


def test_a_step_takes_as_long_as_it_takes() -> None:
    """The sum of the counted steps cannot exceed the wall-clock time of the measurement."""
    began = time.perf_counter()
    found = measure_point({**SPEC, "seconds": 0.3, "optimizer": "adamw"})
    assert found["steps"] * found["step_seconds"]["p10"] < time.perf_counter() - began


def test_out_of_reach_is_one_line() -> None:
    with pytest.raises(UsageError, match="not a multiple"):
        point_config({**SPEC, "tokens": 100})
    with pytest.raises(UsageError, match="hidden_siz"):
        point_config({**SPEC, "model": {**SHAPE, "hidden_siz": 3}})


def test_tokens_fall_as_one_over_rank() -> None:
    (batch, *_) = random_batches(RandomRows(64, 100), 64, 128, torch.device("cpu"))
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
