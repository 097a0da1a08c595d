"""A growing batch: its stages, learning rates, passes, and plan."""

import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from deskside.config import merge
from deskside.config.run import RunConfig
from deskside.plan.setting import options, setting_from_config
from deskside.train.loop.step import Stepper
from tests.train import tiny_run

GROWS = {"batch_growth": 4, "batch_growth_until": 0.6, "batch_lr": "sqrt"}


def grown(**changes: Any) -> RunConfig:
    parts = {"batch": {"tokens": 96, "sequence_length": 8}, "schedule": {"name": "wsd", "batch_growth": 3}}
    return RunConfig.model_validate({name: {**part, **changes.get(name, {})} for name, part in parts.items()})


def test_the_batch_grows_in_equal_parts_at_equal_distances() -> None:
    config = grown(schedule={"batch_growth_until": 2 / 3})
    found = [(round(stage.until, 9), config.stage_tokens(stage)) for stage in config.stages()]
    assert found == [(round(1 / 3, 9), 32), (round(2 / 3, 9), 64), (1.0, 96)]
    assert config.mean_step_tokens() == pytest.approx(64)
    assert len(grown(schedule={"batch_growth": 1}).stages()) == 1
    assert config.batch_lr_factor(96) == 1
    assert grown(schedule={"batch_lr": "sqrt", "batch_growth_until": 2 / 3}).batch_lr_factor(
        16
    ) == pytest.approx(0.5)


def test_stages_keep_their_lengths_while_the_batch_grows() -> None:
    stages = [{"until": 0.5, "sequence_length": 4}, {"until": 1.0, "sequence_length": 8}]
    config = grown(schedule={"stages": stages, "batch_growth_until": 0.8})
    found = [(s.until, s.sequence_length, config.stage_tokens(s)) for s in config.stages()]
    assert found == [(0.4, 4, 32), (0.5, 4, 64), (0.8, 8, 64), (1.0, 8, 96)]


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        (
            {"schedule": {"stages": [{"until": 1.0, "sequence_length": 8, "batch_tokens": 32}]}},
            "batch_growth",
        ),
        ({"batch": {"tokens": 64}}, r"schedule\.batch_growth.*--batch\.tokens 72"),
        ({"batch": {"micro_tokens": 48}}, r"batch\.micro_tokens"),
        ({"schedule": {"batch_growth": 65}}, "batch_growth"),
        ({"schedule": {"batch_growth_until": 0.0}}, "batch_growth_until"),
    ],
)
def test_what_cannot_grow_is_refused(changes: dict[str, Any], key: str) -> None:
    with pytest.raises(ValidationError, match=key):
        grown(**changes)


@pytest.mark.parametrize("sizes", [3, 4, 12])
def test_a_plan_has_the_same_stages(sizes: int) -> None:
    config = grown(schedule={"length": "1h", "batch_growth": sizes})
    setting = setting_from_config(config, 1, "bf16")
    assert [stage.tokens for stage in setting.stages] == [96 * n // sizes for n in range(1, sizes + 1)]
    assert setting.tokens_per_step == pytest.approx(config.mean_step_tokens())
    planned = merge.build([config.model_dump(exclude_unset=True), options(setting)])
    again = [(pytest.approx(s.until, abs=1e-5), planned.stage_tokens(s)) for s in config.stages()]
    assert [(s.until, planned.stage_tokens(s)) for s in planned.stages()] == again
    assert planned.schedule.batch_growth == sizes


def test_a_plan_writes_out_stages_that_differ_in_more() -> None:
    stages = [{"until": 0.5, "sequence_length": 4}, {"until": 1.0, "sequence_length": 8}]
    config = grown(schedule={"stages": stages})
    planned = merge.build(
        [config.model_dump(exclude_unset=True), options(setting_from_config(config, 1, "bf16"))]
    )
    assert [planned.stage_tokens(s) for s in planned.stages()] == [
        config.stage_tokens(s) for s in config.stages()
    ]
    assert planned.schedule.batch_growth == 1


def test_a_run_takes_these_batches_and_rates(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    schedule = {"name": "constant", "length": "20 steps", "warmup": 0.0, **GROWS}
    batch = {"tokens": 256, "micro_tokens": 64}
    config = tiny_run.config(data, batch=batch, schedule=schedule, optim={"scale": False})
    passes, dry, original = [], [], Stepper.run

    def run(stepper: Stepper, batches: list[Any], step: int, **given: bool) -> Any:
        (dry if given.get("dry") else passes).append(len(batches))
        return original(stepper, batches, step, **given)

    monkeypatch.setattr(Stepper, "run", run)
    tiny_run.train(tmp_path, config)
    rows, fit = tiny_run.rows(tmp_path / "run"), tiny_run.plan(tmp_path / "run")["fit"]
    tokens = [b - a for a, b in pairwise([0, *(row["tokens"] for row in rows)])]
    assert tokens == [64] * 4 + [128] * 4 + [192] * 4 + [256] * 8
    assert passes == [n // 64 for n in tokens]
    assert [(f["micro_rows"], f["accumulation"]) for f in fit] == [(2, 1), (2, 2), (2, 3), (2, 4)]
    # The first dry steps have two passes, like later steps. Only the largest batch gets a dry step with one pass.
    assert set(dry) <= {1, 2, 4} and dry[0] == 2 and dry.count(4) == 1
    mean = config.mean_step_tokens()
    assert [row["lr"] for row in rows] == pytest.approx([0.04 * math.sqrt(n / mean) for n in tokens])


def test_without_growth_every_bit_is_that_of_stages_written_out(data: Path, tmp_path: Path) -> None:
    """A growing batch is implemented by stages, so the run equals one with these stages in its configuration."""
    schedule = {"length": "10 steps", "batch_growth": 2, "batch_growth_until": 0.5}
    batch = {"micro_tokens": 128}
    own = tiny_run.config(data, batch=batch, schedule=schedule)
    stages = [stage.model_dump() for stage in own.stages()]
    written = tiny_run.config(data, batch=batch, schedule={"length": "10 steps", "stages": stages})
    for name, config in (("own", own), ("written", written)):
        torch.manual_seed(0)
        tiny_run.train(tmp_path, config, name)
    assert tiny_run.curve(tmp_path / "own") == tiny_run.curve(tmp_path / "written")


def test_the_batch_grows_from_a_multiple_of_the_smallest_one_in_longer_rows(
    data: Path, tmp_path: Path
) -> None:
    """The stage of rows of 32 tokens begins with 2/3 of the batch, whose 4 rows fit in a pass, and ends with 6 rows."""
    stages = [{"until": 0.5, "sequence_length": 16}, {"until": 1.0, "sequence_length": 32}]
    schedule = {"length": "8 steps", "batch_growth": 3, "batch_growth_until": 0.67, "stages": stages}
    tiny_run.train(tmp_path, tiny_run.config(data, batch={"tokens": 192}, schedule=schedule))
    fit = tiny_run.plan(tmp_path / "run")["fit"]
    assert [(f["micro_rows"], f["accumulation"]) for f in fit] == [(4, 1), (4, 2), (2, 2), (2, 3)]
    assert tiny_run.rows(tmp_path / "run")[-1]["tokens"] == 3 * 64 + 1 * 128 + 2 * 128 + 2 * 192
