"""Inputs of the optimizer kernels, for the tests and for the process that runs Triton's interpreter."""

from dataclasses import replace

import torch
from torch import Tensor

from deskside.kernels import adamw_4bit
from deskside.kernels.adamw_state import (
    EXP_AVG,
    EXP_AVG_MAX,
    EXP_AVG_SQ,
    EXP_AVG_SQ_MAX,
    AdamWHyperparameters,
    num_blocks,
    zero_code,
)

RULE = AdamWHyperparameters(lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
CAUTIOUS = replace(RULE, weight_decay=2.0, cautious=True)
FOUR_BITS = "4bit"
FORMATS: list[torch.dtype | str] = [FOUR_BITS, torch.uint8, torch.bfloat16, torch.float32]
EXPERTS, ROWS, COLUMNS = 2, 70, 130  # no multiples of a tile


def zeros(n: int, dtype: torch.dtype | str) -> dict[str, Tensor]:
    """Return AdamW's initial states."""
    if isinstance(dtype, str):
        codes, blocks = adamw_4bit.num_bytes(n), adamw_4bit.num_blocks(n)
        return {
            EXP_AVG: torch.full((codes,), adamw_4bit.zero_byte(True), dtype=torch.uint8),
            EXP_AVG_SQ: torch.full((codes,), adamw_4bit.zero_byte(False), dtype=torch.uint8),
            EXP_AVG_MAX: torch.zeros(blocks),
            EXP_AVG_SQ_MAX: torch.zeros(blocks),
        }
    if dtype != torch.uint8:
        return {key: torch.zeros(n, dtype=dtype) for key in (EXP_AVG, EXP_AVG_SQ)}
    return {
        EXP_AVG: torch.full((n,), zero_code(True), dtype=dtype),
        EXP_AVG_SQ: torch.full((n,), zero_code(False), dtype=dtype),
        EXP_AVG_MAX: torch.zeros(num_blocks(n)),
        EXP_AVG_SQ_MAX: torch.zeros(num_blocks(n)),
    }


def gradient(n: int, seed: int, spread: float = 3.0) -> Tensor:
    """Return Gaussian values times ten to the power of up to -spread, shuffled, so
    that they are as uneven as real gradients.
    """
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.logspace(-spread, 0, n)[torch.randperm(n, generator=torch.Generator().manual_seed(99))]
    return torch.randn(n, generator=generator) * sizes


def random(seed: int, two: bool = False) -> Tensor:
    """Return one slice of Muon's weights per expert, or `two` of them stacked."""
    shape = (EXPERTS, 2 * ROWS if two else ROWS, COLUMNS)
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def stack(turned: bool) -> Tensor:
    """Return an empty stack, whose slices are stored as they are or transposed."""
    return torch.zeros(EXPERTS, COLUMNS, ROWS).mT if turned else torch.zeros(EXPERTS, ROWS, COLUMNS)
