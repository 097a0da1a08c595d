"""Operands, tensors and shapes that the tests of the NVFP4 kernels share, in the interpreter and on a card."""

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
LAYOUTS = ("nt", "nn", "tn")
# (L, R, S): even; ragged on every side (rows are divisible by 16 where TMA needs it); a long sum, taken in parts.
PRODUCTS = ((64, 128, 64), (112, 80, 48), (32, 64, 1040))


def data(kind: str, shape: tuple[int, int], seed: int = 0) -> Tensor:
    """float32 on the CPU."""
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
    """Operands as the layout has them in memory."""
    left = left_LS.T.contiguous() if layout == "tn" else left_LS
    return left, right_RS if layout == "nt" else right_RS.T.contiguous()
