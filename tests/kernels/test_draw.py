"""The kernels that sample tokens: the same tokens and log-probabilities as in torch."""

import pytest

from tests.kernels.interpreter import interpreted


def test_kernels_equal_the_torch_form() -> None:
    pytest.importorskip("triton")
    found: dict[str, float] = interpreted("draw_interpreted", "draws")
    assert len(found) == 18
    for case, difference in found.items():
        assert difference <= (0 if case.startswith("tokens") else 1e-6), found
