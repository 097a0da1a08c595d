"""The devices of a study, which runs one trial at a time on each GPU, or on the CPU.

Imports no torch, because a CUDA context of the study's own process would take GPU memory from the trials.
"""

import itertools
import os
from collections.abc import Collection
from dataclasses import dataclass, field

from deskside.utils.child_process import cpu_cores
from deskside.utils.errors import UsageError
from deskside.utils.machine import this_machine

THREADS = "OMP_NUM_THREADS"


@dataclass(frozen=True)
class Device:
    """A device for one trial.

    Attributes:
        name: "cpu", or "cuda:N" with torch's number N in the study's process.
        environment: Additional variables of the trial's process, such as the one that makes other GPUs invisible.
    """

    name: str
    environment: dict[str, str] = field(default_factory=dict)


def choose(requested: str | None, kinds: Collection[str]) -> list[Device]:
    """Return the devices of a study. Raises UsageError for an unknown GPU.

    The CPU threads are divided among the GPUs, unless the environment sets OMP_NUM_THREADS.

    Args:
        requested: GPU numbers as torch counts them ("0,1"); None for all visible GPUs.
        kinds: `compute.device` of the arms. If all are "cpu", the study runs on the CPU.
    """
    gpus = [] if set(kinds) == {"cpu"} else visible()
    if requested is not None:
        gpus = _select(requested, gpus)
    if not gpus:
        return [Device("cpu")]
    threads = {}
    if len(gpus) > 1 and THREADS not in os.environ:
        threads = {THREADS: str(max(1, cpu_cores() // len(gpus)))}
    return [Device(f"cuda:{number}", {"CUDA_VISIBLE_DEVICES": entry, **threads}) for number, entry in gpus]


def visible() -> list[tuple[int, str]]:
    """Return (torch's number, the entry in CUDA_VISIBLE_DEVICES) of every GPU that torch would see."""
    if this_machine().device != "cuda":
        return []
    variable = os.environ.get("CUDA_VISIBLE_DEVICES")
    if variable is not None:
        entries = [entry.strip() for entry in variable.split(",")]
        # CUDA ignores everything after the first invalid entry.
        valid = itertools.takewhile(lambda entry: entry not in ("", "-1"), entries)
        return list(enumerate(valid))
    import pynvml

    pynvml.nvmlInit()
    try:
        return [(number, str(number)) for number in range(pynvml.nvmlDeviceGetCount())]
    finally:
        pynvml.nvmlShutdown()


def _select(requested: str, gpus: list[tuple[int, str]]) -> list[tuple[int, str]]:
    """Return the requested GPUs, in the order of the request."""
    numbers = [number.strip() for number in requested.split(",")]
    known = {str(number): (number, entry) for number, entry in gpus}
    for number in numbers:
        if number not in known:
            available = f"there is {', '.join(known)}" if known else "there is none that torch can use"
            raise UsageError(
                f"--devices {requested}: there is no GPU {number or 'without a number'}; {available}"
            )
    if len(set(numbers)) < len(numbers):
        raise UsageError(
            f"--devices {requested}: a GPU is named twice; name it once, because trials on one GPU would slow each "
            f"other down"
        )
    return [known[number] for number in numbers]
