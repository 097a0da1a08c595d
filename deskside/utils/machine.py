"""Identity of the machine: the properties that a measurement depends on.

If torch can use a GPU, the properties are those of the GPU that torch calls cuda:0, as NVML reports them. Otherwise
they are those of the CPU. Torch itself is not imported, so this takes only a few milliseconds.
"""

import contextlib
import hashlib
import importlib.util
import os
import re
from dataclasses import dataclass, field
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import deskside
from deskside.utils.errors import RunError, UsageError

# Packages and files whose code runs in a training step, or checks it. A measurement's key contains a digest of them
# instead of the commit, so it stays valid when documentation or commands change, and becomes invalid when a step or a
# self-check changes, committed or not.
STEP_PACKAGES = ("kernels", "ops", "model", "precision", "optim")
STEP_FILES = (
    "config/recipes.py",
    "train/loop/step.py",
    "train/prepare/check_step.py",
    "train/prepare/setup.py",
)


@dataclass(frozen=True)
class Machine:
    """The machine that a measurement is valid for.

    Attributes:
        card: Name of the GPU in NVML, or of the CPU.
        device: "cuda" or "cpu".
        memory_bytes: Usable memory of the GPU, or memory of the host.
        cores: CPU cores that this process may use; 0 for a GPU.
        driver: Version of the GPU driver; None for a CPU.
        power_limit_watts: Current power limit; None if the card does not report one.
        torch, cuda, triton: Versions. cuda: the one of torch, None for a CPU; triton: None if not installed.
        code: deskside's version and a digest of the code of a training step and of its checks.
        free_bytes: Free memory of the GPU at the time of the query; None for a CPU. Not part of the key, and ignored
            in comparisons, because it changes constantly.
        gpus: How many GPUs this process may use; 0 for a CPU. Not part of the key either.
    """

    card: str
    device: str
    memory_bytes: int
    cores: int
    driver: str | None
    power_limit_watts: int | None
    torch: str
    cuda: str | None
    triton: str | None
    code: str
    free_bytes: int | None = field(default=None, compare=False)
    gpus: int = field(default=0, compare=False)

    def key(self) -> dict[str, Any]:
        """Return the part of a measurement's key that identifies the machine, as a JSON object."""
        fields = ("cores", "driver", "power_limit_watts", "torch", "cuda", "triton", "code")
        memory = {"memory_gib": round(self.memory_bytes / 2**30)}
        return {"card": self.card, **memory, **{name: getattr(self, name) for name in fields}}


def this_machine() -> Machine:
    """Return the machine that this process would train on, unless `compute.device` is cpu (`this_cpu`).

    Raises UsageError if the environment does not determine which GPU is cuda:0, or chooses one that does not exist, and
    RunError if the NVIDIA driver does not respond.
    """
    torch, cuda = _torch_versions()
    gpu = _first_gpu() if cuda else None
    if gpu is None:
        return this_cpu()
    card, (memory, free), driver, watts, count = gpu
    triton = package_version("triton")
    return Machine(card, "cuda", memory, 0, driver, watts, torch, cuda, triton, code_version(), free, count)


def this_cpu() -> Machine:
    """Return the CPU of this machine, whether or not it has a GPU."""
    from deskside.utils.child_process import cpu_cores, cpu_name  # only needed without a GPU

    memory, torch = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), _torch_versions()[0]
    triton = package_version("triton")
    return Machine(cpu_name(), "cpu", memory, cpu_cores(), None, None, torch, None, triton, code_version())


@cache
def code_version() -> str:
    """Return deskside's version and a digest of the code of a training step and of its checks, as `VERSION+DIGEST`."""
    digest = hashlib.sha256()
    root = Path(deskside.__file__).parent
    files = [path for package in STEP_PACKAGES for path in sorted((root / package).rglob("*.py"))]
    for path in [*files, *(root / name for name in STEP_FILES)]:
        digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return f"{deskside.__version__}+{digest.hexdigest()[:12]}"


def _torch_versions() -> tuple[str, str | None]:
    """Return the versions of torch and of its CUDA, read from torch/version.py because importing torch is slow."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return "not installed", None
    text = Path(spec.origin).with_name("version.py").read_text("utf-8")
    version = re.search(r"^__version__\s*=\s*['\"]([^'\"]+)", text, re.MULTILINE)
    cuda = re.search(r"^cuda\b[^=\n]*=\s*['\"]([^'\"]+)", text, re.MULTILINE)
    return version[1] if version else metadata.version("torch"), cuda[1] if cuda else None


def package_version(package: str) -> str | None:
    """Return the version of an installed package, or None."""
    with contextlib.suppress(metadata.PackageNotFoundError):
        return metadata.version(package)
    return None


def _first_gpu() -> tuple[str, tuple[int, int], str, int | None, int] | None:
    """Return (name, (usable bytes, free bytes), driver, power limit in watts) of cuda:0, and how many are visible.

    None if there are none.
    """
    visible_devices = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible_devices is not None and visible_devices.split(",")[0].strip() in ("", "-1"):
        return None
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        if Path("/proc/driver/nvidia/version").exists():
            raise RunError(
                f"the NVIDIA driver does not respond ({error}); check that nvidia-smi works"
            ) from None
        return None
    try:
        count = pynvml.nvmlDeviceGetCount()
        if count == 0:
            return None
        handle = _first_handle(pynvml, visible_devices, count)
        driver, name = pynvml.nvmlSystemGetDriverVersion(), pynvml.nvmlDeviceGetName(handle)
        visible = len(visible_devices.split(",")) if visible_devices else count
        return name, _usable_and_free_bytes(pynvml, handle), driver, _power_limit(pynvml, handle), visible
    except pynvml.NVMLError as error:
        raise RunError(
            f"the GPU cannot be identified: NVML reports {error}; check that nvidia-smi works"
        ) from None
    finally:
        pynvml.nvmlShutdown()


def _first_handle(pynvml: Any, visible_devices: str | None, count: int) -> Any:
    """Return NVML's handle of cuda:0. count: the number of GPUs in NVML.

    NVML orders GPUs by PCI bus; CUDA puts the fastest first unless CUDA_DEVICE_ORDER=PCI_BUS_ID. If all GPUs have the
    same name, the order does not matter.
    """
    first = visible_devices.split(",")[0].strip() if visible_devices else "0"
    if not first.isdecimal():
        return pynvml.nvmlDeviceGetHandleByUUID(first)
    handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(count)]
    names = list(dict.fromkeys(pynvml.nvmlDeviceGetName(handle) for handle in handles))
    if len(names) > 1 and os.environ.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID":
        raise UsageError(
            f"this machine has different GPUs ({', '.join(names)}); choose one with "
            f"CUDA_DEVICE_ORDER=PCI_BUS_ID CUDA_VISIBLE_DEVICES=N, where N is the index in nvidia-smi"
        )
    if int(first) >= count:
        raise UsageError(
            f"CUDA_VISIBLE_DEVICES={visible_devices}: there is no GPU {first}; use 0 to {count - 1}"
        )
    return handles[int(first)]


def _usable_and_free_bytes(pynvml: Any, handle: Any) -> tuple[int, int]:
    """Return (total memory without the part that the driver reserves, free memory)."""
    try:
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2)
        return int(memory.total - memory.reserved), int(memory.free)
    except pynvml.NVMLError:  # older drivers do not support version 2 and do not report what they reserve
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
        return int(memory.total), int(memory.free)


def _power_limit(pynvml: Any, handle: Any) -> int | None:
    try:
        return round(pynvml.nvmlDeviceGetPowerManagementLimit(handle) / 1000)
    except pynvml.NVMLError:  # laptops and some boards do not report a limit
        return None
