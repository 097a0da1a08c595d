"""The optimizer kernels in Triton's interpreter, compared with the torch reference."""

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from deskside.kernels import adamw_triton, muon, random_triton
from deskside.kernels.adamw import adamw_update
from deskside.kernels.adamw_state import BLOCK
from deskside.kernels.stochastic_rounding import add_rounded_, rounding_seed
from deskside.kernels.weights_24bit import joined, split
from deskside.kernels.weights_24bit_triton import load_weight, store_weight
from deskside.optim.row_factors import row_factors
from tests.kernels.optimizer_cases import (
    CAUTIOUS,
    COLUMNS,
    EXPERTS,
    FORMATS,
    FOUR_BITS,
    ROWS,
    RULE,
    gradient,
    random,
    zeros,
)


def largest(a: Tensor, b: Tensor) -> float:
    """Return the largest absolute difference, or infinity if one is not finite."""
    away = (a.float() - b.float()).abs()
    return float(away.max()) if bool(away.isfinite().all()) else float("inf")


def share(a: Tensor, b: Tensor) -> float:
    """Return the share of elements that differ."""
    return float((a != b).double().mean())


def muons() -> dict[str, float]:
    """Return the largest differences from the reference. "kept" is how much a skipped step changed."""
    found = {}
    for momentum_dtype in (torch.float32, torch.bfloat16):
        for skip in (0.0, 1.0):
            name = f"{momentum_dtype}, {'skipped' if skip else 'taken'}"
            expected = muon_step(momentum_dtype, skip, fused=False)
            got = muon_step(momentum_dtype, skip, fused=True)
            found[name] = max(largest(a, b) for a, b in zip(got, expected, strict=True))
            if skip:
                before = muon_step(momentum_dtype, skip, fused=None)
                pairs = list(zip(got, before, strict=True))
                found[f"{name}: kept"] = max(float((a != b).sum()) for a, b in pairs[:4])
    expected, got = muon_rows(fused=False), muon_rows(fused=True)
    found["row factors"] = max(largest(a, b) for a, b in zip(got, expected, strict=True))
    return found


def muon_rows(fused: bool) -> tuple[Tensor, ...]:
    """Return row sums and weights of an update with row factors. The second slice
    is transposed and has fewer experts.
    """
    p = [random(1), random(2)[:1].mT.contiguous()]
    x = random(3, two=True)[:, :ROWS], random(4)[:1].mT
    updates = [
        muon.Update(p[0], x[0], random(5)[:, :, :1].expand_as(p[0]), 1.5),
        muon.Update(p[1], x[1], random(6)[:1, :, :1].mT.expand_as(p[1])),
    ]
    tables = [muon.PointerTable() if fused else None for _ in range(2)]
    sums = muon.row_sums(updates, tables[0])
    # The factors are the reference's, so that only `apply` is compared. Sums are up to 1,000.
    factors = row_factors(muon.row_sums(updates), 0.1, 0.9, 0.5)
    own = [f[:, : u.p.shape[0], : u.p.shape[1]] for u, f in zip(updates, factors, strict=True)]
    updates = [replace(u, row_factors=f) for u, f in zip(updates, own, strict=True)]
    muon.apply(updates, 0.1, 0.003, True, torch.tensor(0.0), 0, tables[1])
    return sums / 1000, *p


def muon_step(momentum_dtype: torch.dtype, skip: float, fused: bool | None) -> tuple[Tensor, ...]:
    """Return momentum, weights, directions and their sums of squares. If `fused`
    is None, return those before the step.

    The stack has two slices: the lower half of a fused weight, and a transposed one with fewer experts.
    """
    g = [random(1), random(4)[:1].mT.contiguous()]
    m = [random(2).to(momentum_dtype), random(3)[:1].mT.contiguous().to(momentum_dtype)]
    whole = [random(5, two=True), random(6)[:1].mT.contiguous()]
    p = [whole[0][:, ROWS:], whole[1]]
    x = torch.zeros(EXPERTS + 1, ROWS, COLUMNS)
    places = [x[:EXPERTS], x[EXPERTS:].mT]
    factors = random(7)[:, :1, :ROWS].mT
    stop, clip = torch.tensor(skip), torch.tensor(0.5)
    if skip:
        g[0].fill_(torch.nan)
    if fused is not None:
        tables = [muon.PointerTable() if fused else None for _ in range(2)]
        directions = [muon.Direction(*tensors) for tensors in zip(g, m, places, strict=True)]
        squares = muon.look_ahead(directions, 0.9, True, stop, clip, tables[0])
        if squares is not None:  # rows of the experts that the second slice lacks are zero
            sums = torch.stack([place[0].square().sum() for place in places])
            assert torch.allclose(squares.view(2, EXPERTS)[:, 0], sums, rtol=1e-5)
            assert squares[-1] == 0
        expanded = [factors.expand_as(p[0]), factors[:1].mT.expand_as(p[1])]
        updates = [muon.Update(*tensors) for tensors in zip(p, places, expanded, (1.0, 1.5), strict=True)]
        muon.apply(updates, 0.02, 0.003, True, stop, 0, tables[1])
    return *m, *whole, x


def adamws() -> dict[str, dict[str, float]]:
    """Return, for each format of states: the largest difference of the weights; for each state the largest difference
    of codes and the share of codes that differ, or the relative error; and how many numbers a skipped step changed.
    """
    found = {}
    for dtype, rule in [(dtype, RULE) for dtype in FORMATS] + [(torch.float32, CAUTIOUS)]:
        n = 17 * BLOCK + 3
        p, state = gradient(n, 0, spread=0), zeros(n, dtype)
        ours, own = p.clone(), {key: tensor.clone() for key, tensor in state.items()}
        for step in range(1, 4):
            given = torch.tensor(float(step)), torch.tensor(0.0), rule
            factor = None if step == 1 else torch.tensor(0.3 * step)
            adamw_update(p, gradient(n, step, 6), state, *given, fused=False, factor=factor)
            adamw_triton.launch(ours, gradient(n, step, 6), own, *given, factor, 0, 0)
        row = {"weights": largest(ours, p)}
        for key, tensor in state.items():
            if tensor.dtype == torch.uint8:
                codes, own_codes = tensor.int(), own[key].int()
                if dtype == FOUR_BITS:
                    codes, own_codes = (torch.stack((t & 15, t >> 4)) for t in (codes, own_codes))
                away = (codes - own_codes).abs()
                row |= {f"{key}: codes": float(away.max()), f"{key}: share": float(away.float().mean())}
            else:
                row[f"{key}: error"] = float(
                    (own[key].double() - tensor.double()).norm() / tensor.double().norm()
                )
        before = {key: tensor.clone() for key, tensor in (own | {"p": ours}).items()}
        bad, stop = torch.full((n,), torch.nan), torch.tensor(1.0)
        adamw_triton.launch(ours, bad, own, torch.tensor(4.0), stop, rule, None, 0, 0)
        row["changed by a skipped step"] = sum(
            float((tensor != before[key]).sum()) for key, tensor in (own | {"p": ours}).items()
        )
        found["cautious" if rule.cautious else str(dtype)] = row
    return found


def rounded() -> dict[str, float]:
    """Return the share of bitwise differences from the reference, for weights and
    sums that are rounded to bfloat16.
    """
    seed, n = rounding_seed("a.weight", 7), 5 * BLOCK + 3
    found = {}
    total = gradient(n, 1).bfloat16()
    expected = total.clone()
    add_rounded_(expected, gradient(n, 2), seed)
    random_triton.add_rounded_(total, gradient(n, 2), seed)
    found["add"] = share(total, expected)
    for first in (0, 4096):
        p, state = gradient(n, 3).bfloat16(), zeros(n, torch.float32)
        ours, own = p.clone(), {key: tensor.clone() for key, tensor in state.items()}
        given = torch.tensor(1.0), torch.tensor(0.0), RULE
        g = gradient(n, 4).bfloat16()
        adamw_update(p, g, state, *given, fused=False, seed=seed, first=first)
        adamw_triton.launch(ours, g, own, *given, None, seed, first)
        found[f"adamw from {first}"] = share(ours, p)
    for cautious in (True, False):
        p, u, factors = (random(number).bfloat16() for number in (1, 2, 3))
        ours = p.clone()
        for weights, table in ((p, None), (ours, muon.PointerTable())):
            update = muon.Update(
                weights, u, factors[..., :1].float().expand_as(p), 1.0, rounding_seed("a", 0)
            )
            muon.apply([update], 0.02, 0.001, cautious, torch.tensor(0.0), 7, table)
        found[f"muon {cautious}"] = share(ours, p)
    return found


def in_24_bits() -> dict[str, float]:
    """Return the largest relative differences from the reference of weights in 24 bits, and how many numbers differ
    where no arithmetic precedes the rounding ("edges") or where the step is skipped.
    """
    found = {}
    seed, n = rounding_seed("a.weight", 7), 5 * BLOCK + 3
    # No subnormal numbers, which the interpreter rounds to 0.
    edges = [0.0, -0.0, float("inf"), float("-inf"), float("nan"), 3.4028235e38, -(2.0**-126), 2 - 2.0**-23]
    x = torch.cat([torch.tensor(edges), gradient(248, 3)])
    p, residual = torch.zeros(256).bfloat16(), torch.zeros(256, dtype=torch.int8)
    _store[(1,)](x, p, residual, seed)
    found["edges"] = _bits_away([p, residual], list(split(x, seed)))
    found["loaded edges"] = float((_loaded(p, residual)[5:] != joined(p, residual)[5:]).sum())
    for name, rule, first, skip in (
        ("adamw", RULE, 0, 0.0),
        ("adamw from 4096, cautious", CAUTIOUS, 4096, 0.0),
        ("adamw skipped", RULE, 0, 1.0),
    ):
        g, state = gradient(n, 4).bfloat16(), zeros(n, torch.float32)
        p, residual = split(gradient(n, 3), 1)
        results = []
        for fused in (False, True):
            own = [t.clone() for t in (p, residual, *state.values())]
            moments = dict(zip(state, own[2:], strict=True))
            step, stop = torch.tensor(1.0), torch.tensor(skip)
            if fused:
                adamw_triton.launch(own[0], g, moments, step, stop, rule, None, seed, first, own[1])
            else:
                adamw_update(own[0], g, moments, step, stop, rule, False, None, seed, first, own[1])
            results.append(own[:2])
        found[name] = _bits_away(*results, [p, residual]) if skip else _relative(*results)
    for name, cautious, by_row, skip in (
        ("muon", False, False, 0.0),
        ("muon, cautious", True, False, 0.0),
        ("muon, row factors", True, True, 0.0),
        ("muon skipped", False, False, 1.0),
    ):
        wholes = [split(random(number, two=True).flatten(), number) for number in (1, 2)]
        results = []
        for fused in (False, True):
            shape = random(1, two=True).shape
            own = [[t.clone().view(shape) for t in pair] for pair in wholes]
            updates = [
                muon.Update(
                    pair[0][:, ROWS:],
                    random(3 + i).bfloat16(),
                    random(5 + i)[..., :1].expand(EXPERTS, ROWS, COLUMNS),
                    1.5,
                    rounding_seed("a", i),
                    residual=pair[1][:, ROWS:],
                )
                for i, pair in enumerate(own)
            ]
            if by_row:
                sums = muon.row_sums(updates, muon.PointerTable() if fused else None)
                factors = row_factors(sums, 0.1, 0.9, 0.5)
                updates = [replace(u, row_factors=f) for u, f in zip(updates, factors, strict=True)]
            table = muon.PointerTable() if fused else None
            muon.apply(updates, 0.02, 0.001, cautious, torch.tensor(skip), 7, table)
            results.append([torch.cat([pair[i].flatten() for pair in own]) for i in (0, 1)])
        before = [torch.cat([pair[i] for pair in wholes]) for i in (0, 1)]
        found[name] = _bits_away(*results, before) if skip else _relative(*results)
    return found


@triton.jit
def _store(X, P, RESIDUAL, seed):  # type: ignore[no-untyped-def]
    offsets = tl.arange(0, 256)
    store_weight(P, RESIDUAL, tl.load(X + offsets), offsets, offsets < 256, offsets, seed)


@triton.jit
def _load(X, P, RESIDUAL):  # type: ignore[no-untyped-def]
    offsets = tl.arange(0, 256)
    tl.store(X + offsets, load_weight(P, RESIDUAL, offsets, offsets < 256))


def _loaded(p: Tensor, residual: Tensor) -> Tensor:
    x = torch.zeros(256)
    _load[(1,)](x, p, residual)
    return x


def _bits_away(a: list[Tensor], *others: list[Tensor]) -> float:
    """Return how many weights or residuals differ in their bits, where NaN equals NaN."""
    away = 0
    for b in others:
        same = (a[0].view(torch.int16) == b[0].view(torch.int16)) | (a[0].isnan() & b[0].isnan())
        away += int((~same).sum() + (a[1] != b[1]).sum())
    return float(away)


def _relative(a: list[Tensor], b: list[Tensor]) -> float:
    """Return the largest difference of 24-bit weights, relative to them."""
    x, y = (joined(pair[0], pair[1], torch.float64) for pair in (a, b))
    return float(((x - y).abs() / (y.abs() + 1e-3)).max())
