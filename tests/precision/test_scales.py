"""Delayed scales: the largest of the last 16 steps, saturation, non-finite values,
and exact restoration from a checkpoint.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from deskside.kernels import fused
from deskside.precision.scales import CURRENT_SCALING_STEPS, DelayedScales
from deskside.utils.errors import RunError
from tests.precision.small import backward, everywhere, fresh

E4, E5 = torch.float8_e4m3fn, torch.float8_e5m2


def scales(*dtypes: torch.dtype, history: int = 16) -> DelayedScales:
    made = DelayedScales(history)
    for number, dtype in enumerate(dtypes):
        assert made.add_slot(dtype) == number
    made.allocate(torch.device("cpu"))
    return made


def step(one: DelayedScales, *largest: float) -> None:
    """Run a step in which each slot casts a tensor with this largest magnitude."""
    for slot, value in enumerate(largest):
        fused.cast_fp8(torch.tensor([[value, -value / 3], [0.0, value / 2]]), one.cast(slot))
    one.end_step()


def expected(dtype: torch.dtype, largest: float) -> float:
    return float(torch.finfo(dtype).max) / largest


def test_a_scale_is_made_of_the_largest_in_the_history() -> None:
    """Every step is compared with a list of the last 16."""
    one = scales(E4, E5)
    generator = torch.Generator().manual_seed(0)
    seen: list[list[float]] = []
    for number in range(50):
        values = (torch.rand(2, generator=generator) * 10 ** (number % 7)).tolist()
        assert one.ready == (number >= CURRENT_SCALING_STEPS)
        step(one, *values)
        seen.append(values)
        for slot, dtype in enumerate((E4, E5)):
            wanted = expected(dtype, max(v[slot] for v in seen[-16:]))
            assert float(one.cast(slot).scale) == pytest.approx(wanted, rel=1e-6)
            assert float(one.inverse_of(slot)) == pytest.approx(1 / wanted, rel=1e-6)
            assert float(one.amax[slot]) == 0


def test_micro_batches_of_a_step_count_together() -> None:
    one = scales(E4)
    for value in (1.0, 5.0, 2.0):
        fused.cast_fp8(torch.full((4, 4), value), one.cast(0))
    one.end_step()
    assert float(one.scale[0]) == pytest.approx(448 / 5)


def test_a_value_beyond_the_history_saturates_and_is_in_the_next_scale() -> None:
    one = scales(E4)
    for _ in range(CURRENT_SCALING_STEPS):
        step(one, 2.0)
    cast = one.cast(0)
    made = fused.cast_fp8(torch.tensor([[8.0, -8.0], [1.0, 2.0]]), cast)
    back = made.rows.float() * one.inverse_of(0)
    assert back.tolist() == [[2.0, -2.0], [1.0, 2.0]]
    assert float(one.amax[0]) == 8.0
    assert float(one.zero_or_nan()) == 0  # it is finite
    one.end_step()
    assert float(cast.scale) == pytest.approx(448 / 8)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_is_trouble_for_one_step_and_no_longer(value: float) -> None:
    one = scales(E4, E5)
    step(one, 2.0, 2.0)
    x = torch.ones(4, 4)
    x[1, 2] = value
    fused.cast_fp8(x, one.cast(1))
    assert bool(one.zero_or_nan().isnan())
    one.end_step()
    assert float(one.zero_or_nan()) == 0
    assert bool(one.scale.isfinite().all()) and float(one.scale[1]) == pytest.approx(57344 / 2)


def test_zeros_and_the_smallest_values_leave_finite_scales() -> None:
    one = scales(E4, E5)
    step(one, 0.0, 1e-38)
    assert float(one.scale[0]) == 1
    assert bool(one.scale.isfinite().all() and one.inverse.isfinite().all())
    assert bool((one.scale * 0 == 0).all())


def test_a_dry_step_leaves_nothing() -> None:
    one = scales(E4)
    step(one, 2.0)
    before = {name: tensor.clone() for name, tensor in one.state_dict().items()}
    fused.cast_fp8(torch.full((4, 4), 1e3), one.cast(0))
    one.end_step(keep=False)
    assert same(one.state_dict(), before) and float(one.scale[0]) == pytest.approx(224)
    one.reset()
    assert one.steps == 0 and not one.ready and not one.history.any()


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("at", [0, 1, 3, 16, 23])
def test_a_loaded_history_goes_on_as_the_other_would_have(at: int) -> None:
    values = torch.rand(40, generator=torch.Generator().manual_seed(1)).tolist()
    whole, first = scales(E4), scales(E4)
    for value in values[:at]:
        step(whole, value)
        step(first, value)
    second = scales(E4)
    second.load_state_dict({name: tensor.clone() for name, tensor in first.state_dict().items()})
    for value in values[at:]:
        assert second.ready == whole.ready
        assert torch.equal(second.scale, whole.scale) and torch.equal(second.inverse, whole.inverse)
        step(whole, value)
        step(second, value)
    assert same(second.state_dict(), whole.state_dict())


def test_another_recipes_state_is_refused() -> None:
    one, other, none = scales(E4, E5), scales(E4), scales()
    assert none.state_dict() == {}
    none.load_state_dict({})
    for target, state in ((other, one.state_dict()), (one, {}), (none, one.state_dict())):
        with pytest.raises(RunError, match="another recipe or model"):
            target.load_state_dict(state)


def test_replicas_agree_on_the_largest() -> None:
    """Two tables of slots exchange values here, as `World.all_reduce_max` does between processes."""
    one, other = scales(E4, E5, E4), scales(E4, E5, E4)
    for table, values in ((one, (1.0, float("nan"), 3.0)), (other, (2.0, 1.0, 0.5))):
        for slot, value in enumerate(values):
            fused.cast_fp8(torch.tensor([[value, 0.0], [0.0, 0.0]]), table.cast(slot))
    handed: list[Tensor] = []
    one.all_reduce_amax(lambda amax: handed.append(amax.clone()) or amax)
    other.all_reduce_amax(lambda amax: torch.maximum(amax, handed[0]))
    assert other.amax[0] == 2 and other.amax[1].isinf() and other.amax[2] == 3
    assert bool(other.zero_or_nan().isnan())
    scales().all_reduce_amax(lambda amax: pytest.fail("nothing to agree on"))  # no slots, no communication


def test_a_model_in_delayed_scaling_goes_on_from_its_state() -> None:
    """Gradients of the steps after a checkpoint are bitwise those of the uninterrupted run."""
    from deskside.precision.convert import convert

    def steps(
        count: int, state: dict[str, Any] | None = None, first: int = 1
    ) -> tuple[list[Tensor], dict[str, Any]]:
        model = fresh()
        applied = convert(model, everywhere("fp8-delayed"), fused=True, native=False)
        if state is not None:
            applied.scales.load_state_dict(state)
        made = []
        for number in range(first, first + count):
            applied.begin_step(number)
            gradients = backward(model)[1]
            made.append(torch.cat([g.flatten() for g in gradients.values()]))
            applied.end_step()
        return made, {name: tensor.clone() for name, tensor in applied.scales.state_dict().items()}

    whole, _ = steps(6)
    start, state = steps(3)
    rest, _ = steps(3, state, first=4)
    for found, truth in zip((*start, *rest), whole, strict=True):
        assert torch.equal(found, truth)
    fresh_start, _ = steps(1, first=4)
    assert not torch.equal(fresh_start[0], whole[3])  # the state matters
