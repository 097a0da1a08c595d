"""The FLOPs of Newton-Schulz, against torch's own counter on our Muon."""

import torch
from torch.utils.flop_counter import FlopCounterMode

from deskside.budget.operators.update import newton_schulz_flops
from deskside.config.model import ModelConfig
from deskside.kernels.newton_schulz import coefficients, orthogonalize
from tests.budget.operators.small_step import SMALL


def test_newton_schulz_is_what_torch_counts() -> None:
    """Covers all logical matrices of one layer, through Muon's own iteration."""
    shape = ModelConfig(**SMALL | {"num_hidden_layers": 1})
    matrices = [(256, 256), (128, 256), (128, 256), (256, 256), (704, 256), (704, 256), (704, 256)]
    with FlopCounterMode(display=False) as counter:
        for rows, columns in matrices:
            orthogonalize(torch.empty(1, max(rows, columns), min(rows, columns)), coefficients("quintic", 5))
    assert newton_schulz_flops(shape) == counter.get_total_flops()
