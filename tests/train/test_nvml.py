"""Queries of NVML, with a fake driver: units, unknown values, and a driver that answers nothing at all."""

import os
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest
import torch

from deskside.train import environment_record, nvml
from deskside.train.environment_record import Sensors
from deskside.train.nvml import NvmlDevice

CARD, OWN = NvmlDevice("handle"), os.getpid()


def silent(*_: Any) -> Any:
    raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A driver that returns only the answers that a test has set."""
    for name in dir(pynvml):
        if name.startswith(("nvmlDevice", "nvmlSystem", "nvmlInit")):
            monkeypatch.setattr(pynvml, name, silent)

    def answer(**values: Any) -> None:
        for name, value in values.items():
            monkeypatch.setattr(pynvml, name, lambda *_, value=value: value)

    return answer


def test_units(answers: Any) -> None:
    answers(
        nvmlDeviceGetEnforcedPowerLimit=450_000,
        nvmlDeviceGetPowerManagementDefaultLimit=575_000,
        nvmlDeviceGetPowerManagementLimitConstraints=(400_000, 600_000),
        nvmlDeviceGetPowerUsage=31_250,
        nvmlDeviceGetCurrPcieLinkGeneration=4,
        nvmlDeviceGetCurrPcieLinkWidth=8,
        nvmlDeviceGetMaxPcieLinkGeneration=5,
        nvmlDeviceGetMaxPcieLinkWidth=16,
    )
    assert CARD.power() == {
        "limit_watts": 450.0,
        "default_watts": 575.0,
        "lowest_watts": 400.0,
        "highest_watts": 600.0,
        "drawn_watts": 31.25,
    }
    assert CARD.pcie() == {"generation": 4, "lanes": 8, "highest_generation": 5, "highest_lanes": 16}


def test_who_holds_memory(answers: Any) -> None:
    small = SimpleNamespace(pid=1, usedGpuMemory=5)
    large = SimpleNamespace(pid=2, usedGpuMemory=2**30)
    hidden = SimpleNamespace(pid=3, usedGpuMemory=None)
    answers(
        nvmlDeviceGetComputeRunningProcesses=[small, large, hidden],
        nvmlDeviceGetGraphicsRunningProcesses=[small],
        nvmlSystemGetProcessName="python",
    )
    assert [p["pid"] for p in CARD.processes()] == [2, 1, 3]
    assert CARD.processes()[0] == {"pid": 2, "name": "python", "bytes": 2**30}


def test_a_card_that_tells_nothing(answers: Any) -> None:
    assert set(CARD.power().values()) == {None} and set(CARD.pcie().values()) == {None}
    assert set(CARD.memory().values()) == {None} and CARD.processes() == []
    assert NvmlDevice.from_index(0) is None


def test_sensors_tell_what_the_card_tells(answers: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each value alone: a card without a power sensor still has a temperature, and a failed query is asked again."""
    monkeypatch.setattr(NvmlDevice, "from_torch", lambda device: CARD)
    sensors = Sensors(torch.device("cuda"), keep_seconds=0.0)
    assert sensors.read() == {"watts": None, "celsius": None, "throttled": None}
    answers(nvmlDeviceGetTemperature=61)
    assert sensors.read() == {"watts": None, "celsius": 61, "throttled": None}
    answers(
        nvmlDeviceGetPowerUsage=31_250,
        nvmlDeviceGetCurrentClocksThrottleReasons=pynvml.nvmlClocksThrottleReasonSwPowerCap,
    )
    assert sensors.read() == {"watts": 31.2, "celsius": 61, "throttled": True}
    answers(nvmlDeviceGetCurrentClocksThrottleReasons=pynvml.nvmlClocksThrottleReasonGpuIdle)
    assert sensors.read()["throttled"] is False


def test_a_reading_is_kept_for_some_time(answers: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Short steps do not ask the driver each time."""
    monkeypatch.setattr(NvmlDevice, "from_torch", lambda device: CARD)
    sensors = Sensors(torch.device("cuda"), keep_seconds=0.5)
    celsius = []
    for degrees, seconds in ((61, 100.0), (62, 100.25), (63, 100.5), (64, 100.75)):
        monkeypatch.setattr(environment_record.time, "monotonic", lambda seconds=seconds: seconds)
        answers(nvmlDeviceGetTemperature=degrees)
        celsius.append(sensors.read()["celsius"])
    assert celsius == [61, 61, 63, 63]


def test_driver(answers: Any) -> None:
    assert nvml.driver_facts()["driver"] is None and nvml.driver_facts()["error"]
    answers(
        nvmlInit=None,
        nvmlSystemGetCudaDriverVersion_v2=12040,
        nvmlSystemGetDriverVersion="550.54",
        nvmlDeviceGetCount=2,
    )
    assert nvml.driver_facts() == {"driver": "550.54", "driver_cuda": "12.4", "cards": 2, "error": ""}


@pytest.mark.parametrize(
    "samples, others",
    [
        ([(OWN, 90)], 0),
        ([(OWN, 90), (7, 60), (8, 4)], 1),  # a process that uses 4 % of the time holds memory, mostly
        ([(OWN, 2), (7, 60)], 1),  # a run whose host is slow is not among the busy ones
        ([(7, 0), (7, 60), (OWN, 90)], 1),  # the mean of the samples
        ([(7, 90), (8, 60)], 1),  # a container: this process has another id there
        ([(7, 90)], 0),
        ([], 0),
    ],
)
def test_other_busy_processes(answers: Any, samples: list[tuple[int, int]], others: int) -> None:
    answers(
        nvmlDeviceGetProcessUtilization=[SimpleNamespace(pid=pid, smUtil=percent) for pid, percent in samples]
    )
    assert CARD.other_busy_processes(since=1.0) == others


def test_a_driver_that_does_not_say_who_is_busy(answers: Any) -> None:
    assert CARD.other_busy_processes(since=1.0) is None
