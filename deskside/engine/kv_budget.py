"""Size of the key-value cache beside a model that is already on the GPU.

A cache that takes all free memory leaves none for activations, so the first long prompt would run out of memory.
"""

import torch

from deskside.model.transformer import Transformer

SHARE = 0.85  # of the free memory that a cache takes at most; the rest is for workspace and fragmentation


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
    """`wanted` tokens of keys and values, or as many as a card has room for, but `least` at any rate."""
    free = free_bytes(model.embed.weight.device)
    if free is None:
        return max(least, wanted)
    return max(least, min(wanted, int(SHARE * free / model.kv_bytes_per_token(model.activation_dtype))))
