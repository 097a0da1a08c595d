"""Muon's two element-wise kernels: the reference against the rule in float64, the kernels against the reference."""

from typing import Any

import pytest
import torch
from torch import Tensor

from deskside.kernels.muon import apply, look_ahead
from tests.kernels.triton_without_gpu import assembly, interpreted

EXPERTS, ROWS, COLUMNS = 2, 70, 130  # no multiples of a tile


def random(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape or (EXPERTS, ROWS, COLUMNS), generator=torch.Generator().manual_seed(seed))


def place(turned: bool) -> Tensor:
    """Where a slice lies in a stack: as it is, or turned."""
    return torch.zeros(EXPERTS, COLUMNS, ROWS).mT if turned else torch.zeros(EXPERTS, ROWS, COLUMNS)


@pytest.mark.parametrize("nesterov", [True, False])
def test_look_ahead_is_the_rule(nesterov: bool) -> None:
    g, m, out = random(1), random(2), place(turned=True)
    expected = 0.9 * m.double() + 0.1 * g.double()
    direction = 0.1 * g.double() + 0.9 * expected if nesterov else expected
    look_ahead(g, m, out, 0.9, nesterov, torch.tensor(0.0), fused=False)
    torch.testing.assert_close(m.double(), expected, atol=1e-6, rtol=0)
    torch.testing.assert_close(out.double(), direction, atol=1e-6, rtol=0)


@pytest.mark.parametrize("cautious", [True, False])
def test_apply_is_the_rule(cautious: bool) -> None:
    p, u, factors = random(1), random(2), random(3, EXPERTS, ROWS, 1).abs().expand(EXPERTS, ROWS, COLUMNS)
    d, v, f = p.double(), u.double(), factors.double()
    decayed = (torch.sign(d) == torch.sign(v)) if cautious else torch.ones_like(d, dtype=torch.bool)
    expected = d - 0.02 * f * v - 0.003 * d * decayed
    apply(p, u, factors, 0.02, 0.003, cautious, torch.tensor(0.0), fused=False)
    torch.testing.assert_close(p.double(), expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize("skip", [0.0, 1.0])
@pytest.mark.parametrize("turned", [True, False])
@pytest.mark.parametrize("momentum_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_kernels_equal_the_reference(skip: float, turned: bool, momentum_dtype: torch.dtype) -> None:
    kernels = interpreted("deskside.kernels.muon_triton")
    results = []
    for fused in (False, True):
        g, m, x = random(1), random(2).to(momentum_dtype), place(turned)
        if skip:
            g.fill_(torch.nan)
        whole = random(5, EXPERTS, 2 * ROWS, COLUMNS)
        p = whole[:, ROWS:]  # a slice of a fused weight
        factors = random(6, EXPERTS, 1, COLUMNS).expand(EXPERTS, ROWS, COLUMNS)
        arguments: Any = (0.9, True, torch.tensor(skip))
        if fused:
            kernels.look_ahead(g, m, x, *arguments)
            kernels.apply(p, x, factors, 0.02, 0.003, True, torch.tensor(skip))
        else:
            look_ahead(g, m, x, *arguments, fused=False)
            apply(p, x, factors, 0.02, 0.003, True, torch.tensor(skip), fused=False)
        results.append((m, x, whole))
    # The interpreter cuts bfloat16 off where hardware rounds.
    within = 0.02 if momentum_dtype == torch.bfloat16 else 1e-6
    for expected, got in zip(*results, strict=True):
        assert bool(torch.isfinite(got).all())
        torch.testing.assert_close(got, expected, atol=within, rtol=0)
    if skip:
        assert torch.equal(results[1][0], random(2).to(momentum_dtype))
        assert torch.equal(results[1][2], random(5, EXPERTS, 2 * ROWS, COLUMNS))


@pytest.mark.parametrize("capability", [86, 89, 90, 100, 120])
def test_kernels_compile(capability: int) -> None:
    pytest.importorskip("triton")
    from deskside.kernels import muon_triton as kernels

    for kernel, constants, low in (
        (kernels._look_ahead, {"NESTEROV": True, "SIDE": 64}, {"out_ptr": "*bf16", "momentum": "fp32"}),
        (
            kernels._apply,
            {"CAUTIOUS": True, "SIDE": 64},
            {"u_ptr": "*bf16", "lr": "fp32", "weight_decay": "fp32"},
        ),
    ):
        names = kernel.arg_names[: -len(constants)]
        signature = {name: "*fp32" if name.endswith("_ptr") else "i32" for name in names} | low
        assert "bf16" in assembly(kernel, signature, constants, capability)
