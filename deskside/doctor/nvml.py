"""What NVML, the driver's own library, says about a card. Anything may be unknown: containers and boards hide some."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pynvml
import torch


@dataclass(frozen=True)
class NvmlDevice:
    """One card as NVML knows it."""

    handle: Any

    @classmethod
    def of(cls, device: torch.device) -> NvmlDevice | None:
        """The card behind a torch device, None where NVML is hidden. By UUID, as CUDA may count cards otherwise."""
        uuid = str(torch.cuda.get_device_properties(device).uuid)
        with contextlib.suppress(pynvml.NVMLError):
            pynvml.nvmlInit()
            name = uuid if uuid.startswith("GPU-") else f"GPU-{uuid}"
            return cls(pynvml.nvmlDeviceGetHandleByUUID(name))
        return None

    @classmethod
    def numbered(cls, index: int) -> NvmlDevice | None:
        """The card that NVML counts as this one, None when it cannot be asked."""
        handle = ask(pynvml.nvmlDeviceGetHandleByIndex, index)
        return None if handle is None else cls(handle)

    def uuid(self) -> str:
        return str(ask(pynvml.nvmlDeviceGetUUID, self.handle))

    def memory(self) -> dict[str, int | None]:
        """Bytes: total, free, and used by whoever."""
        info = ask(pynvml.nvmlDeviceGetMemoryInfo, self.handle)
        if info is None:
            return {"total_bytes": None, "free_bytes": None, "used_bytes": None}
        return {"total_bytes": int(info.total), "free_bytes": int(info.free), "used_bytes": int(info.used)}

    def processes(self) -> list[dict[str, Any]]:
        """Who holds memory on the card: process id, name and bytes, where the driver shows it to us."""
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
        """Watts: the limit now, the default one, and the range that may be set."""
        span = ask(pynvml.nvmlDeviceGetPowerManagementLimitConstraints, self.handle) or (None, None)
        return {
            "limit_watts": _watts(ask(pynvml.nvmlDeviceGetEnforcedPowerLimit, self.handle)),
            "default_watts": _watts(ask(pynvml.nvmlDeviceGetPowerManagementDefaultLimit, self.handle)),
            "lowest_watts": _watts(span[0]),
            "highest_watts": _watts(span[1]),
            "drawn_watts": _watts(ask(pynvml.nvmlDeviceGetPowerUsage, self.handle)),
        }

    def pcie(self) -> dict[str, int | None]:
        """PCIe generation and lanes now, and the most that card and slot can do."""
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
    """An NVML answer, None where this card or driver has none."""
    with contextlib.suppress(pynvml.NVMLError):
        return question(*arguments)
    return None


def _watts(milliwatts: int | None) -> float | None:
    return None if milliwatts is None else milliwatts / 1000
