"""Queries of NVML, the management library of the driver. Any value may be None: containers and boards hide some."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import pynvml
import torch

BUSY_PERCENT = 5  # of the time; a process that merely holds memory, such as an idle notebook, uses less


@dataclass(frozen=True)
class NvmlDevice:
    """A GPU as NVML sees it."""

    handle: Any

    @classmethod
    def from_torch(cls, device: torch.device) -> NvmlDevice | None:
        """Return the GPU of a torch device, None without NVML. Matched by UUID: CUDA may order GPUs differently."""
        uuid = str(torch.cuda.get_device_properties(device).uuid)
        with contextlib.suppress(pynvml.NVMLError):
            pynvml.nvmlInit()
            name = uuid if uuid.startswith("GPU-") else f"GPU-{uuid}"
            return cls(pynvml.nvmlDeviceGetHandleByUUID(name))
        return None

    @classmethod
    def from_index(cls, index: int) -> NvmlDevice | None:
        """Return the GPU with this NVML index, None without NVML."""
        handle = query(pynvml.nvmlDeviceGetHandleByIndex, index)
        return None if handle is None else cls(handle)

    def uuid(self) -> str:
        return str(query(pynvml.nvmlDeviceGetUUID, self.handle))

    def memory(self) -> dict[str, int | None]:
        """Return total, free and used memory in bytes."""
        info = query(pynvml.nvmlDeviceGetMemoryInfo, self.handle)
        if info is None:
            return {"total_bytes": None, "free_bytes": None, "used_bytes": None}
        return {"total_bytes": int(info.total), "free_bytes": int(info.free), "used_bytes": int(info.used)}

    def processes(self) -> list[dict[str, Any]]:
        """Return the processes that use this GPU's memory (id, name, bytes), as far as the driver shows them."""
        by_pid: dict[int, dict[str, Any]] = {}
        for function in (
            pynvml.nvmlDeviceGetComputeRunningProcesses,
            pynvml.nvmlDeviceGetGraphicsRunningProcesses,
        ):
            for process in query(function, self.handle) or ():
                name = query(pynvml.nvmlSystemGetProcessName, process.pid)
                used = process.usedGpuMemory
                by_pid[process.pid] = {
                    "pid": process.pid,
                    "name": str(name) if name is not None else None,
                    "bytes": int(used) if used is not None else None,
                }
        return sorted(by_pid.values(), key=lambda p: -(p["bytes"] or 0))

    def other_busy_processes(self, since: float) -> int | None:
        """Return how many other processes have computed on this GPU since a time, None if the driver does not say.

        since: seconds since the epoch. A process counts if its kernels ran for at least `BUSY_PERCENT` of the driver's
        samples. In a container, whose process ids differ from the driver's, one of the busy ones is this process.
        """
        samples = query(pynvml.nvmlDeviceGetProcessUtilization, self.handle, round(1e6 * since))
        if samples is None:
            return None
        percents: dict[int, list[int]] = {}
        for sample in samples:
            percents.setdefault(sample.pid, []).append(sample.smUtil)
        busy = {pid for pid, values in percents.items() if fmean(values) >= BUSY_PERCENT}
        return len(busy - {os.getpid()}) if os.getpid() in percents else max(0, len(busy) - 1)

    def power(self) -> dict[str, float | None]:
        """Return the power limit (current, default, minimum and maximum) and the power drawn now, in watts."""
        span = query(pynvml.nvmlDeviceGetPowerManagementLimitConstraints, self.handle) or (None, None)
        return {
            "limit_watts": _watts(query(pynvml.nvmlDeviceGetEnforcedPowerLimit, self.handle)),
            "default_watts": _watts(query(pynvml.nvmlDeviceGetPowerManagementDefaultLimit, self.handle)),
            "lowest_watts": _watts(span[0]),
            "highest_watts": _watts(span[1]),
            "drawn_watts": self.drawn_watts(),
        }

    def drawn_watts(self) -> float | None:
        """Return the power drawn now, in watts."""
        return _watts(query(pynvml.nvmlDeviceGetPowerUsage, self.handle))

    def pcie(self) -> dict[str, int | None]:
        """Return PCIe generation and lanes: current and maximum."""
        return {
            "generation": query(pynvml.nvmlDeviceGetCurrPcieLinkGeneration, self.handle),
            "lanes": query(pynvml.nvmlDeviceGetCurrPcieLinkWidth, self.handle),
            "highest_generation": query(pynvml.nvmlDeviceGetMaxPcieLinkGeneration, self.handle),
            "highest_lanes": query(pynvml.nvmlDeviceGetMaxPcieLinkWidth, self.handle),
        }


def driver_facts() -> dict[str, Any]:
    """Return the driver version, the newest CUDA that it runs ("13.0"), the number of GPUs, and an error of NVML."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return {"driver": None, "driver_cuda": None, "cards": 0, "error": str(error)}
    number = query(pynvml.nvmlSystemGetCudaDriverVersion_v2)
    return {
        "driver": query(pynvml.nvmlSystemGetDriverVersion),
        "driver_cuda": None if number is None else f"{number // 1000}.{number % 1000 // 10}",
        "cards": query(pynvml.nvmlDeviceGetCount) or 0,
        "error": "",
    }


def query(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call an NVML function; return None if it fails, for example because the GPU does not support it."""
    with contextlib.suppress(pynvml.NVMLError):
        return function(*arguments)
    return None


def _watts(milliwatts: int | None) -> float | None:
    return None if milliwatts is None else milliwatts / 1000
