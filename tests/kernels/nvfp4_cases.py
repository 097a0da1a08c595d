"""Operands, tensors, shapes and random numbers that the tests of the NVFP4 kernels share."""

import torch
from torch import Tensor

from deskside.config.recipes import Operand

OPERANDS = {
    "plain": Operand("nvfp4", "1x16"),
    "16x16": Operand("nvfp4", "16x16"),
    "scale up": Operand("nvfp4", "1x16", scale_up=True),
    "4/6": Operand("nvfp4", "1x16", four_over_six=True),
    "4/6 16x16": Operand("nvfp4", "16x16", four_over_six=True),
    "stochastic": Operand("nvfp4", "1x16", rounding="stochastic"),
    "stochastic, scale up": Operand("nvfp4", "1x16", rounding="stochastic", scale_up=True),
    "Hadamard 16": Operand("nvfp4", "1x16", hadamard=16),
    "Hadamard 16, stochastic": Operand("nvfp4", "1x16", hadamard=16, rounding="stochastic"),
    "Hadamard 128": Operand("nvfp4", "1x16", hadamard=128, fresh_signs=True),
    "eden": Operand("nvfp4", "1x16", hadamard=128, fresh_signs=True, rounding="eden"),
}
WORD = 0xFFFFFFFF
LAYOUTS = ("nt", "nn", "tn")
# (L, R, S): even; uneven on every side (rows are divisible by 16 where TMA needs it); a long sum in several parts.
PRODUCTS = ((64, 128, 64), (112, 80, 48), (32, 64, 1040))


def data(kind: str, shape: tuple[int, int], seed: int = 0) -> Tensor:
    """Return float32 data of this kind on the CPU."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator)
    if kind == "outliers":
        x[:, 5] *= 300
    elif kind == "grid":  # many ties
        x = torch.randint(-6, 7, shape, generator=generator).float()
    elif kind == "lognormal":
        x *= torch.exp(4 * torch.randn(shape, generator=generator))
    elif kind == "tiny":
        x *= 1e-38
    elif kind == "zeros":
        x *= 0
    elif kind == "constant":
        x = torch.full(shape, 0.3)
    else:
        assert kind == "gauss", kind
    return x


def oriented(left_LS: Tensor, right_RS: Tensor, layout: str) -> tuple[Tensor, Tensor]:
    """Return the operands in the memory layout of this product."""
    left = left_LS.T.contiguous() if layout == "tn" else left_LS
    return left, right_RS if layout == "nt" else right_RS.T.contiguous()


def uniform(shape: tuple[int, int], seed: int) -> Tensor:
    """Return the kernels' random numbers, computed in torch, to compare stochastic rounding value by value.

    They are what kernels/nvfp4/rounding.py gives to each element of a contiguous matrix, float32 in [0, 1).
    """
    low, high = seed & WORD, (seed >> 32) & WORD
    between = (high + int(_mixed(torch.tensor(low ^ 0x9E3779B9), high))) & WORD
    h = _mixed(torch.arange(shape[0] * shape[1], dtype=torch.int64) ^ low, between)
    return ((h >> 9).double() / 2**23).float().view(shape)


def _mixed(h: Tensor, between: int) -> Tensor:
    h = h ^ (h >> 16)
    h = _times(h, 0x7FEB352D)
    h = ((h ^ (h >> 15)) + between) & WORD
    h = _times(h, 0x846CA68B)
    return h ^ (h >> 16)


def _times(h: Tensor, factor: int) -> Tensor:
    """Return the low 32 bits of a product, computed in two parts that fit into 64 bits."""
    return (h * (factor & 0xFFFF) + ((h * (factor >> 16) & 0xFFFF) << 16)) & WORD
