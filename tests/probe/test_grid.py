"""The grid: corners first, no point twice, specs that training accepts, and the order of memory needs."""

import math
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deskside.budget.shape import flops_per_token, matmul_params, num_params
from deskside.config import merge, presets
from deskside.config.model import ModelConfig
from deskside.probe import grid as probe_map
from deskside.probe.grid import (
    Point,
    Size,
    calibration_points,
    estimate_seconds,
    expand,
    make_point,
    needs_at_least_as_much_memory,
    order,
    step_tokens,
)
from deskside.probe.point import point_config
from deskside.utils.errors import UsageError


def depth(number: int) -> Size:
    config = merge.build(presets.layers(f"d{number}"))
    return Size(config.model, config.batch.sequence_length, config.batch.tokens)


def grid(
    depths: list[int], lengths: list[int], optimizers: list[str], kept: list[str], device: str = "cuda"
) -> list[Point]:
    return expand([depth(number) for number in depths], lengths, ["auto"], optimizers, kept, device)


grids = st.builds(
    grid,
    st.lists(st.integers(1, 12).map(lambda n: 2 * n), min_size=1, max_size=5, unique=True),
    st.lists(st.sampled_from([64, 256, 512, 1000, 1024, 2048, 4096]), min_size=1, max_size=4, unique=True),
    st.sampled_from([["muon"], ["adamw", "muon"]]),
    st.sampled_from([["none"], ["none", "block"]]),
)


@settings(deadline=None, max_examples=60)
@given(grids)
def test_every_prefix_has_the_extremes_first_and_no_point_twice(points: list[Point]) -> None:
    ordered = order(points)
    assert sorted(map(id, ordered)) == sorted(map(id, points))
    sizes = sorted({matmul_params(p.model) for p in points})
    lengths = sorted({p.sequence_length for p in points})
    corners = {(size, length) for size, length in product((sizes[0], sizes[-1]), (lengths[0], lengths[-1]))}
    seen = [(matmul_params(p.model), p.sequence_length) for p in ordered[: len(corners)]]
    assert set(seen) == corners
    assert seen[0] == (sizes[0], lengths[0]), "the cheapest shows first whether anything works"


@settings(deadline=None, max_examples=40)
@given(grids)
def test_each_next_point_is_the_farthest(points: list[Point]) -> None:
    """Compared with brute force over independently computed coordinates."""

    def axis(values: list[float]) -> list[float]:
        low, high = min(values), max(values)
        return [0.0 if high == low else (value - low) / (high - low) for value in values]

    size = axis([math.log(matmul_params(p.model)) for p in points])
    length = axis([math.log(p.sequence_length) for p in points])
    place = {
        id(p): (s, t, *[0.6 * (o != points[0].options[i]) for i, o in enumerate(p.options)])
        for p, s, t in zip(points, size, length, strict=True)
    }
    ordered = order(points)
    corners = len({(s, t) for s, t in product((min(size), max(size)), (min(length), max(length)))})
    for n in range(corners, len(ordered)):
        gap = {id(p): min(math.dist(place[id(p)], place[id(q)]) for q in ordered[:n]) for p in ordered[n:]}
        assert gap[id(ordered[n])] == pytest.approx(max(gap.values()))


def test_one_axis_is_bisected() -> None:
    lengths = [256, 512, 1024, 2048, 4096]
    assert [p.sequence_length for p in order(grid([8], lengths, ["muon"], ["none"]))] == [
        256,
        4096,
        1024,
        512,
        2048,
    ]


def test_no_points_have_no_order() -> None:
    assert order([]) == []


def test_equal_work_is_one_point() -> None:
    size = depth(8)
    assert len(expand([size, depth(8)], [512, 512], ["auto"], ["muon"], ["none"], "cuda")) == 1
    longer = Size(size.model.model_copy(update={"num_hidden_layers": 9}), 2048, 65536)
    assert len(expand([size, longer], [512], ["auto"], ["muon"], ["none"], "cuda")) == 2


@pytest.mark.parametrize("name", [*presets.names(), "d12"])
@pytest.mark.parametrize("length", [128, 4096])
def test_every_preset_makes_a_run_that_training_accepts(name: str, length: int) -> None:
    preset = merge.build(presets.layers(name))
    point = make_point(preset.model, length, 2 * length, "adamw", "bf16", "block")
    config = point_config(dict(point.spec))
    expected = preset.model.model_dump() | {
        "max_position_embeddings": max(length, preset.model.max_position_embeddings)
    }
    assert config.model.model_dump() == expected == point.model.model_dump()
    assert (config.batch.tokens, config.optim.name, config.precision.name) == (2 * length, "adamw", "bf16")


@pytest.mark.parametrize(
    ("gib", "device"), [(8, "cuda"), (12, "cuda"), (24, "cuda"), (140, "cuda"), (4, "cpu")]
)
def test_calibration_points_are_runs_that_fit_and_differ(gib: int, device: str) -> None:
    points = calibration_points(gib * 2**30, device)
    for point in points:
        config = point_config(dict(point.spec))
        assert config.model == point.model
        assert 16 * num_params(point.model) < 0.6 * gib * 2**30
        assert point.step_flops <= 1.4 * probe_map.STEP_FLOPS[device]
    for one in (
        {p.options[1] for p in points},
        {p.options[2] for p in points},
        {p.sequence_length for p in points},
    ):
        assert len(one) >= 2
    assert len({(repr(p.spec)) for p in points}) == len(points)
    assert len({p.shape for p in points}) >= 3
    heads = {p.model.num_attention_heads == p.model.num_key_value_heads for p in points}
    assert heads == {True, False}


def test_steps_are_shortened_until_they_can_be_repeated() -> None:
    size = depth(20)
    tokens = step_tokens(size, 2048, "cpu")
    assert tokens == 2048  # one row is the minimum
    small = merge.build(presets.layers("demo")).model
    assert step_tokens(Size(small, 128, 2048), 128, "cpu") == 2048
    assert step_tokens(Size(small, 128, 2048), 1000, "cuda") == 2000
    tokens = step_tokens(Size(size.model, 2048, 2**20), 2048, "cuda")
    assert 0.4 * 4e14 < tokens * flops_per_token(size.model, 2048) <= 4e14


@pytest.mark.parametrize("length", [1, 2**21])
def test_lengths_that_cannot_be(length: int) -> None:
    with pytest.raises(UsageError, match=f"--sequence: {length} cannot be measured"):
        grid([8], [length], ["muon"], ["none"])


def test_a_map_has_an_end() -> None:
    with pytest.raises(UsageError, match="the grid has 600 points"):
        grid(list(range(2, 26, 2)), [64 * n for n in range(1, 51)], ["muon"], ["none"])


BASE = make_point(depth(8).model, 1024, 8192)


@pytest.mark.parametrize(
    ("other", "more"),
    [
        (make_point(depth(10).model, 1024, 8192), True),
        (make_point(depth(8).model, 2048, 8192), True),
        (make_point(depth(8).model, 1024, 8192), True),
        (make_point(depth(6).model, 4096, 8192), False),
        (make_point(depth(10).model, 512, 8192), False),
        (make_point(depth(10).model, 1024, 8192, "adamw"), False),
        (make_point(depth(10).model, 1024, 8192, precision="bf16"), False),
        (make_point(depth(10).model, 1024, 8192, checkpointing="block"), False),
        (make_point(depth(10).model.model_copy(update={"qk_norm": False}), 1024, 8192), False),
        (make_point(depth(8).model, 1024, 8192, micro_tokens=4096), True),
    ],
)
def test_what_needs_more_memory(other: Point, more: bool) -> None:
    assert needs_at_least_as_much_memory(other, BASE) == more


def test_checkpointing_needs_less() -> None:
    kept = {
        name: make_point(depth(8).model, 1024, 8192, checkpointing=name)
        for name in probe_map.RECOMPUTED_FORWARDS
    }
    more = {(a, b) for a in kept for b in kept if needs_at_least_as_much_memory(kept[a], kept[b])}
    assert more == {(a, a) for a in kept} | {("none", a) for a in kept} | {(a, "block") for a in kept}


def test_estimates_follow_what_was_measured() -> None:
    small, large = make_point(depth(8).model, 1024, 65536), make_point(depth(16).model, 1024, 65536)
    unknown = estimate_seconds(small, [], "cuda", None)
    assert unknown > estimate_seconds(small, [], "cuda", 5e13) > 30
    # Half a second per step, 20 s in all. The larger model's steps take longer in proportion to its FLOPs, its set-up
    # as long.
    measured = [(small, 0.5, 20.0)]
    assert estimate_seconds(small, measured, "cuda", None) == pytest.approx(20.0)
    step = 0.5 * large.step_flops / small.step_flops
    setup = 20.0 - (2.0 + 4.0 + 1.5)
    assert estimate_seconds(large, measured, "cuda", None) == pytest.approx(
        setup + 2 * step + 5 * step + 3 * step
    )
    assert estimate_seconds(large, [*measured, (large, 2.0, 90.0)], "cuda", None) == pytest.approx(90.0)


def test_titles_tell_points_apart() -> None:
    assert BASE.title() == "8x512 4/4, 59.3M, T 1024, muon"
    experts = ModelConfig(num_experts=8, num_experts_per_tok=2)
    title = make_point(experts, 1024, 8192, "adamw", "bf16", "mlp").title()
    assert "E8" in title and title.endswith("T 1024, adamw, bf16, checkpointing mlp")
