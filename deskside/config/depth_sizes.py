"""The model of the depth series with the nearest number of parameters."""

import math
import re
from functools import cache

from deskside.budget.shape import num_params
from deskside.config import presets
from deskside.config.model import ModelConfig
from deskside.utils.format import count

MAX_DEPTH = 128  # of the depth series: hidden size 8192, 104 billion parameters
WITHIN = 2.0  # a depth with more or fewer parameters by this factor is not about as large


@cache
def sizes() -> dict[int, int]:
    """Return the number of parameters of each depth, with the default vocabulary."""
    return {d: num_params(ModelConfig(**presets.depth(d)["model"])) for d in range(2, MAX_DEPTH + 1, 2)}


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
