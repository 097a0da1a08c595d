"""The cache of converted weights: how often it is hit, that it never returns an old weight, and its contents."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from deskside.config.recipes import RECIPES
from deskside.config.sections import PrecisionConfig
from deskside.model.transformer import Transformer
from deskside.precision.convert import QuantizedModel, convert
from deskside.precision.quantized_linear import QuantizedLinear
from tests.precision.small import backward, everywhere, fresh, make, plans_of, quantized_layers, worst

QUANTIZED = [name for name, recipe in RECIPES.items() if recipe.quantized]
RECIPES_WITH_COPIES = ["bf16", *QUANTIZED]


def held(applied: QuantizedModel) -> list[QuantizedLinear]:
    """Return the layers that hold a converted weight."""
    return [plan for plan in plans_of(applied) if plan.converted.cached is not None]


def weight_bytes(plan: QuantizedLinear) -> int:
    """Return a layer's bytes of converted weights, counting memory that two forms share once."""
    assert plan.converted.cached is not None
    own = {
        t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
        for p in plan.converted.cached[1:]
        for t in (p.values,)
    }
    own.pop(plan.linear.weight.untyped_storage().data_ptr(), None)
    return sum(own.values())


def run(
    model: Transformer, applied: QuantizedModel, step: int, passes: int
) -> tuple[float, dict[str, Tensor]]:
    applied.begin_step(step)
    made = backward(model, passes=passes)
    applied.end_step()
    return made


@pytest.mark.parametrize("name", RECIPES_WITH_COPIES)
def test_a_weight_is_converted_once_per_step(name: str) -> None:
    """Forward and backward of every micro-batch hit the cache, and the first use in a step misses."""
    model, passes, steps = fresh(), 2, 2
    applied = convert(model, everywhere(name), fused=True, native=False)
    weights = 4 * len(model.layers)
    for step in range(1, steps + 1):
        run(model, applied, step, passes)
        assert applied.shared.misses == weights * step
        assert applied.shared.hits == weights * step * (2 * passes - 1)
    assert len(held(applied)) == weights


@pytest.mark.parametrize("name", ["bf16", "fp8-delayed", "nvfp4"])
def test_without_the_cache_the_numbers_are_the_same(name: str) -> None:
    found = []
    for cache in (True, False):
        model = fresh(num_hidden_layers=2)
        applied = convert(
            model, everywhere(name), PrecisionConfig(weight_cache=cache), fused=True, native=False
        )
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        for step in (1, 2, 3):
            loss, gradients = run(model, applied, step, 2)
            optimizer.step()
        found.append((loss, gradients))
        assert (applied.shared.hits > 0) is cache and bool(held(applied)) is cache
    assert found[0][0] == found[1][0]
    assert worst(found[0][1], {n: t.double() for n, t in found[1][1].items()}) == 0


def by_data(weight: nn.Parameter) -> None:
    """Change the weight through `data`, which does not change its version, as our
    kernels and torch's fused AdamW do.
    """
    weight.data.add_(0.01)


def in_place(weight: nn.Parameter) -> None:
    with torch.no_grad():
        weight.mul_(1.1)


def by_foreach(weight: nn.Parameter) -> None:
    with torch.no_grad():
        torch._foreach_add_([weight], 0.01)


def copied(weight: nn.Parameter) -> None:
    with torch.no_grad():
        weight.copy_(weight + 0.01)


def through_memory(weight: nn.Parameter) -> None:
    """Change the weight through another library's view, as when a checkpoint is loaded in place."""
    weight.detach().numpy()[...] += 0.01


def by_optimizer(weight: nn.Parameter) -> None:
    weight.grad = torch.ones_like(weight)
    torch.optim.AdamW([weight], lr=1e-2, fused=True).step()


CHANGES: list[Callable[[nn.Parameter], None]] = [
    by_data,
    in_place,
    by_foreach,
    copied,
    through_memory,
    by_optimizer,
]


@pytest.mark.parametrize(
    ("name", "change"),
    [*(("fp8-tensorwise", change) for change in CHANGES), ("bf16", by_data), ("nvfp4", by_data)],
)
def test_a_changed_weight_is_seen_in_the_next_step(name: str, change: Callable[[nn.Parameter], None]) -> None:
    model = make(num_hidden_layers=2)
    applied = convert(model, everywhere(name), fused=True, native=False)
    run(model, applied, 1, 1)
    with torch.no_grad():
        change(model.layers[1].mlp.input.projections[0].weight)  # type: ignore[union-attr, index]
    found = run(model, applied, 2, 1)
    assert worst(found[1], {n: t.double() for n, t in uncached(model, name, 2)[1].items()}) == 0


def uncached(model: Transformer, name: str, step: int) -> tuple[float, dict[str, Tensor]]:
    """Run the same step with a recipe that has no cache."""
    options = PrecisionConfig(weight_cache=False)
    return run(model, convert(model, everywhere(name), options, fused=True, native=False), step, 1)


def test_a_version_is_enough_within_a_step() -> None:
    """The weight changes between two passes of one step, which autograd's version reveals."""
    model = make(num_hidden_layers=2)
    applied = convert(model, everywhere("fp8-tensorwise"), fused=True, native=False)
    applied.begin_step(1)
    before = backward(model)[0]
    in_place(model.layers[0].attn.input.projections[0].weight)  # type: ignore[union-attr, index, arg-type]
    misses = applied.shared.misses
    assert backward(model)[0] != before
    assert applied.shared.misses == misses + 1


@pytest.mark.parametrize(
    ("name", "per_weight"),
    [
        ("bf16", 2), ("fp8-delayed", 2), ("fp8-rowwise", 2),
        ("nvfp4", 2), ("nvfp4-4o6", 2), ("nvfp4-eden", 4), ("fp8-nvfp4", 3),
    ],
)  # fmt: skip
def test_bytes_that_are_held(name: str, per_weight: int) -> None:
    """BF16 once; FP8 in rows and columns; NVFP4 as BF16 numbers, once if tiles
    are square. The same as budget/formats.py.
    """
    from deskside.budget.format_costs import weight_copies

    model = fresh()
    applied = convert(model, everywhere(name), fused=True, native=False)
    run(model, applied, 1, 1)
    for plan in held(applied):
        assert weight_bytes(plan) == per_weight * plan.linear.weight.numel()
    assert weight_copies(name, frozenset()) == per_weight  # type: ignore[arg-type]


# Evaluation, and steps in BF16


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("name", ["fp8-delayed", "nvfp4-eden"])
def test_evaluation_leaves_no_copies_behind(name: str, fused: bool) -> None:
    model = fresh()
    applied = convert(model, everywhere(name), fused=fused, native=False)
    run(model, applied, 1, 1)
    weights = 4 * len(model.layers)
    assert len(held(applied)) == weights
    with applied.high_precision(), torch.no_grad():
        assert not held(applied)  # the recipe's own weights are outdated after the step
        for seed in (0, 1):
            model.loss(torch.full((2, 64), seed), torch.zeros(2, 64, dtype=torch.long))
        assert len(held(applied)) == (weights if fused else 0)
        assert all(plan.plain for plan in held(applied))
    assert not held(applied)
    run(model, applied, 2, 1)
    assert len(held(applied)) == weights and not any(plan.plain for plan in held(applied))


def test_a_late_switch_to_bf16_drops_what_is_quantised() -> None:
    model = fresh()
    applied = convert(model, everywhere("nvfp4"), fused=True, native=False)
    run(model, applied, 1, 1)
    applied.set_active(False)
    assert not held(applied)
    run(model, applied, 2, 1)
    assert held(applied) and all(plan.plain for plan in held(applied))


def test_blocks_kept_in_bf16_have_one_plan_for_both() -> None:
    model = fresh()
    recipe: Any = RECIPES["nvfp4"]  # keeps the first and the last of three
    applied = convert(model, recipe, fused=True, native=False)
    assert quantized_layers(applied) == 4
    run(model, applied, 1, 1)
    assert [plan.plain for plan in held(applied)].count(False) == 4 and len(held(applied)) == 12


def test_the_heads_weight_is_converted_once_per_step_too() -> None:
    model, passes = fresh(), 4
    applied = convert(model, everywhere("fp8-delayed"), PrecisionConfig(head="fp8"), fused=True, native=False)
    for step in (1, 2):
        run(model, applied, step, passes)
    weights = 4 * len(model.layers)
    assert applied.shared.misses == 2 * (weights + 1)
    assert applied.shared.hits == 2 * (weights * (2 * passes - 1) + passes - 1)
    applied.forget_weights()
    assert applied._head is not None and applied._head[1].converted.cached is None and not held(applied)
