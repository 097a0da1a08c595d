import time

import pytest
import torch
from torch import Tensor

from deskside.kernels.matmul_peak import RUNS, measure_matmul_peak


def test_the_peak_is_the_median_run_after_a_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a fake clock, the first product takes long, and so does one of the counted ones."""
    taken = [100.0, 1.0, 2.0, 3.0, 2.0, 50.0]
    now, sizes = 0.0, []

    def product(left: Tensor, right: Tensor, *, out: Tensor) -> None:
        nonlocal now
        now += taken[len(sizes)]
        sizes.append((*left.shape, *right.shape, *out.shape))

    monkeypatch.setattr(torch, "mm", product)
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    assert measure_matmul_peak("cpu", torch.float32, size=64) == 2 * 64**3 / 2.0
    assert sizes == [(64,) * 6] * (1 + RUNS["cpu"])
