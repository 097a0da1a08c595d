"""Schedules are in range, rise, are continuous, and end where they should; stages; the rows of --dry-run."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deskside.config.duration import Duration
from deskside.config.schedule import ConstantConfig, CosineConfig, ScheduleConfig, Stage, WsdConfig
from deskside.optim.lr_schedule import describe, lr_factor, stage_at, warmup_share

share = st.floats(0, 1)
warmups = st.one_of(st.floats(0, 0.99), st.builds(Duration, st.integers(1, 3000), st.just("steps")))


@st.composite
def schedules(draw: st.DrawFn) -> ScheduleConfig:
    warmup, final = draw(warmups), draw(share)
    kind = draw(st.sampled_from(["wsd", "cosine", "constant"]))
    if kind == "constant":
        return ConstantConfig(warmup=warmup)
    if kind == "cosine":
        return CosineConfig(warmup=warmup, final_lr_fraction=final)
    room = 1.0 - warmup if isinstance(warmup, float) else 0.99
    decay = draw(st.floats(min(0.01, room), room))
    shape = draw(st.sampled_from(["linear", "1-sqrt", "cosine"]))
    power = draw(st.floats(0.5, 4)) if shape == "linear" else 1.0
    return WsdConfig(
        warmup=warmup, decay=decay, decay_shape=shape, decay_power=power, final_lr_fraction=final
    )


@given(schedules(), share, st.integers(1, 100_000))
def test_within_zero_and_one(config: ScheduleConfig, progress: float, steps: int) -> None:
    assert 0 <= lr_factor(config, progress, steps) <= 1


@given(schedules(), share, share, st.integers(1, 100_000))
def test_rises_before_the_warmup_ends_and_never_after(
    config: ScheduleConfig, a: float, b: float, steps: int
) -> None:
    a, b = min(a, b), max(a, b)
    warmup = warmup_share(config, steps)
    low, high = lr_factor(config, a, steps), lr_factor(config, b, steps)
    if b < warmup:
        assert low <= high
    if a >= warmup:
        assert low >= high - 1e-12


@given(schedules(), st.integers(1, 100_000))
def test_ends_at_the_final_fraction(config: ScheduleConfig, steps: int) -> None:
    expected = 1.0 if isinstance(config, ConstantConfig) else config.final_lr_fraction
    assert lr_factor(config, 1.0, steps) == pytest.approx(expected)
    assert lr_factor(config, 1.7, steps) == lr_factor(config, 1.0, steps)


@given(schedules(), st.floats(0, 1 - 1e-6), st.integers(1, 10_000))
def test_is_continuous(config: ScheduleConfig, progress: float, steps: int) -> None:
    step = 1e-9
    distance = abs(lr_factor(config, progress + step, steps) - lr_factor(config, progress, steps))
    # The steepest parts: a warm-up of a single step, and the square root at the start of a 1-sqrt decay or at the end
    # of one with power 0.5.
    steepest = step * steps + step * 1e4 + math.sqrt(step / 0.01)
    assert distance <= steepest


def test_known_values() -> None:
    wsd = WsdConfig(warmup=Duration(10, "steps"), decay=0.5, final_lr_fraction=0.0)
    assert lr_factor(wsd, 0.0, 100) == pytest.approx(1 / 11)
    assert lr_factor(wsd, 0.1, 100) == 1
    assert lr_factor(wsd, 0.5, 100) == 1
    assert lr_factor(wsd, 0.75, 100) == pytest.approx(0.5)
    root = WsdConfig(warmup=0, decay=0.5, decay_shape="1-sqrt", final_lr_fraction=0.0)
    assert lr_factor(root, 0.5 + 0.5 * 0.25, 100) == pytest.approx(0.5)
    half = WsdConfig(warmup=0, decay=0.5, decay_shape="cosine", final_lr_fraction=0.2)
    whole = CosineConfig(warmup=0, final_lr_fraction=0.2)
    assert lr_factor(half, 0.5 + 0.5 * 0.3, 100) == pytest.approx(lr_factor(whole, 0.3, 100))
    cube = WsdConfig(warmup=0, decay=0.5, decay_power=3, final_lr_fraction=0.0)
    assert lr_factor(cube, 0.75, 100) == pytest.approx(1 / 8)
    cosine = CosineConfig(warmup=0.0, final_lr_fraction=0.2)
    assert lr_factor(cosine, 0.5, 100) == pytest.approx(0.6)


def test_a_warmup_never_reaches_into_the_decay() -> None:
    assert warmup_share(WsdConfig(warmup=40, decay=0.6), 30) == pytest.approx(0.4)
    assert warmup_share(CosineConfig(warmup=40), 30) == 0.5


def test_a_warmup_in_the_unit_of_the_length() -> None:
    config = ConstantConfig(length="2h", warmup="3m")
    assert warmup_share(config, 77) == 3 / 120
    with pytest.raises(ValueError, match="cannot be compared"):
        warmup_share(ConstantConfig(warmup="3m"), 77)
    with pytest.raises(ValueError, match="NaN"):
        lr_factor(config, float("nan"), 100)


def test_stages_hand_over_at_until() -> None:
    stages = (
        Stage(until=0.25, sequence_length=512),
        Stage(until=1.0, sequence_length=2048, batch_tokens=4096),
    )
    config = ConstantConfig(stages=stages)
    assert stage_at(config, 0.0) is stage_at(config, 0.2499) is config.stages[0]
    assert stage_at(config, 0.25) is stage_at(config, 1.0) is config.stages[1]
    assert stage_at(ConstantConfig(), 0.5) is None


def test_describe_names_every_change_in_order() -> None:
    stages = (Stage(until=0.25, sequence_length=512), Stage(until=1.0, sequence_length=2048))
    config = WsdConfig(length=1000, warmup=0.02, decay=0.4, final_lr_fraction=0.1, stages=stages)
    rows = describe(config, 1000)
    assert [(r.what, r.step) for r in rows] == [
        ("start", 0), ("warm-up ends", 20), ("stage 2 starts", 250), ("linear decay starts", 600), ("end", 1000),
    ]  # fmt: skip
    assert [round(r.lr_factor, 3) for r in rows] == [round(1 / 21, 3), 1, 1, 1, 0.1]
    assert [r.stage.sequence_length for r in rows if r.stage] == [512, 512, 2048, 2048, 2048]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"warmup": 0.5, "decay": 0.6}, "together exceed the run"),
        ({"warmup": 1.5}, r"must be in \[0, 1\)"),
        ({"decay_shape": "1-sqrt", "decay_power": 2}, "decay_power"),
        ({"warmup": "1M tokens", "length": "1h"}, "cannot be compared"),
        ({"warmup": "2h", "length": "1h"}, "not shorter than the run"),
        ({"stages": [{"until": 0.5, "sequence_length": 8}]}, "last stage must have until = 1.0"),
        ({"stages": [{"until": 1.0, "sequence_length": 8}] * 2}, "must ascend"),
    ],
)
def test_impossible_schedules_are_refused(given: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        WsdConfig.model_validate(given)
