"""The depth series: models whose hidden size is 64 times their number of layers, written as dN or `--depth N`."""

import math
import re
from functools import cache
from typing import Any

from deskside.budget.shape import num_params
from deskside.config.model import ModelConfig
from deskside.utils.errors import UsageError
from deskside.utils.format import count

HEAD_DIM = 128
MAX_DEPTH = 128  # hidden size 8192, 104 billion parameters
WITHIN = 2.0  # a depth with more or fewer parameters by this factor is not about as large


def of_depth(number: int) -> dict[str, Any]:
    """Return the configuration layer of the depth-series model with `number` layers and hidden size 64 x `number`.

    As in nanochat (github.com/karpathy/nanochat), attention is multi-head with 128 channels per head. The block is
    Qwen3's, with an MLP of 8/3 x hidden size, rounded up to a multiple of 128. Raises UsageError unless `number` is
    even and at least 2.
    """
    hidden = 64 * number
    if number < 2 or hidden % HEAD_DIM:
        raise UsageError(
            f"depth {number}: must be even and at least 2, as the hidden size is 64 x depth and heads have 128 channels"
        )
    heads = hidden // HEAD_DIM
    return {
        "model": {
            "num_hidden_layers": number,
            "hidden_size": hidden,
            "head_dim": HEAD_DIM,
            "num_attention_heads": heads,
            "num_key_value_heads": heads,
            "intermediate_size": -(-8 * hidden // (3 * 128)) * 128,
        }
    }


@cache
def sizes() -> dict[int, int]:
    """Return the number of parameters of each depth, with the default vocabulary."""
    return {d: num_params(ModelConfig(**of_depth(d)["model"])) for d in range(2, MAX_DEPTH + 1, 2)}


def nearest_depth(params: float) -> int | None:
    """Return the depth with the nearest number of parameters, None if none is within a factor of `WITHIN`."""
    nearest = min(sizes(), key=lambda d: abs(math.log(sizes()[d] / params)))
    return nearest if 1 / WITHIN <= sizes()[nearest] / params <= WITHIN else None


def of_size(text: str) -> str | None:
    """Return the preset of a size such as 1.5B, as "d30 (1.45B)"; None if this is not a size with a unit."""
    written = re.fullmatch(r"(\d+(?:\.\d+)?)([mMbB])", text.strip())
    if written is None or not float(written[1]):
        return None
    depth = nearest_depth(float(written[1]) * {"m": 1e6, "b": 1e9}[written[2].lower()])
    return None if depth is None else f"d{depth} ({count(sizes()[depth])})"
