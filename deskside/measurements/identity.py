"""Which machine this is, as far as a measurement depends on it. Imports no torch, and answers in a few milliseconds.

Where there is a GPU, and a torch that can use it, it is the one that torch calls cuda:0; NVML is asked about it.
Else it is the CPU.
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

# The packages whose code an optimizer step runs. Their digest stands for the commit: editing a document or a command
# throws no measurement away, and a checkout with edits is noticed.
STEP = ("kernels", "ops", "model", "precision", "optim")


@dataclass(frozen=True)
class Machine:
    """The machine that a measurement is valid for.

    card: the GPU's name by NVML, or the CPU's; device: cuda or cpu; memory_bytes: of the GPU, usable, or of the host;
    cores: that this process may use, 0 for a GPU; driver, cuda, triton: None where there is none; power_limit_watts:
    as set, None where the card does not tell; code: deskside's version and a digest of the code that a step runs;
    free_bytes: of the GPU's memory when it was asked, None for a CPU. It changes by the minute: no part of the key, and
    two machines that differ only in it are equal.
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

    def key(self) -> dict[str, Any]:
        """Return the machine's part of a row's key, JSON."""
        fields = ("cores", "driver", "power_limit_watts", "torch", "cuda", "triton", "code")
        memory = {"memory_gib": round(self.memory_bytes / 2**30)}
        return {"card": self.card, **memory, **{name: getattr(self, name) for name in fields}}


def this_machine() -> Machine:
    """Return the machine that this process would train on.

    Raises UsageError when several different GPUs are visible and it is not told which one torch will call the first,
    RunError when there is an NVIDIA driver that gives no answer.
    """
    torch, cuda = _torch()
    gpu = _gpu() if cuda else None
    triton = _version("triton")
    if gpu is not None:
        card, (memory, free), driver, watts = gpu
        return Machine(card, "cuda", memory, 0, driver, watts, torch, cuda, triton, code(), free)
    from deskside.utils.child_process import (  # imports what a GPU's identity does not need
        cpu_cores,
        cpu_name,
    )

    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Machine(cpu_name(), "cpu", memory, cpu_cores(), None, None, torch, None, triton, code())


@cache
def code() -> str:
    """deskside's version, and a digest of the code that a training step runs."""
    digest = hashlib.sha256()
    root = Path(deskside.__file__).parent
    files = [path for package in STEP for path in sorted((root / package).rglob("*.py"))]
    train = root / "train"
    for path in [*files, train / "loop" / "step.py", train / "prepare" / "setup.py"]:
        digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return f"{deskside.__version__}+{digest.hexdigest()[:12]}"


def _torch() -> tuple[str, str | None]:
    """torch's version and the CUDA version that it was built for, read from its files without importing it."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return "not installed", None
    text = Path(spec.origin).with_name("version.py").read_text("utf-8")
    version = re.search(r"^__version__\s*=\s*['\"]([^'\"]+)", text, re.MULTILINE)
    cuda = re.search(r"^cuda\b[^=\n]*=\s*['\"]([^'\"]+)", text, re.MULTILINE)
    return version[1] if version else metadata.version("torch"), cuda[1] if cuda else None


def _version(package: str) -> str | None:
    with contextlib.suppress(metadata.PackageNotFoundError):
        return metadata.version(package)
    return None


def _gpu() -> tuple[str, tuple[int, int], str, int | None] | None:
    """Return (name, usable and free bytes, driver, power limit in watts) of the GPU that torch will call cuda:0; None
    without one."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None and chosen.split(",")[0].strip() in ("", "-1"):
        return None
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        if Path("/proc/driver/nvidia/version").exists():
            raise RunError(
                f"there is an NVIDIA driver, but it gives no answer ({error}); see that nvidia-smi works"
            ) from None
        return None
    try:
        count = pynvml.nvmlDeviceGetCount()
        if count == 0:
            return None
        handle = _first(pynvml, chosen, count)
        driver, name = pynvml.nvmlSystemGetDriverVersion(), pynvml.nvmlDeviceGetName(handle)
        return name, _memory(pynvml, handle), driver, _power_limit(pynvml, handle)
    except pynvml.NVMLError as error:
        raise RunError(
            f"the GPU cannot be identified: NVML says {error}; see that nvidia-smi works"
        ) from None
    finally:
        pynvml.nvmlShutdown()


def _first(pynvml: Any, chosen: str | None, count: int) -> Any:
    """NVML's handle of cuda:0. NVML counts by PCI bus, CUDA the fastest first unless it is told otherwise."""
    first = chosen.split(",")[0].strip() if chosen else "0"
    if not first.isdecimal():
        return pynvml.nvmlDeviceGetHandleByUUID(first)
    handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(count)]
    names = list(dict.fromkeys(pynvml.nvmlDeviceGetName(handle) for handle in handles))
    if len(names) > 1 and os.environ.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID":
        raise UsageError(
            f"this machine has different GPUs ({', '.join(names)}); say which one to use with "
            f"CUDA_DEVICE_ORDER=PCI_BUS_ID CUDA_VISIBLE_DEVICES=N, N as nvidia-smi counts"
        )
    if int(first) >= count:
        raise UsageError(f"CUDA_VISIBLE_DEVICES={chosen}: there is no GPU {first}, only 0 to {count - 1}")
    return handles[int(first)]


def _memory(pynvml: Any, handle: Any) -> tuple[int, int]:
    """Return bytes that programs may use, the whole less what the driver keeps for itself; and those that are free
    now."""
    try:
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2)
        return int(memory.total - memory.reserved), int(memory.free)
    except pynvml.NVMLError:  # a driver older than this question
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
        return int(memory.total), int(memory.free)


def _power_limit(pynvml: Any, handle: Any) -> int | None:
    try:
        return round(pynvml.nvmlDeviceGetPowerManagementLimit(handle) / 1000)
    except pynvml.NVMLError:  # laptops and some boards do not tell
        return None
