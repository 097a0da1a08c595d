"""Activation checkpointing changes neither the loss nor a gradient, and recomputes what it claims to."""

import gc
from typing import Any

import pytest
import torch
from torch import nn

from deskside.config.model import ModelConfig
from deskside.config.run import RunConfig
from deskside.model.init import initialize
from deskside.model.transformer import Transformer
from deskside.precision.fused_attention import _AttentionState
from deskside.precision.fused_mlp import FusedMLP, _MLPState
from deskside.train.parallel import World
from deskside.train.prepare.setup import build_model, prepare_execution, recompute
from tests.train.tiny_run import SHAPE

MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


def step(given: dict[str, Any], what: str) -> tuple[float, dict[str, torch.Tensor], dict[str, int], int]:
    """Return loss, gradients, forward calls of each part of a block (both blocks
    together), and bytes kept for backward.
    """
    model = Transformer(ModelConfig(**{**SHAPE, **given}))
    initialize(model, 1)
    calls = {"attention": 0, "mlp": 0}
    for block in model.layers:
        _count(block.attn.output, calls, "attention")
        _count(block.mlp.mixture if "num_experts" in given else block.mlp.output, calls, "mlp")
    recompute(model.layers, what)
    kept = 0

    def keep(t: torch.Tensor) -> torch.Tensor:
        nonlocal kept
        kept += t.nbytes
        return t

    torch.manual_seed(0)
    tokens_BT = torch.randint(300, (3, 32))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        loss, router = model.loss_and_router(tokens_BT, tokens_BT.roll(-1, 1))
    if router is not None:
        loss = loss + router.load_balancing_loss()
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert len(gradients) == len(list(model.parameters()))
    return loss.item(), gradients, calls, kept


def _count(module: nn.Module, calls: dict[str, int], name: str) -> None:
    def hook(*_: Any) -> None:
        calls[name] += 1

    module.register_forward_pre_hook(hook)


@pytest.mark.parametrize("given", [{}, MOE], ids=["dense", "experts"])
def test_every_rung_gives_the_same_loss_and_gradients(given: dict[str, Any]) -> None:
    loss, gradients, calls, kept = step(given, "none")
    assert calls["attention"] == calls["mlp"] == 2
    for what, twice in (
        ("attention", {"attention"}),
        ("mlp", {"mlp"}),
        ("block", {"attention", "mlp"}),
    ):
        other_loss, others, other_calls, other_kept = step(given, what)
        assert other_loss == loss
        assert other_calls == {name: 4 if name in twice else 2 for name in calls}
        assert other_kept < kept, what
        for name, gradient in gradients.items():
            assert torch.equal(others[name], gradient), (what, name)


@pytest.mark.parametrize("what", ["none", "block"])
@pytest.mark.parametrize("active", [True, False])
def test_each_sublayer_is_recomputed_once(what: str, active: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With compile off, FP8 steps run fused sublayers, which recompute themselves, and BF16 steps do not."""
    calls = {"mlp": 0, "fused": 0}

    def counted(plan: FusedMLP, *args: Any) -> Any:
        calls["fused"] += 1
        return forward(plan, *args)

    forward = FusedMLP.__call__
    monkeypatch.setattr(FusedMLP, "__call__", counted)
    config = RunConfig(
        model={**SHAPE, "hidden_size": 64, "head_dim": 16},
        compute={"device": "cpu", "compile": "off", "activation_checkpointing": what},
        precision={"name": "fp8", "warmup_steps": 2},
        batch={"sequence_length": 32, "tokens": 128},
    )
    world = World(torch.device("cpu"))
    model = build_model(config, world, "fp8-delayed")
    precision = prepare_execution(config, model, world, "fp8-delayed", {"native": False}).precision
    precision.set_active(active)
    for block in model.layers:
        _count(block.mlp.output, calls, "mlp")
    tokens_BT = torch.randint(SHAPE["vocab_size"], (4, 32))
    loss = model.loss(tokens_BT, tokens_BT)
    states = [x for x in gc.get_objects() if type(x) in (_MLPState, _AttentionState)]
    assert len(states) == (2 * len(model.layers) if active and what == "none" else 0)
    states.clear()
    loss.backward()
    layers = len(model.layers)
    assert calls["mlp"] == (0 if active else layers * (2 if what == "block" else 1))
    # torch's checkpoint would call it again in the backward.
    assert calls["fused"] == (layers if active else 0)
