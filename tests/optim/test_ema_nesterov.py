"""EMA-Nesterov compared with the paper's recurrence around torch's AdamW; its state, its cost and its requirements."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from deskside.budget.host_memory import checkpoint_bytes
from deskside.budget.memory import training_memory
from deskside.budget.operators.step import step_operators
from deskside.budget.step_spec import StepSpec
from deskside.config.model import ModelConfig
from deskside.config.optim import AdamWConfig, MuonConfig, ema_updates_per_step
from deskside.model.transformer import Transformer
from deskside.optim.build import Optimizer, build
from tests.optim.models import NO_SCALING, Tiny, backward, make

STEPS, LR, GAMMA, BETA, START, UNTIL = 20, 0.01, 0.8, 0.6, 0.25, 0.75
EMA: dict[str, Any] = {
    "ema_nesterov": BETA,
    "ema_nesterov_decay": GAMMA,
    "ema_nesterov_start": START,
    "ema_nesterov_until": UNTIL,
}
ADAMW = AdamWConfig(
    lr=LR, embedding_lr=None, head_lr=None, weight_decay=0.0, betas=(0.9, 0.95), grad_clip=0.0, **EMA
)


def lr_factor(step: int) -> float:
    return 1 - step / STEPS


def train(model: Tiny, optimizer: Optimizer, first: int = 0, last: int = STEPS) -> None:
    for step in range(first, last):
        optimizer.set_progress(lr_factor(step), step / STEPS, step)
        if optimizer.ema is not None:
            optimizer.ema.move()
        backward(model, step)
        optimizer.step()
        optimizer.zero_grad()


def test_like_the_paper() -> None:
    """x <- A(x + beta m), m <- gamma m + (1 - gamma) (new x - old x), where A is torch's, in float64."""
    ours, theirs = make(dtype=torch.float64), make(dtype=torch.float64)
    train(ours, build(ours, ADAMW, NO_SCALING))
    adamw = torch.optim.AdamW(theirs.parameters(), lr=LR, betas=(0.9, 0.95), eps=ADAMW.eps, weight_decay=0.0)
    movement = [torch.zeros_like(p) for p in theirs.parameters()]
    for step in range(STEPS):
        beta = BETA * lr_factor(step) if START <= step / STEPS < UNTIL else 0.0
        with torch.no_grad():
            old = [p.clone() for p in theirs.parameters()]
            for p, m in zip(theirs.parameters(), movement, strict=True):
                p.add_(beta * m)
        backward(theirs, step)
        adamw.param_groups[0]["lr"] = LR * lr_factor(step)
        adamw.step()
        adamw.zero_grad()
        with torch.no_grad():
            for p, x, m in zip(theirs.parameters(), old, movement, strict=True):
                m.mul_(GAMMA).add_((1 - GAMMA) * (p - x))
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-9)
    plain = make(dtype=torch.float64)
    train(plain, build(plain, ADAMW.model_copy(update={"ema_nesterov": 0.0}), NO_SCALING))
    assert any((a - b).abs().max() > 1e-3 for a, b in zip(ours.parameters(), plain.parameters(), strict=True))


@pytest.mark.parametrize("config", [ADAMW, MuonConfig(**EMA)], ids=["adamw", "muon"])
def test_a_restored_state_goes_on_to_the_bit(config: AdamWConfig | MuonConfig) -> None:
    straight, model = make(), make()
    train(straight, build(straight, config, NO_SCALING))
    first = build(model, config, NO_SCALING)
    train(model, first, last=9)
    tensors, data = first.state_dict_flat()
    kept: dict[str, Tensor] = {name: t.clone() for name, t in tensors.items()}
    assert sum(name.startswith("ema/") for name in kept) == len(list(model.parameters()))
    again = build(model, config, NO_SCALING)
    again.load_state_dict_flat(kept, data)
    train(model, again, first=9)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), straight.parameters(), strict=True))


def test_it_is_off_by_default() -> None:
    model = make()
    optimizer = build(model, MuonConfig(), NO_SCALING)
    optimizer.create_state()
    assert optimizer.ema is None and not any(
        name.startswith("ema/") for name in optimizer.state_dict_flat()[0]
    )


def test_planned_bytes_are_those_of_the_average() -> None:
    shape = ModelConfig(
        vocab_size=300, num_hidden_layers=2, hidden_size=64, num_attention_heads=2, num_key_value_heads=2
    )
    optimizer = build(Transformer(shape), ADAMW, NO_SCALING)
    optimizer.create_state()
    assert optimizer.ema is not None
    size = sum(t.nbytes for t in optimizer.ema.averages.values())
    without = StepSpec(sequence_length=64, tokens=256, micro_tokens=256, offload_optimizer=True)
    spec = replace(without, ema_updates=ema_updates_per_step(ADAMW))
    assert spec.ema_updates == UNTIL + UNTIL - START
    assert training_memory(shape, spec).allocated - training_memory(shape, without).allocated == size
    assert checkpoint_bytes(shape, spec) - checkpoint_bytes(shape, without) == size
    amounts = {o.name: o.amount for o in step_operators(shape, spec)}
    assert amounts["EMA-Nesterov"] == pytest.approx(spec.ema_updates * 3 * size)


@pytest.mark.parametrize(
    "changes", [{"weights": "bfloat16"}, {"ema_nesterov_start": 0.8}, {"ema_nesterov_decay": 1.0}]
)
def test_what_does_not_go_together_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="ema_nesterov"):
        MuonConfig(**{**EMA, **changes})
