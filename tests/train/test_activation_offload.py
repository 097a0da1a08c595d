"""Activations in host memory: the same gradients, no tensor lost or confused, and reused host buffers."""

from typing import Any

import pytest
import torch
from torch import nn

from deskside.config.run import RunConfig
from deskside.precision.convert import convert
from deskside.train import activation_offload
from deskside.train.activation_offload import ActivationOffload
from deskside.train.parallel import World
from deskside.train.prepare.setup import build_model, prepare_execution
from deskside.utils.errors import UsageError
from tests.precision import small
from tests.train.tiny_run import SHAPE

CPU = torch.device("cpu")
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


@pytest.fixture(autouse=True)
def every_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activation_offload, "MIN_BYTES", 1024)


def recomputed(offloading: bool, compile: str, model: dict[str, Any]) -> RunConfig:
    compute = {"activation_checkpointing": "block", "activation_offloading": offloading, "compile": compile}
    return RunConfig(
        model={**SHAPE, **model},
        compute={"device": "cpu", **compute},
        batch={"sequence_length": 32, "tokens": 128},
    )


def gradients(offloading: bool, model: dict[str, Any], passes: int = 1) -> dict[str, torch.Tensor]:
    config = recomputed(offloading, "fused", {"num_hidden_layers": 4, **model})
    built = build_model(config, World(CPU), "fp32")
    prepare_execution(config, built, World(CPU), "fp32")
    for seed in range(passes):
        tokens_BT = torch.randint(300, (4, 32), generator=torch.Generator().manual_seed(seed))
        loss, router = built.loss_and_router(tokens_BT, tokens_BT)
        (loss if router is None else loss + router.load_balancing_loss()).backward()
    return {name: p.grad for name, p in built.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("model", [{}, MOE], ids=["dense", "experts"])
@pytest.mark.parametrize("passes", [1, 3])
def test_gradients_are_the_same_to_the_bit(model: dict[str, Any], passes: int) -> None:
    expected, found = gradients(False, model, passes), gradients(True, model, passes)
    assert expected.keys() == found.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("experts", [0, 4])
def test_only_what_the_backward_reads_goes_to_the_host(experts: int) -> None:
    """It is each sublayer's residual stream in bfloat16 and 1 / RMS of its rows;
    for experts also the router's logits.
    """
    moe = {"num_experts": experts, "num_experts_per_tok": 2, "moe_intermediate_size": 64} if experts else {}
    model = small.make(**moe)
    convert(model, "bf16", fused=True).set_checkpointing("block")
    offload = ActivationOffload(CPU)
    offload.attach(list(model.layers))
    for _ in range(2):
        model.loss(small.tokens(), small.tokens(1)).backward()
        rows = small.B * small.T
        assert offload.host_bytes == 2 * (2 * (rows * 128 * 2 + rows * 4) + rows * experts * 2)


class Square(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * x.detach()


def test_two_graphs_at_once_do_not_share_host_memory() -> None:
    offload = ActivationOffload(CPU)
    blocks = nn.ModuleList(Square() for _ in range(3))
    offload.attach(list(blocks))
    leaves = [torch.full((1024,), value, requires_grad=True) for value in (2.0, 3.0)]
    outputs = []
    for leaf in leaves:  # both forwards come before the first backward, as with preference pairs
        x = leaf
        for block in blocks:
            x = block(x)
        outputs.append(x)
    for leaf, output in zip(leaves, outputs, strict=True):
        output.sum().backward()
        assert leaf.grad is not None
        assert torch.equal(leaf.grad, (leaf * leaf**2 * leaf**4).detach())
    held = offload.host_bytes
    assert held == 2 * 2 * 4096  # two blocks of two graphs; the last block stays on the device
    del outputs, output, x
    x = leaves[0]
    for block in blocks:
        x = block(x)
    x.sum().backward()
    assert offload.host_bytes == held  # the buffers of the finished graphs were reused


def test_a_graph_that_is_dropped_returns_its_buffers() -> None:
    offload = ActivationOffload(CPU)
    block = Square()
    offload.attach([block, Square()])
    for _ in range(5):
        block(torch.ones(1024, requires_grad=True))
    assert offload.host_bytes == 4096
    with torch.no_grad():
        block(torch.ones(1024))
    assert offload.host_bytes == 4096


def test_it_needs_recomputed_fused_blocks() -> None:
    with pytest.raises(ValueError, match="activation_checkpointing block"):
        RunConfig(compute={"activation_offloading": True})
    config = recomputed(True, "auto", {})  # which is off in float32 on a CPU
    with pytest.raises(UsageError, match="compile fused"):
        prepare_execution(config, build_model(config, World(CPU), "fp32"), World(CPU), "fp32")


def test_buffers_of_another_size_are_not_kept() -> None:
    """They may be left by an attempt with more rows that did not fit, or by an earlier stage."""
    offload = ActivationOffload(CPU)
    block = Square()
    offload.attach([block, Square()])
    for rows in (4096, 1024):
        x = torch.randn(rows, requires_grad=True)
        block(x).sum().backward()
        assert offload.host_bytes == 4 * rows
