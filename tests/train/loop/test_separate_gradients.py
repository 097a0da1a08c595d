"""Gradients in host memory, and gradients released into the optimizer, give the weights of an ordinary step."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from deskside.config import merge
from deskside.data.reading.loader import Batch
from deskside.optim import adamw, offload
from deskside.optim.build import build
from deskside.precision.convert import convert
from deskside.train.attention_backends import AttentionBackends
from deskside.train.loop.step import Stepper
from deskside.train.loop.train_context import TrainContext
from deskside.train.parallel import World
from deskside.utils.errors import RunError, UsageError
from tests.optim.models import NO_SCALING
from tests.precision.small import make

CPU = torch.device("cpu")
MOE: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
ROWS, LENGTH, VOCABULARY = 4, 16, 64


@pytest.fixture(autouse=True)
def tiny_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Update all weights except norms separately, in several pieces each."""
    monkeypatch.setattr(adamw, "SMALL", 256)
    monkeypatch.setattr(offload, "PIECE", 1024)


def stepper(shape: dict[str, Any], fused: bool = True, **optim: Any) -> Stepper:
    config = merge.build([{"model": {"intermediate_size": 128}, "optim": {"name": "adamw", **optim}}])
    model = make(**shape)
    if config.optim.weights != "float32":
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.data = parameter.data.bfloat16()
    applied = convert(model, "bf16", fused=fused)
    optimizer = build(model, config.optim, NO_SCALING, fused=False)
    attention = AttentionBackends("reference")
    context = TrainContext(
        config=config, world=World(CPU), model=model, attention=attention, precision=applied
    )
    return Stepper(context, optimizer)


def batches(step: int, passes: int) -> list[Batch]:
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, VOCABULARY, (ROWS, LENGTH + 1), generator=generator)
    valid = ROWS * LENGTH
    return [
        Batch(part[:, :-1].contiguous(), part[:, 1:].contiguous(), None, None, valid // passes, valid)
        for part in tokens.chunk(passes)
    ]


def weights_after(run: Stepper, steps: int, passes: int = 1, begin: int = 0) -> dict[str, Tensor]:
    for step in range(begin, begin + steps):
        run.set_progress(1 - step / 20, step / 20, step)
        loss, norm, skipped = run.run(batches(step, passes), step + 1).read()
        assert not skipped and math.isfinite(loss) and norm > 0
    state = {name: t.clone() for name, t in run.optimizer.state_dict_flat()[0].items()}
    return {name: p.detach().clone() for name, p in run.model.named_parameters()} | state


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("shape", [{}, MOE], ids=["dense", "experts"])
@pytest.mark.parametrize(
    "optim",
    [
        pytest.param({"states": "8bit", "weights": "bfloat16", "offload": True}, marks=pytest.mark.full),
        {"states": "8bit", "weights": "24bit", "offload": True},
        {"states": "bfloat16", "weights": "float32"},
        pytest.param({"states": "8bit", "weights": "bfloat16"}, marks=pytest.mark.full),
        pytest.param({"states": "float32", "offload": True}, marks=pytest.mark.full),
    ],
    ids=lambda optim: " ".join(str(value) for value in optim.values()),
)
@pytest.mark.parametrize("place", ["host", "released"])
def test_updates_equal_ordinary_ones_to_the_bit(
    place: str, optim: dict[str, Any], shape: dict[str, Any]
) -> None:
    expected = weights_after(stepper(shape, grad_clip=0.0, **optim), 3)
    assert_equal(weights_after(stepper(shape, grad_clip=0.0, gradients=place, **optim), 3), expected)


@pytest.mark.parametrize("weights", ["float32", pytest.param("bfloat16", marks=pytest.mark.full), "24bit"])
def test_sums_of_several_passes_equal_those_on_the_device(weights: str) -> None:
    optim = {"weights": weights, "states": "8bit", "grad_clip": 0.0}
    expected = weights_after(stepper(MOE, **optim), 3, passes=4)
    assert_equal(weights_after(stepper(MOE, gradients="host", **optim), 3, passes=4), expected)


@pytest.mark.parametrize("place", ["host", "released"])
@pytest.mark.parametrize("offloaded", [False, True])
def test_muon_differs_by_the_rounding_of_smaller_batches_of_products(place: str, offloaded: bool) -> None:
    optim = {"name": "muon", "offload": offloaded}
    expected = weights_after(stepper(MOE, **optim), 3)
    found = weights_after(stepper(MOE, gradients=place, **optim), 3)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_gradients_in_host_memory_are_clipped_by_the_norm_of_all(name: str) -> None:
    optim: dict[str, Any] = {"name": name, "states": "8bit", "grad_clip": 0.05}
    if name == "muon":
        # Cautious decay is discontinuous: where the update is almost 0, its last bit decides whether a weight decays.
        optim["cautious_weight_decay"] = False
    runs = [stepper({}, gradients=place, **optim) for place in ("device", "host")]
    norms = []
    for run in runs:
        run.set_progress(1.0, 0.0, 0)
        norms.append(run.run(batches(0, 2), 1).read()[1])
    assert norms[1] == pytest.approx(norms[0], rel=1e-6) and norms[0] > 0.1
    for one, other in zip(runs[0].model.parameters(), runs[1].model.parameters(), strict=True):
        torch.testing.assert_close(other, one, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("place", ["device", "host", "released"])
def test_gradients_that_exist_at_the_same_time(place: str) -> None:
    """At most the weights of one sublayer, of those that are updated one at a time, have a gradient."""
    run = stepper({"num_hidden_layers": 6}, gradients=place, grad_clip=0.0)
    large = [p for p in run.model.parameters() if p.numel() >= 256]
    most = 0

    def count(parameter: nn.Parameter) -> None:
        nonlocal most
        most = max(most, sum(p.grad is not None for p in large))

    for parameter in run.model.parameters():
        parameter.register_post_accumulate_grad_hook(count)
    run.set_progress(1.0, 0.0, 0)
    run.run(batches(0, 1), 1)
    assert most == len(large) if place == "device" else most <= 1


@pytest.mark.parametrize("place", ["host", "released"])
def test_a_dry_step_and_a_loss_that_is_not_finite_change_nothing(place: str) -> None:
    run = stepper(MOE, gradients=place, grad_clip=0.0, states="8bit")
    before = weights_after(run, 2)
    run.set_progress(1.0, 0.0, 2)
    run.run(batches(0, 1), 1, dry=True)
    assert_equal(weights_after(run, 0), before)
    with torch.no_grad():
        run.model.embed.weight[:, 0] = math.nan
    before = weights_after(run, 0)
    assert run.run(batches(0, 1), 3).read()[2]
    after = weights_after(run, 0)
    for name, tensor in before.items():
        assert torch.equal(after[name].nan_to_num(7.0), tensor.nan_to_num(7.0)), name


def test_released_updates_stop_where_a_gradient_is_not_finite() -> None:
    """The head comes first in the backward, so it is updated. From the bad gradient on, no weight changes."""
    run = stepper({"num_hidden_layers": 4}, gradients="released", grad_clip=0.0)
    before = weights_after(run, 2)
    bad = run.model.layers[1].mlp.input
    weight = next(p for name, p in bad.named_parameters() if p.ndim == 2)
    weight.register_hook(lambda grad: grad * math.inf)
    run.set_progress(1.0, 0.1, 2)
    assert run.run(batches(2, 1), 3).read()[2]
    after = weights_after(run, 0)
    changed = {
        n for n in before if not torch.equal(before[n], after[n]) and not n.startswith(("exp", "step"))
    }
    assert any("layers.3" in name for name in changed) and any("layers.2" in name for name in changed)
    assert not any("layers.0" in name or name.startswith("embed") for name in changed)
    assert all(bool(tensor.isfinite().all()) for tensor in after.values())


def test_a_norm_above_the_guards_limit_stops_released_updates() -> None:
    run = stepper({}, gradients="released", grad_clip=0.0)
    for step in range(1, 18):
        run.guard.record(step, 1.0, 1e-9, False)
    run.optimizer.create_state()
    before = weights_after(run, 0)
    run.set_progress(1.0, 0.1, 19)
    assert run.run(batches(0, 1), 20).read()[2]
    assert_equal(weights_after(run, 0), before)


def test_a_weight_without_a_gradient_is_named() -> None:
    for place in ("host", "released"):
        run = stepper({}, gradients=place, grad_clip=0.0)
        run.model.layers[0].mlp.forward_override = lambda residual, delta: (residual, delta)
        run.set_progress(1.0, 0.0, 0)
        with pytest.raises(RunError, match=r"layers\.0\.mlp"):
            run.run(batches(0, 1), 1)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"optim": {"name": "adamw", "gradients": "released"}}, "grad_clip 0"),
        (
            {
                "optim": {"name": "muon", "gradients": "released"},
                "batch": {"tokens": 4096, "micro_tokens": 2048},
            },
            "gradients host",
        ),
        ({"optim": {"name": "muon", "gradients": "host"}, "parallel": {"mode": "shard"}}, "replicate"),
        ({"optim": {"name": "muon", "gradients": "host"}, "precision": {"accumulate": "fused"}}, "native"),
    ],
)
def test_combinations_that_are_refused_say_what_to_do(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(UsageError, match=named):
        merge.build([changes])
