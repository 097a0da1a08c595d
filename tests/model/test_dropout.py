"""Dropout in a model: the same places as GPT-2 in transformers, fused
sublayers, recomputation, compilation, evaluation.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

from deskside.kernels.dropout import dropout
from deskside.model.dropout import ResidualDropout
from deskside.model.transformer import Transformer
from deskside.precision.convert import convert
from deskside.train.prepare.setup import recompute
from deskside.weights.hf import load_hf
from tests.precision.small import B, Gradients, T, backward, make, tokens, worst

RATE, SEED, STEP = 0.2, 5, 9
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}


def dropping(model: Transformer) -> ResidualDropout:
    attached = ResidualDropout(model, RATE, SEED)
    attached.begin_step(STEP)
    return attached


def gradients(model: Transformer, first_token: int = 0) -> Gradients:
    with dropping(model).passing(first_token):
        return backward(model)[1]


class Dropped(torch.nn.Module):
    """Replaces transformers' dropout, and uses the mask of a stream."""

    def __init__(self, stream: int):
        super().__init__()
        self.stream = stream

    def forward(self, x: Tensor) -> Tensor:
        return dropout(x, torch.tensor([SEED, self.stream, STEP, 0]), RATE) if self.training else x


def test_gpt2_drops_where_transformers_does(tmp_path: Path) -> None:
    """With the same masks, transformers' model in training mode has our loss and our gradients."""
    sizes: dict[str, Any] = {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": T, "vocab_size": 64}
    theirs = GPT2LMHeadModel(GPT2Config(**sizes, attn_pdrop=0.0, embd_pdrop=RATE, resid_pdrop=RATE))
    theirs.save_pretrained(tmp_path)
    ours = load_hf(tmp_path)[1]
    x_BT, y_BT = tokens(), tokens(1)
    with dropping(ours).passing(0):
        loss = ours.loss(x_BT, y_BT) / (B * T)
        loss.backward()
    assert isinstance(theirs.transformer.drop, torch.nn.Dropout)
    theirs.transformer.drop = Dropped(0)
    for layer, block in enumerate(theirs.transformer.h):
        assert block.attn.resid_dropout.p == block.mlp.dropout.p == RATE
        block.attn.resid_dropout, block.mlp.dropout = Dropped(1 + 2 * layer), Dropped(2 + 2 * layer)
    theirs.train()
    expected = torch.nn.functional.cross_entropy(theirs(x_BT).logits.flatten(0, 1), y_BT.flatten())
    expected.backward()
    assert float(loss.detach()) == pytest.approx(float(expected.detach()), rel=1e-5)
    assert ours.embed.weight.grad is not None
    torch.testing.assert_close(
        ours.embed.weight.grad, theirs.transformer.wte.weight.grad, rtol=1e-3, atol=1e-6
    )
    with torch.no_grad():
        torch.testing.assert_close(ours(x_BT), theirs.eval()(x_BT).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "changes", [{}, MOE, {"norm_position": "sandwich"}], ids=["dense", "experts", "sandwich"]
)
def test_fused_sublayers_have_the_gradients_of_the_model(changes: dict[str, Any]) -> None:
    """Holds with every recomputation, and the gradients differ from those without dropout."""
    model = make(torch.float64, **changes)
    without, truth = backward(model)[1], gradients(model)
    assert worst(truth, without) > 0.1
    applied = convert(model, "fp32", fused=True)
    for part in ("none", "block"):
        applied.set_checkpointing(part)
        assert worst(gradients(model), truth) < 1e-12


def test_a_recomputed_block_drops_the_same_values() -> None:
    model = make(torch.float64)
    truth = gradients(model)
    recompute(model.layers, "block")
    assert worst(gradients(model), truth) == 0
    assert worst(gradients(model, first_token=1), truth) > 0.1


@pytest.mark.full
def test_compiled_blocks_drop_the_same_values() -> None:
    """All blocks, steps and tokens share one compiled graph."""
    model = make()
    truth, later = gradients(model), gradients(model, B * T)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    for block in model.layers:
        block.compile(dynamic=False, backend="aot_eager", fullgraph=True)
    attached = dropping(model)
    for first_token, expected in ((0, truth), (B * T, later)):
        with attached.passing(first_token):
            assert worst(backward(model)[1], expected) < 1e-5
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    torch._dynamo.reset()


def test_outside_of_a_pass_nothing_is_dropped() -> None:
    model = make(parallel_residual=True, norm="layernorm")
    before = backward(model)[1]
    attached = dropping(model)
    with pytest.raises(ZeroDivisionError), attached.passing(0):
        dropped = backward(model)[1]
        raise ZeroDivisionError
    assert worst(dropped, before) > 0.1
    assert all(torch.equal(g, before[name]) for name, g in backward(model)[1].items())
    assert not any("dropout" in name for name in model.state_dict())
