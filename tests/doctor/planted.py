"""Checks that pass, refuse, hang or crash, run in child processes as the doctor runs its own."""

import os
import time
from typing import Any

import torch


def fine(number: int = 1) -> dict[str, Any]:
    return {"verdict": "works", "reason": "", "details": {"number": number, "pid": os.getpid()}}


def hang() -> dict[str, Any]:
    time.sleep(600)
    return fine()


def crash() -> dict[str, Any]:
    os.abort()


def refuse() -> dict[str, Any]:
    raise NotImplementedError("scaled products need compute capability 10.0\nand more")


def odd_error() -> dict[str, Any]:
    raise LookupError("an error that no library is expected to raise")


def poisoned() -> dict[str, Any]:
    """Raise the error that every later torch call raises after a kernel's illegal memory access."""
    raise LookupError("CUDA error: an illegal memory access was encountered")


def out_of_memory() -> dict[str, Any]:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


def poison_cuda() -> dict[str, Any]:
    """Read beyond the end of a tensor on a GPU, which makes CUDA unusable for the whole process."""
    values = torch.zeros(4, device="cuda")
    return {"verdict": "works", "reason": str(values[torch.tensor([10**6], device="cuda")].sum().item())}
