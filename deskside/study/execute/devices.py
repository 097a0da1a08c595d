"""The devices of a study: one trial at a time on each GPU, or on the CPU. Imports no torch, which would use a GPU."""

import os
from collections.abc import Collection
from dataclasses import dataclass, field

from deskside.measurements.identity import this_machine
from deskside.utils.child_process import cpu_cores
from deskside.utils.errors import UsageError

THREADS = "OMP_NUM_THREADS"


@dataclass(frozen=True)
class Device:
    """A device for one trial. environment: variables that make it the only one visible to the trial's process."""

    name: str
    environment: dict[str, str] = field(default_factory=dict)


def choose(asked: str | None, kinds: Collection[str]) -> list[Device]:
    """Return the devices of a study.

    asked: GPU numbers as torch counts them ("0,1"), or None for all that are visible. kinds: compute.device of the
    arms. CPU threads are divided among the GPUs unless the environment sets their number. Raises UsageError for an
    unknown GPU.
    """
    gpus = [] if set(kinds) == {"cpu"} else visible()
    if asked is not None:
        gpus = _picked(asked, gpus)
    if not gpus:
        return [Device("cpu")]
    threads = {}
    if len(gpus) > 1 and THREADS not in os.environ:
        threads = {THREADS: str(max(1, cpu_cores() // len(gpus)))}
    return [Device(f"cuda:{number}", {"CUDA_VISIBLE_DEVICES": entry, **threads}) for number, entry in gpus]


def visible() -> list[tuple[int, str]]:
    """Return (torch's number, its entry in CUDA_VISIBLE_DEVICES) of every GPU that torch would see."""
    if this_machine().device != "cuda":
        return []
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        entries = [entry.strip() for entry in chosen.split(",")]
        # CUDA ignores everything after the first invalid entry.
        entries = entries[: next((i for i, e in enumerate(entries) if e in ("", "-1")), len(entries))]
        return list(enumerate(entries))
    import pynvml

    pynvml.nvmlInit()
    try:
        return [(number, str(number)) for number in range(pynvml.nvmlDeviceGetCount())]
    finally:
        pynvml.nvmlShutdown()


def _picked(asked: str, gpus: list[tuple[int, str]]) -> list[tuple[int, str]]:
    names = [name.strip() for name in asked.split(",")]
    known = {str(number): (number, entry) for number, entry in gpus}
    for name in names:
        if name not in known:
            there = f"there is {', '.join(known)}" if known else "there is none that torch can use"
            raise UsageError(f"--devices {asked}: there is no GPU {name or 'without a number'}; {there}")
    if len(set(names)) < len(names):
        raise UsageError(
            f"--devices {asked}: a GPU is named twice; trials on one GPU would disturb each other"
        )
    return [known[name] for name in names]
