"""The optimisers' kernels in Triton's interpreter beside the torch reference."""

from collections.abc import Callable

import torch
from torch import Tensor

from deskside.kernels import adamw_triton, muon, muon_triton, random_triton
from deskside.kernels.adamw import adamw_update
from deskside.kernels.adamw_state import BLOCK
from deskside.kernels.stochastic_rounding import add_rounded_, rounding_seed
from tests.kernels.optimizer_cases import FORMATS, FOUR_BITS, RULE, gradient, random, stack, zeros


def largest(a: Tensor, b: Tensor) -> float:
    """Of the differences; infinity where one is not finite."""
    away = (a.float() - b.float()).abs()
    return float(away.max()) if bool(away.isfinite().all()) else float("inf")


def share(a: Tensor, b: Tensor) -> float:
    """Of the elements that differ."""
    return float((a != b).double().mean())


def muons() -> dict[str, float]:
    """The largest differences from the reference; "kept" is how much a skipped step changed."""
    found = {}
    for momentum_dtype in (torch.float32, torch.bfloat16):
        for skip in (0.0, 1.0):
            for turned in (True, False):
                name = f"{momentum_dtype}, {'skipped' if skip else 'taken'}, {'turned' if turned else 'as it is'}"
                expected = muon_step(muon.look_ahead, muon.apply, momentum_dtype, skip, turned, fused=False)
                got = muon_step(muon_triton.look_ahead, muon_triton.apply, momentum_dtype, skip, turned)
                found[name] = max(largest(a, b) for a, b in zip(got, expected, strict=True))
                if skip:
                    before = random(2).to(momentum_dtype), random(5, two=True)
                    found[f"{name}: kept"] = max(
                        float((a != b).sum()) for a, b in zip((got[0], got[2]), before, strict=True)
                    )
    return found


def muon_step(
    look_ahead: Callable[..., None],
    apply: Callable[..., None],
    momentum_dtype: torch.dtype,
    skip: float,
    turned: bool,
    **options: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Momentum, direction, and weights of which the lower half was updated: a slice of a fused weight."""
    g, m, x, stop = random(1), random(2).to(momentum_dtype), stack(turned), torch.tensor(skip)
    if skip:
        g.fill_(torch.nan)
    whole = random(5, two=True)
    p = whole[:, g.shape[1] :]
    factors = random(6)[:, :1].expand_as(g)
    look_ahead(g, m, x, 0.9, True, stop, **options)
    apply(p, x, factors, 0.02, 0.003, True, stop, **options)
    return m, x, whole


def adamws() -> dict[str, dict[str, float]]:
    """For each format of states: largest difference of the weights; of each state the largest difference of codes and
    the share of codes that differ, or the relative error; how many numbers a skipped step changed."""
    found = {}
    for dtype in FORMATS:
        n = 17 * BLOCK + 3
        p, state = gradient(n, 0, spread=0), zeros(n, dtype)
        ours, own = p.clone(), {key: tensor.clone() for key, tensor in state.items()}
        for step in range(1, 4):
            given = torch.tensor(float(step)), torch.tensor(0.0), RULE
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
        adamw_triton.launch(ours, bad, own, torch.tensor(4.0), stop, RULE, None, 0, 0)
        row["changed by a skipped step"] = sum(
            float((tensor != before[key]).sum()) for key, tensor in (own | {"p": ours}).items()
        )
        found[str(dtype)] = row
    return found


def rounded() -> dict[str, float]:
    """The share that differs from the reference in any bit, of weights and sums that are rounded to bfloat16."""
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
        arguments = (u, factors.float(), 0.02, 0.001, cautious, torch.tensor(0.0))
        muon.apply(p, *arguments, fused=False, seed=seed)
        muon_triton.apply(ours, *arguments, seed)
        found[f"muon {cautious}"] = share(ours, p)
    return found
