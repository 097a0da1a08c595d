"""Choose the device, dtype and KV-cache size for generation."""

import torch

from deskside.budget.shape import Shape
from deskside.config.sections import Device
from deskside.engine.graphs import TOKENS
from deskside.model.transformer import Transformer
from deskside.precision.selfcheck import check
from deskside.utils.console import say
from deskside.utils.errors import UsageError

# Maximum share of the free memory for the KV cache. The rest is for activations: without it, the first long prompt
# would run out of memory.
KV_CACHE_SHARE = 0.85
# Tokens of prompts in one step: as many as this share of the GPU's memory has room for, since a pass of more tokens
# uses a large GPU better, and never fewer than PREFILL_TOKENS.
PREFILL_SHARE = 1 / 64
PREFILL_TOKENS = 4096


def select_device(name: Device) -> torch.device:
    """Return the torch device; auto is cuda if available. Raises UsageError for cuda if torch finds no GPU."""
    if name == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device cuda: torch finds no GPU here; use --device cpu")
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


def select_dtype(device: torch.device) -> torch.dtype:
    """Return the dtype to generate in: bfloat16 on a GPU that passes the BF16 self-check, else float32."""
    if device.type == "cpu":
        return torch.float32
    result = check("bf16", device)
    if result.ok:
        return torch.bfloat16
    say(f"bf16 fails its self-check on this GPU ({result.reason}): using float32")
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


def cache_tokens(model: Transformer, wanted: int, minimum: int) -> int:
    """Return the KV-cache size in tokens: `wanted`, or fewer if the GPU has less free memory, at least `minimum`."""
    free = free_bytes(model.embed.weight.device)
    if free is None:
        return max(minimum, wanted)
    # Activations of the largest prefill pass, in the memory of CUDA graphs and outside of it.
    activations = 2 * prefill_bytes(model.config, model.activation_dtype.itemsize, prefill_tokens(model))
    room = min(KV_CACHE_SHARE * free, free - activations)
    return max(minimum, min(wanted, int(room / model.kv_bytes_per_token(model.activation_dtype))))


def prefill_bytes(shape: Shape, itemsize: int, tokens: int) -> int:
    """Return the bytes of the activations of a prefill pass, without logits.

    The largest sublayer counts: its two inputs, residual stream, norm and output, the embeddings, and the inner
    activations. itemsize: of the activations.
    """
    D, C = shape.hidden_size, shape.head_dim
    heads, kv_heads = shape.num_attention_heads, shape.num_key_value_heads
    factor = 3 if shape.gated_mlp else 2  # before and after the activation
    if shape.num_experts:
        inner = factor * shape.num_experts_per_tok * shape.moe_intermediate_size
        inner += factor * shape.shared_expert_intermediate_size + shape.num_experts_per_tok * D
    else:
        inner = factor * shape.intermediate_size
    inner = max(inner, (3 * heads + 2 * kv_heads) * C)  # queries twice, and the output
    rotation_and_places = 4 * C + 8 * 6  # float32 angles; positions, pages and tokens, int64
    return tokens * ((6 * D + inner) * itemsize + rotation_and_places)


def prefill_tokens(model: Transformer) -> int:
    """Return the maximum tokens of prompts in one step on the model's device."""
    device = model.embed.weight.device
    if device.type != "cuda":
        return PREFILL_TOKENS
    room = PREFILL_SHARE * torch.cuda.get_device_properties(device).total_memory
    each = prefill_bytes(model.config, model.activation_dtype.itemsize, 1)
    return max(PREFILL_TOKENS, *(tokens for tokens in TOKENS if tokens * each <= room))
