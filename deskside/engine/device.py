"""The device, number format and memory that a command generates with."""

from typing import Literal

import torch

from deskside.model.transformer import Transformer
from deskside.precision.selfcheck import check
from deskside.utils.console import say
from deskside.utils.errors import UsageError

Device = Literal["auto", "cpu", "cuda"]
# Share of the free memory that a KV cache takes at most. A cache that takes all of it leaves none for activations, so
# that the first long prompt would run out of memory.
SHARE = 0.85


def device_of(name: Device) -> torch.device:
    """Return a device; auto is cuda if there is one. Raises UsageError for cuda where torch finds no GPU."""
    if name == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device cuda: torch finds no GPU here; use --device cpu")
    return torch.device(name if name != "auto" else "cuda" if torch.cuda.is_available() else "cpu")


def dtype_of(device: torch.device) -> torch.dtype:
    """Return bfloat16 on a GPU that passes its self-check, else float32."""
    if device.type == "cpu":
        return torch.float32
    result = check("bf16", device)
    if result.ok:
        return torch.bfloat16
    say(f"bf16 fails its self-check here ({result.reason}): using float32")
    return torch.float32


def allowed_bytes(device: torch.device) -> int:
    """Return the bytes that this process may use on its GPU, including what torch has already reserved."""
    free, total = torch.cuda.mem_get_info(device)
    allowed = int(total * torch.cuda.get_per_process_memory_fraction(device))
    return min(free + torch.cuda.memory_reserved(device), allowed)


def free_bytes(device: torch.device) -> int | None:
    """Return the bytes that this process can still allocate on a GPU, including torch's cache; None on a CPU."""
    if device.type != "cuda":
        return None
    return allowed_bytes(device) - torch.cuda.memory_allocated(device)


def cache_tokens(model: Transformer, wanted: int, least: int) -> int:
    """Return `wanted` tokens of keys and values, or as many as fit the GPU, but at least `least`."""
    free = free_bytes(model.embed.weight.device)
    if free is None:
        return max(least, wanted)
    return max(least, min(wanted, int(SHARE * free / model.kv_bytes_per_token(model.activation_dtype))))
