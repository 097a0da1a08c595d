"""Trials of a study on GPUs: the share of memory that they may use, power, and one GPU for each trial."""

from pathlib import Path

import pytest
import torch

from deskside.config.run import RunConfig
from deskside.study import results as files
from deskside.study.execute.devices import choose
from deskside.study.execute.executor import LocalExecutor
from deskside.study.execute.runner import Runner
from deskside.study.execute.study_folder import StudyFolder, StudyPlan
from tests.gpu.card import ADAMW, NEEDS_CARD, QUICK, config
from tests.study import tiny_study

pytestmark = NEEDS_CARD

WIDE = {"intermediate_size": 8192}
ROWS = 256
ROOM = 2 * 2**30  # bytes; the whole batch needs more than 0.1 MiB a token


def study(folder: Path, given: RunConfig, share: float, arms: int = 1) -> StudyFolder:
    """Return a study of the tests' arms with this configuration, which differ only in the learning rate."""
    plan = tiny_study.plan()
    planned = []
    for number, arm in enumerate(plan.arms[:arms]):
        optim = given.optim.model_copy(update={"lr": given.optim.lr * (1 + number)})
        one = given.model_copy(update={"optim": optim})
        planned.append(type(arm)(**{**vars(arm), "config": one, "baseline": plan.arms[0].id}))
    made = StudyFolder(folder)
    made.create(StudyPlan(**{**vars(plan), "arms": planned, "memory_fraction": share}), "")
    return made


def test_a_trial_stays_inside_its_share_of_the_memory(data: Path, tmp_path: Path) -> None:
    batch = {"tokens": ROWS * 128}
    given = config(
        data, model=WIDE, batch=batch, schedule={"length": "200 steps"}, optim=ADAMW, compute=QUICK
    )
    share = ROOM / torch.cuda.get_device_properties(0).total_memory
    folder = study(tmp_path / "study", given, share)
    runner = Runner(folder, folder.read(), LocalExecutor(choose(None, {"auto"})[:1]))
    runner.run(runner.remaining())
    (trial,) = files.read(folder.path).arms[0].trials
    assert trial.status == "finished", trial
    metrics = trial.metrics
    assert metrics["peak_memory_gib"] <= metrics["peak_reserved_gib"] <= ROOM / 2**30 + 0.01
    assert metrics["micro_tokens"] < ROWS * 128  # the whole batch would not have fitted
    if "watts" in metrics:  # a container may hide the sensor
        assert metrics["joules_per_token"] == pytest.approx(metrics["watts"] / metrics["tokens_per_second"])
        assert 10 < metrics["watts"] < 2000


def test_a_share_that_is_too_small_is_out_of_memory(data: Path, tmp_path: Path) -> None:
    given = config(data, model=WIDE, schedule={"length": "6 steps"}, optim=ADAMW, compute=QUICK)
    folder = study(tmp_path / "study", given, 64 * 2**20 / torch.cuda.get_device_properties(0).total_memory)
    runner = Runner(folder, folder.read(), LocalExecutor(choose(None, {"auto"})[:1]))
    runner.run(runner.remaining())
    (trial,) = files.read(folder.path).arms[0].trials
    assert trial.status == "oom" and "out of memory" in trial.reason.lower(), trial


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two cards")
def test_each_card_has_a_trial_of_its_own(data: Path, tmp_path: Path) -> None:
    given = config(data, schedule={"length": "50 steps"}, optim=ADAMW, compute=QUICK)
    folder = study(tmp_path / "study", given, 0.5, arms=4)
    devices = choose("0,1", {"auto"})
    runner = Runner(folder, folder.read(), LocalExecutor(devices))
    runner.run(runner.remaining())
    results = files.read(folder.path)
    trials = [trial for arm in results.arms for trial in arm.trials]
    assert [trial.status for trial in trials] == ["finished"] * 4
    assert {trial.device for trial in trials} == {"cuda:0", "cuda:1"}
    assert results.machine["gpu"]["count"] == 1  # in each trial's process
