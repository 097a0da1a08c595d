"""Small models for the optimizer tests, built from the real operators."""

import math

import pytest
import torch
from torch import Tensor, nn

from deskside.budget.scaling import Scaling
from deskside.ops.linear import Embedding, Linear
from deskside.ops.moe import Experts
from deskside.optim import adamw, offload
from deskside.optim.build import Optimizer

NO_SCALING = Scaling(lr=1.0, embedding_lr=1.0, weight_decay=1.0)


class Tiny(nn.Module):
    """An embedding, one fused and one plain matrix with bias, experts, a gain and a head. 16-dimensional."""

    def __init__(self, fused: bool = True, moe: bool = False, tied: bool = False):
        super().__init__()
        self.embed = Embedding(11, 16)
        outputs = [("q", 16), ("k", 4), ("v", 4)]
        self.qkv = nn.ModuleList([Linear(16, outputs)] if fused else [Linear(16, [one]) for one in outputs])
        self.down = Linear(24, [("down", 16)], bias=True)
        self.experts = Experts(3, 16, 8, "silu", True) if moe else None
        self.gain = nn.Parameter(torch.ones(16))
        self.head = Linear(16, [("head", 11)], role="head")
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        x = x + self.down(torch.cat([layer(x) for layer in self.qkv], dim=-1).tanh())
        if self.experts is not None:
            rows = x.flatten(0, -2)
            third = rows.shape[0] // 3
            counts = torch.tensor([third, third, rows.shape[0] - 2 * third])
            x = x + self.experts(rows, counts).view_as(x)
        return self.head(x * self.gain)


def make(seed: int = 0, dtype: torch.dtype = torch.float32, **options: bool) -> Tiny:
    """Return a Tiny with random parameters from `seed`."""
    model = Tiny(**options).to(dtype)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return model


def backward(model: nn.Module, seed: int) -> None:
    """Compute gradients of a cross-entropy on random tokens, different for each seed."""
    generator = torch.Generator().manual_seed(1000 + seed)
    tokens = torch.randint(0, 11, (3, 8), generator=generator)
    logits = model(tokens[:, :-1])
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()


def weights(model: nn.Module) -> dict[str, Tensor]:
    """Return copies of all parameters."""
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def lower_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lower the size limits of updates and transfers, because these models have at most 384 weights in a matrix."""
    monkeypatch.setattr(adamw, "SMALL", 64)
    monkeypatch.setattr(adamw, "OWN_LAUNCH", 64)
    monkeypatch.setattr(offload, "PIECE", 256)


def check_skipped_step(model: nn.Module, optimizer: Optimizer) -> None:
    """Skip a step with gradients of NaN and infinity, and assert that it changes no bit of weights and states."""
    before, state = weights(model), {k: v.clone() for k, v in optimizer.state_dict_flat()[0].items()}
    for number, parameter in enumerate(model.parameters()):
        parameter.grad = torch.full_like(parameter, (math.nan, math.inf)[number % 2])
    optimizer.step(torch.tensor(1.0))
    for name, value in weights(model).items():
        assert torch.equal(value, before[name]), name
    for name, value in optimizer.state_dict_flat()[0].items():
        assert torch.equal(value, state[name]), name
