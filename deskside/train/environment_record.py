"""The machine and software of a run, and the power, temperature and memory of its GPU."""

import math
import os
import platform
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import pynvml
import torch

import deskside
from deskside.engine.device import allowed_bytes
from deskside.train.nvml import NvmlDevice, driver_facts, query
from deskside.utils.child_process import cpu_cores, cpu_name
from deskside.utils.machine import package_version

PACKAGES = ("triton", "transformers", "tokenizers", "numpy", "safetensors")


def describe(device: torch.device, folder: Path) -> dict[str, Any]:
    """Return facts about this machine and its software. folder: any folder on the disk whose free space is reported."""
    facts: dict[str, Any] = {
        "deskside": deskside.__version__,
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "platform": platform.platform(),
        "cpu": cpu_name(),
        "cpu_cores": cpu_cores(),
        "torch_threads": torch.get_num_threads(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "disk_free_gib": round(shutil.disk_usage(folder).free / 2**30, 1),
        "device": device.type,
        "packages": {name: package_version(name) for name in PACKAGES},
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        facts["gpu"] = {
            "name": properties.name,
            "count": torch.cuda.device_count(),
            "memory_gib": round(properties.total_memory / 2**30, 1),
            "compute_capability": f"{properties.major}.{properties.minor}",
            "multiprocessors": properties.multi_processor_count,
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
            **_driver_facts(device),
        }
    return facts


SLOWDOWN_REASONS = (  # reasons for low clocks that mean heat or a power limit, not an idle GPU
    pynvml.nvmlClocksThrottleReasonSwPowerCap
    | pynvml.nvmlClocksThrottleReasonHwSlowdown
    | pynvml.nvmlClocksThrottleReasonSwThermalSlowdown
    | pynvml.nvmlClocksThrottleReasonHwThermalSlowdown
    | pynvml.nvmlClocksThrottleReasonHwPowerBrakeSlowdown
)


# Time between queries of the sensors. Steps can be shorter, and all processes of a machine share the driver's locks.
SENSOR_SECONDS = 0.2


class Sensors:
    """Power, temperature and throttling of one GPU, read from NVML. None on a CPU, and what the GPU does not tell.

    keep_seconds: time for which a reading is returned again instead of asking the driver.
    """

    def __init__(self, device: torch.device, keep_seconds: float = SENSOR_SECONDS):
        self._card = NvmlDevice.from_torch(device) if device.type == "cuda" else None
        self._keep_seconds = keep_seconds
        self._reading: dict[str, Any] = {}
        self._read_at = -math.inf

    def read(self) -> dict[str, Any]:
        """Return {"watts", "celsius", "throttled"}. Throttled: slowed down by heat or a power limit."""
        now = time.monotonic()
        if now - self._read_at >= self._keep_seconds:
            self._reading, self._read_at = self._query(), now
        return dict(self._reading)

    def _query(self) -> dict[str, Any]:
        if self._card is None:
            return {"watts": None, "celsius": None, "throttled": None}
        handle = self._card.handle
        watts = self._card.drawn_watts()
        reasons = query(pynvml.nvmlDeviceGetCurrentClocksThrottleReasons, handle)
        return {
            "watts": None if watts is None else round(watts, 1),
            "celsius": query(pynvml.nvmlDeviceGetTemperature, handle, pynvml.NVML_TEMPERATURE_GPU),
            "throttled": None if reasons is None else bool(reasons & SLOWDOWN_REASONS),
        }


class Meter:
    """Adds utilization (MFU), memory and the GPU's sensors to the metrics of a step.

    MFU is the model's FLOP/s over all processes, divided by the number of processes times `peak_flops`: the FLOP/s of
    large matmuls, measured on this device.
    """

    def __init__(self, device: torch.device, processes: int, peak_flops: float):
        self.device, self.peak_flops = device, peak_flops
        self._processes = processes
        self._sensors = Sensors(device)

    def mfu(self, flops_per_second: float) -> float:
        return flops_per_second / (self.peak_flops * self._processes)

    def complete(self, row: dict[str, Any], flops_per_second: float | None) -> dict[str, Any]:
        row["mfu"] = self.mfu(flops_per_second) if flops_per_second is not None else None
        row["memory_gib"] = peak_memory_gib(self.device)
        return row | self._sensors.read()


def _driver_facts(device: torch.device) -> dict[str, Any]:
    card = NvmlDevice.from_torch(device)
    driver = driver_facts()
    return {
        "driver": driver["driver"] or f"unknown ({driver['error']})",
        "power_limit_watts": card.power()["limit_watts"] if card is not None else None,
    }


def reset_peak_memory(device: torch.device) -> None:
    """Reset the peak memory of the GPU, for example after attempts that did not fit. Does nothing on a CPU."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def allowed_memory_gib(device: torch.device) -> float:
    """Return the memory that this process may use on its GPU, including what torch has already reserved."""
    return allowed_bytes(device) / 2**30


def peak_memory_gib(device: torch.device) -> float:
    """Return the peak memory so far: allocated on the GPU, or the resident set of this process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # ru_maxrss is in KiB on Linux


def peak_reserved_gib(device: torch.device) -> float | None:
    """Return the peak memory that torch's allocator has reserved on the GPU, used or not; None on a CPU."""
    return torch.cuda.max_memory_reserved(device) / 2**30 if device.type == "cuda" else None
