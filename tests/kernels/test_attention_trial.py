"""Timing in the trial of attention backends, on a fake device with a fake clock,
so that the machine's load has no effect.
"""

import importlib
import time
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from deskside.kernels.attention import BACKENDS, AttentionBackend, AttentionContext, FwdBwd, choose
from deskside.kernels.attention.context import register
from tests.kernels.test_attention import need

choosing = importlib.import_module("deskside.kernels.attention.choose")


class Device:
    """A device that runs work in the order of its launches, seen by one host. Times are in seconds."""

    def __init__(self) -> None:
        self.now = self.free_at = 0.0
        self.runs = 0

    def launch(self, host: float, work: float) -> None:
        """Launch work, which costs the host `host` seconds and then the device `work` seconds."""
        self.now += host
        self.free_at = max(self.free_at, self.now) + work

    def Event(self, enable_timing: bool) -> "Event":
        assert enable_timing
        return Event(self)

    def backend(self, host: float, work: float) -> AttentionBackend:
        """Return a backend with hand-written gradients only, whose forward and backward each cost this much."""

        def forward(*inputs: Any) -> tuple[Any, tuple[Any, ...]]:
            self.runs += 1
            self.launch(host, work)
            return None, ()

        def backward(*inputs: Any) -> tuple[Any, Any, Any]:
            self.launch(host, work)
            return None, None, None

        def function(*inputs: Any) -> Tensor:
            raise AssertionError("the default step calls the pair")

        return AttentionBackend(
            "made up", function, frozenset({"cuda"}), frozenset(), pair=FwdBwd(forward, backward)
        )


class Event:
    """The part of `torch.cuda.Event` that the trial uses."""

    def __init__(self, device: Device):
        self.device, self.seconds = device, -1.0

    def record(self) -> None:
        self.seconds = max(self.device.now, self.device.free_at)

    def synchronize(self) -> None:
        self.device.now = max(self.device.now, self.seconds)

    def elapsed_time(self, end: "Event") -> float:
        assert self.device.now >= end.seconds >= 0, "read before it was waited for"
        return 1e3 * (end.seconds - self.seconds)


def timed(
    device: Device, backend: AttentionBackend, monkeypatch: pytest.MonkeyPatch, best: float = 1.0
) -> float:
    monkeypatch.setattr(torch.cuda, "Event", device.Event)
    inputs: Any = [SimpleNamespace(device=torch.device("cuda"))] * 4
    seconds: float = choosing._time(backend, AttentionContext(), inputs, best)
    return seconds


@pytest.mark.parametrize("host", [0.1, 0.9])
def test_on_a_gpu_the_host_s_time_is_hidden_as_in_a_step(
    host: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = Device()
    assert timed(device, device.backend(host / 10, 0.1), monkeypatch) == pytest.approx(0.2)
    assert device.runs == choosing.TIMED_RUNS["cuda"]


def test_a_host_that_is_slower_than_the_device_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device()
    assert timed(device, device.backend(1.5, 1.0), monkeypatch) == pytest.approx(3.0)


@pytest.mark.parametrize(("best", "runs"), [(0.66, 3), (0.67, 10)])
def test_on_a_gpu_what_is_far_slower_is_not_timed_on(
    best: float, runs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = Device()
    assert timed(device, device.backend(0.05, 0.1), monkeypatch, best / 10) == pytest.approx(0.2)
    assert device.runs == runs


def test_a_slow_candidate_is_timed_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device()
    assert timed(device, device.backend(0.1, 0.3), monkeypatch) == pytest.approx(0.6)
    assert device.runs == 3 + int(choosing.CANDIDATE_SECONDS / 0.6)


@pytest.mark.parametrize(
    ("pair", "plain", "name"), [(1.01, 1.0, "pair"), (1.05, 1.0, "plain"), (1.0, 1.01, "pair")]
)
def test_of_two_that_are_level_the_one_with_a_pair_is_taken(pair: float, plain: float, name: str) -> None:
    reference = BACKENDS["reference"]
    made = FwdBwd(lambda *inputs: (inputs[0], ()), lambda *inputs: inputs[:3])
    register(replace(reference, name="pair", pair=made))
    register(replace(reference, name="plain", pair=None))
    try:
        assert choosing._fastest({"plain": plain, "pair": pair}) == name
    finally:
        del BACKENDS["pair"], BACKENDS["plain"]


def test_choose_does_not_go_on_timing_what_is_far_slower(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = {"quick": 0, "slow": 0}
    device = Device()

    def taking(name: str, seconds: float) -> Callable[..., Tensor]:
        def function(*inputs: Any) -> Tensor:
            calls[name] += 1
            device.now += seconds
            return BACKENDS["reference"].function(*inputs)

        return function

    for name, seconds in (("quick", 0.01), ("slow", 0.1)):
        register(replace(BACKENDS["reference"], name=name, function=taking(name, seconds)))
    monkeypatch.setattr(time, "perf_counter", lambda: device.now)
    try:
        choice = choose(need(), ["quick", "slow"])
    finally:
        for name in calls:
            del BACKENDS[name]
    assert choice.name == "quick" and choice.seconds == pytest.approx({"quick": 0.01, "slow": 0.1})
    assert calls == {"quick": 4, "slow": 3}  # one run is the check
