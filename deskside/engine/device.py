"""Where and in what numbers a command of this package computes, and what it says while it does."""

import sys
from typing import Literal

import torch

from deskside.precision.selfcheck import check
from deskside.utils.errors import UsageError

Device = Literal["auto", "cpu", "cuda"]


def device_of(name: Device) -> torch.device:
    """auto: cuda where there is one. Raises UsageError where a GPU is asked for and torch finds none."""
    if name == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device cuda: torch finds no GPU here; use --device cpu")
    return torch.device(name if name != "auto" else "cuda" if torch.cuda.is_available() else "cpu")


def dtype_of(device: torch.device) -> torch.dtype:
    """bfloat16 on a GPU that computes it right, else float32."""
    if device.type == "cpu":
        return torch.float32
    result = check("bf16", device)
    if result.ok:
        return torch.bfloat16
    say(f"bf16 fails its self-check here ({result.reason}): using float32")
    return torch.float32


def say(line: str) -> None:
    """A line for the person, apart from results."""
    print(line, file=sys.stderr, flush=True)
