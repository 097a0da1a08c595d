"""Muon's two element-wise kernels: the reference compared with the rule in float64, the kernels with the reference."""

import pytest
import torch

from deskside.kernels.muon import Direction, PointerTable, Update, apply, look_ahead
from tests.kernels.interpreter import interpreted
from tests.kernels.optimizer_cases import random, stack


@pytest.mark.parametrize("nesterov", [True, False])
def test_look_ahead_is_the_rule(nesterov: bool) -> None:
    g, m, out = random(1), random(2), stack(turned=True)
    expected = 0.9 * m.double() + 0.1 * g.double()
    direction = 0.1 * g.double() + 0.9 * expected if nesterov else expected
    look_ahead([Direction(g, m, out)], 0.9, nesterov, torch.tensor(0.0))
    torch.testing.assert_close(m.double(), expected, atol=1e-6, rtol=0)
    torch.testing.assert_close(out.double(), direction, atol=1e-6, rtol=0)


@pytest.mark.parametrize("cautious", [True, False])
def test_apply_is_the_rule(cautious: bool) -> None:
    p, u = random(1), random(2)
    factors = random(3)[..., :1].abs().expand_as(p)
    d, v, f = p.double(), u.double(), factors.double()
    decayed = (torch.sign(d) == torch.sign(v)) if cautious else torch.ones_like(d, dtype=torch.bool)
    expected = d - 0.02 * f * v - 0.003 * d * decayed
    apply([Update(p, u, factors)], 0.02, 0.003, cautious, torch.tensor(0.0))
    torch.testing.assert_close(p.double(), expected, atol=1e-6, rtol=0)


def test_kernels_equal_the_reference() -> None:
    pytest.importorskip("triton")
    found = interpreted("optimizers_interpreted", "muons")
    assert len(found) == 7
    for name, difference in found.items():
        # The interpreter truncates bfloat16 where hardware rounds. A skipped step leaves every bit.
        within = 0.0 if name.endswith("kept") else 0.02 if "bfloat16" in name else 1e-6
        assert difference <= within, name


def test_factors_that_vary_along_rows_and_columns_are_refused() -> None:
    """The kernel reads one vector of factors, so it would otherwise silently use wrong ones."""
    pytest.importorskip("triton")
    from deskside.kernels.muon_triton import apply as kernel

    p, u = random(1), random(2)
    with pytest.raises(ValueError, match="factors"):
        kernel([Update(p, u, random(3))], 0.02, 0.0, False, torch.tensor(0.0), 0, PointerTable())
