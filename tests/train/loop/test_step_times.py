"""Step times are right whenever the host reads them: the loop on a fake device with its own clock."""

import itertools
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from deskside.budget.shape import flops_per_token
from deskside.train.loop import trainer
from deskside.train.loop.clock import Clock, Revision, StepPlan
from deskside.train.loop.guard import Guard
from deskside.train.loop.stage_work import StageWork
from deskside.train.loop.step import DeviceEvent
from deskside.train.loop.trainer import RunLength, Trainer, TrainProgress
from deskside.train.parallel import World
from deskside.utils.signals import StopSignal
from tests.train import tiny_run

STEPS, TOKENS, EVALUATION = 11, 256, 3.0


class Device:
    """A device that runs work in the order of its launches, at its own pace, seen by one host.

    Launching a step costs the host `launch` seconds, and then the device `work` seconds. With `waits`, the launch
    blocks the host until the work is done, like a step that copies something to the host. `held_up` maps a step to
    the seconds for which a busy machine stops the host after launching it.
    """

    def __init__(self, launch: float, work: float, waits: bool, held_up: dict[int, float] | None = None):
        self.launch, self.work, self.waits, self.held_up = launch, work, waits, held_up or {}
        self.now = self.free_at = 0.0

    def perf_counter(self) -> float:
        self.now += 1e-9
        return self.now

    def step(self, _: Any, number: int) -> "Finished":
        self.now += self.launch
        self.free_at = max(self.free_at, self.now) + self.work
        if self.waits:
            self.now = self.free_at
        finished = Finished(self)
        self.now += self.held_up.get(number, 0.0)
        return finished

    def evaluate(self) -> dict[str, float]:
        self.now += EVALUATION
        return {"val_bpb": 1.0}


class At:
    """A `DeviceEvent` on that device."""

    def __init__(self, device: Device):
        self.seconds = max(device.now, device.free_at)

    def seconds_since(self, earlier: "At") -> float:
        return self.seconds - earlier.seconds


class Finished:
    """`StepMetrics` on that device."""

    count = 1

    def __init__(self, device: Device):
        self.device, self.end = device, At(device)

    def read(self) -> tuple[float, float, bool]:
        self.device.now = max(self.device.now, self.end.seconds)
        return 1.0, 1.0, False

    def metric_sums(self) -> dict[str, float]:
        return {}

    def router_sums(self) -> list[float]:
        return []


class Loader:
    def __iter__(self) -> Iterator[list[Any]]:
        return itertools.repeat([])

    def close(self) -> None:
        pass


class Rows(list[dict[str, Any]]):
    def on_step(self, row: dict[str, Any], total_steps: int) -> None:
        self.append(row)

    def close(self) -> None:
        pass


def run(device: Device, rows: Rows, monkeypatch: pytest.MonkeyPatch, reads_weights: bool = False) -> Trainer:
    """Run the loop, with an evaluation after every fifth step."""
    monkeypatch.setattr(trainer, "DeviceEvent", lambda _: At(device), raising=False)
    monkeypatch.setattr(time, "perf_counter", device.perf_counter)
    config = tiny_run.config("nothing", evaluate={"every": "5 steps"}, schedule={"length": f"{STEPS} steps"})
    stepper: Any = SimpleNamespace(
        config=config,
        world=World(torch.device("cuda")),
        guard=Guard(config.guard),
        optimizer=SimpleNamespace(lr_groups=lambda: {"all": 0.1}),
        objective=SimpleNamespace(
            loader=lambda *_: Loader(), metrics=lambda *_: {}, reads_weights=reads_weights
        ),
        routers=SimpleNamespace(metrics=lambda *_: {}),
        set_progress=lambda *_: None,
        set_window=lambda _: None,
        run=device.step,
        wait_for_weights=lambda: None,
        average_weights=lambda *_: None,
    )
    stage: Any = StageWork(1.0, 32, None, TOKENS, SimpleNamespace(), 8, device.work)  # type: ignore[arg-type]
    length = RunLength(StepPlan([Revision(0, 0.0, STEPS, 0.0, None, "planned")]), Clock("wall", 0.0))
    log: Any = SimpleNamespace(event=lambda _: None, step=rows.on_step)
    trained = Trainer(
        stepper,
        [stage],
        length,
        TrainProgress(),
        SimpleNamespace(  # type: ignore[arg-type]
            save=lambda *_: None, is_best=lambda _: False, has_written=False, timings={}
        ),
        log,
        evaluate=device.evaluate,
        complete_row=lambda row, flops_per_second: {**row, "flops": flops_per_second},
    )
    with StopSignal() as stop:
        assert trained.run(stop) == "finished"
    return trained


@pytest.mark.parametrize(
    "device, first, others",
    [
        (Device(0.01, 0.05, waits=False), 0.06, 0.05),  # the device holds up the host
        (Device(0.08, 0.05, waits=False), 0.13, 0.08),  # the host holds up the device
        (Device(0.01, 0.05, waits=True), 0.06, 0.06),  # they take turns
        # The host reads the last two rows before a pause long after their steps, one right after the other.
        (Device(0.01, 0.05, waits=False, held_up={5: 2.0, STEPS: 2.0}), 0.06, 0.05),
        (Device(0.01, 0.05, waits=True, held_up={5: 2.0, STEPS: 2.0}), 0.06, 0.06),
    ],
    ids=["asynchronous", "slow launches", "launches that wait", "host held up", "host held up, waits"],
)
def test_every_step_has_its_own_time(
    device: Device, first: float, others: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`first`: seconds of a step that follows a pause."""
    rows = Rows()
    trained = run(device, rows, monkeypatch)
    expected = [first if step in (1, 6, 11) else others for step in range(1, STEPS + 1)]
    assert [TOKENS / row["tokens_per_second"] for row in rows] == pytest.approx(expected, rel=1e-4)
    assert [row["step"] for row in rows if "val_bpb" in row] == [5, 10]
    assert trained.tokens_per_second() == pytest.approx(STEPS * TOKENS / sum(expected), rel=1e-4)
    flops = flops_per_token(trained.config.model, 32)
    assert trained.flops_per_second() == pytest.approx(flops * STEPS * TOKENS / sum(expected), rel=1e-4)


def test_moments_of_a_cpu_are_a_stopwatch() -> None:
    before = time.perf_counter()
    begin = DeviceEvent(torch.device("cpu"))
    time.sleep(0.02)
    end = DeviceEvent(torch.device("cpu"))
    end.synchronize()
    assert 0.02 <= end.seconds_since(begin) <= time.perf_counter() - before


def test_flops_are_unknown_of_an_objective_that_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = Rows()
    trained = run(Device(0.01, 0.05, waits=False), rows, monkeypatch, reads_weights=True)
    assert trained.flops_per_second() is None and trained.tokens_per_second()
    assert [row["flops"] for row in rows] == [None] * STEPS
