"""Facts about the machine and its software. Call `collect` in a child process: a broken driver may hang or crash it."""

import os
import shutil
import sysconfig
import tempfile
from contextlib import suppress
from importlib import util
from pathlib import Path
from typing import Any

import torch

from deskside.doctor import check_attention
from deskside.facts.gpus import find_device
from deskside.train import environment_record, nvml
from deskside.utils.errors import first_line
from deskside.utils.host_memory import available_bytes, limit_bytes
from deskside.utils.machine import package_version

GIB = 2**30
CXX = ("g++",)  # what torch.compile looks for on a CPU, unless the environment sets CXX
CC = ("gcc", "clang")  # what Triton looks for, unless the environment sets CC


def collect() -> dict[str, Any]:
    """Return the facts for `doctor.examine`: "device" ("cuda" or "cpu"), "gpus", software, memory and disk."""
    driver = nvml.driver_facts()
    memory = _memory_before_cuda(driver)
    cuda_error = _cuda_error()
    device = torch.device("cpu" if cuda_error else "cuda")
    facts = environment_record.describe(device, Path())
    facts.pop("gpu", None)  # describes one GPU; "gpus" below lists all
    return {
        **facts,
        **driver,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version() if device.type == "cuda" else None,
        "cudnn_package": _first_installed_version("nvidia-cudnn-cu13", "nvidia-cudnn-cu12"),
        "cuda_error": cuda_error,
        "gpus": [] if cuda_error else [_gpu(index, memory) for index in range(torch.cuda.device_count())],
        "visible_devices": os.environ.get("CUDA_VISIBLE_DEVICES"),
        "architectures": torch.cuda.get_arch_list(),  # that torch was built for
        "memory_available_gib": _gib(available_bytes()),
        "memory_limit_gib": _gib(limit_bytes()),
        "shm": _space("/dev/shm"),
        "temporary": _space(tempfile.gettempdir()),
        "triton": facts["packages"]["triton"] if util.find_spec("triton") else None,
        "c_compiler": _compiler("CC", CC),
        "cxx_compiler": _compiler("CXX", CXX),
        "python_headers": (Path(sysconfig.get_paths()["include"]) / "Python.h").exists(),
        "attention_backends": check_attention.list_backends(device.type),
    }


def _cuda_error() -> str:
    """Return torch's message about why it cannot use a GPU; empty if it can."""
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        return first_line(error)
    return ""


def _memory_before_cuda(driver: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return memory and processes of each GPU by UUID. Called before this process uses any memory itself."""
    gpus = {}
    for index in range(driver["cards"]):
        card = nvml.NvmlDevice.from_index(index)
        if card is not None:
            gpus[card.uuid()] = {**card.memory(), "processes": card.processes()}
    return gpus


def _gpu(index: int, before: dict[str, dict[str, Any]]) -> dict[str, Any]:
    device = torch.device("cuda", index)
    properties = torch.cuda.get_device_properties(device)
    uuid = str(properties.uuid)
    uuid = uuid if uuid.startswith("GPU-") else f"GPU-{uuid}"
    free, total = torch.cuda.mem_get_info(device)
    without_nvml: dict[str, Any] = {
        "total_bytes": total,
        "free_bytes": free,
        "used_bytes": None,
        "processes": [],
    }
    card = nvml.NvmlDevice.from_torch(device)
    sheet = find_device(properties.name, properties.total_memory)
    return {
        "index": index,
        "name": properties.name,
        "uuid": uuid,
        "compute_capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "usable_bytes": total,
        **(before.get(uuid) or without_nvml),
        "power": card.power() if card else {},
        "pcie": card.pcie() if card else {},
        "data_sheet": None
        if sheet is None
        else {
            "name": sheet.name,
            "bf16_flops": sheet.bf16_flops,
            "bandwidth": sheet.bandwidth,
            "watts": sheet.watts,
            "source": "published",
        },
    }


def _space(folder: str) -> dict[str, Any] | None:
    with suppress(OSError):
        usage = shutil.disk_usage(folder)
        return {"path": folder, "total_gib": _gib(usage.total), "free_gib": _gib(usage.free)}
    return None


def _compiler(variable: str, names: tuple[str, ...]) -> str | None:
    configured = os.environ.get(variable)
    if configured:
        names = (configured.split()[0],)
    paths = [shutil.which(name) for name in names]
    return next((path for path in paths if path), None)


def _first_installed_version(*names: str) -> str | None:
    return next((version for name in names if (version := package_version(name)) is not None), None)


def _gib(size: int | None) -> float | None:
    return None if size is None else round(size / GIB, 2)
