"""Linear layers of few tokens, in Triton's interpreter."""

import pytest
import torch

from deskside.kernels import narrow
from tests.kernels.interpreter import interpreted


def test_the_kernel_equals_float64() -> None:
    pytest.importorskip("triton")
    found: dict[str, float] = interpreted("narrow_interpreted", "main")
    assert len(found) == 40
    assert max(found.values()) < 1e-6, found


def test_the_cpu_is_not_covered() -> None:
    assert not narrow.covers(torch.ones(1, 4), torch.ones(2, 4))
