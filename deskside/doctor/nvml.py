"""Queries of NVML, the driver's library. Any value may be unknown: containers and boards hide some."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pynvml
import torch


@dataclass(frozen=True)
class NvmlDevice:
    """A GPU as NVML sees it."""

    handle: Any

    @classmethod
    def of(cls, device: torch.device) -> NvmlDevice | None:
        """Return the GPU of a torch device, None without NVML. Matched by UUID: CUDA may order GPUs differently."""
        uuid = str(torch.cuda.get_device_properties(device).uuid)
        with contextlib.suppress(pynvml.NVMLError):
            pynvml.nvmlInit()
            name = uuid if uuid.startswith("GPU-") else f"GPU-{uuid}"
            return cls(pynvml.nvmlDeviceGetHandleByUUID(name))
        return None

    @classmethod
    def numbered(cls, index: int) -> NvmlDevice | None:
        """Return the GPU with this NVML index, None without NVML."""
        handle = ask(pynvml.nvmlDeviceGetHandleByIndex, index)
        return None if handle is None else cls(handle)

    def uuid(self) -> str:
        return str(ask(pynvml.nvmlDeviceGetUUID, self.handle))

    def memory(self) -> dict[str, int | None]:
        """Return total, free and used memory in bytes."""
        info = ask(pynvml.nvmlDeviceGetMemoryInfo, self.handle)
        if info is None:
            return {"total_bytes": None, "free_bytes": None, "used_bytes": None}
        return {"total_bytes": int(info.total), "free_bytes": int(info.free), "used_bytes": int(info.used)}

    def processes(self) -> list[dict[str, Any]]:
        """Return the processes that use memory (id, name, bytes), as far as the driver shows them."""
        found: dict[int, dict[str, Any]] = {}
        for question in (
            pynvml.nvmlDeviceGetComputeRunningProcesses,
            pynvml.nvmlDeviceGetGraphicsRunningProcesses,
        ):
            for process in ask(question, self.handle) or ():
                name = ask(pynvml.nvmlSystemGetProcessName, process.pid)
                used = process.usedGpuMemory
                found[process.pid] = {
                    "pid": process.pid,
                    "name": str(name) if name is not None else None,
                    "bytes": int(used) if used is not None else None,
                }
        return sorted(found.values(), key=lambda p: -(p["bytes"] or 0))

    def power(self) -> dict[str, float | None]:
        """Return the power limit in watts: current, default, minimum and maximum."""
        span = ask(pynvml.nvmlDeviceGetPowerManagementLimitConstraints, self.handle) or (None, None)
        return {
            "limit_watts": _watts(ask(pynvml.nvmlDeviceGetEnforcedPowerLimit, self.handle)),
            "default_watts": _watts(ask(pynvml.nvmlDeviceGetPowerManagementDefaultLimit, self.handle)),
            "lowest_watts": _watts(span[0]),
            "highest_watts": _watts(span[1]),
            "drawn_watts": _watts(ask(pynvml.nvmlDeviceGetPowerUsage, self.handle)),
        }

    def pcie(self) -> dict[str, int | None]:
        """Return PCIe generation and lanes: current and maximum."""
        return {
            "generation": ask(pynvml.nvmlDeviceGetCurrPcieLinkGeneration, self.handle),
            "lanes": ask(pynvml.nvmlDeviceGetCurrPcieLinkWidth, self.handle),
            "highest_generation": ask(pynvml.nvmlDeviceGetMaxPcieLinkGeneration, self.handle),
            "highest_lanes": ask(pynvml.nvmlDeviceGetMaxPcieLinkWidth, self.handle),
        }


def driver() -> dict[str, Any]:
    """Driver version, the newest CUDA that it runs ("13.0"), and how many cards it sees; error: why NVML is silent."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return {"driver": None, "driver_cuda": None, "cards": 0, "error": str(error)}
    number = ask(pynvml.nvmlSystemGetCudaDriverVersion_v2)
    return {
        "driver": ask(pynvml.nvmlSystemGetDriverVersion),
        "driver_cuda": None if number is None else f"{number // 1000}.{number % 1000 // 10}",
        "cards": ask(pynvml.nvmlDeviceGetCount) or 0,
        "error": "",
    }


def ask(question: Callable[..., Any], *arguments: Any) -> Any:
    """Call an NVML function; return None if this GPU or driver does not support it."""
    with contextlib.suppress(pynvml.NVMLError):
        return question(*arguments)
    return None


def _watts(milliwatts: int | None) -> float | None:
    return None if milliwatts is None else milliwatts / 1000
