"""The FLOPs of matrix products and attention, against torch's own counter on our model."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from deskside.budget.operators.step import step_operators
from deskside.budget.step_spec import StepSpec
from deskside.config.model import ModelConfig
from deskside.kernels.attention import AttentionContext
from deskside.model.transformer import Transformer
from deskside.precision.convert import convert
from deskside.train.prepare.setup import recompute
from tests.budget.operators.small_step import LENGTH, ROWS, SMALL, TOKENS, amount, operators


def counted(shape: ModelConfig, rung: str = "none", fused: bool = False) -> float:
    """Return the FLOPs of the matrix products in one forward and backward pass,
    except attention, as counted by torch.
    """
    with nullcontext() if fused else FakeTensorMode():
        model = Transformer(shape)
        if fused:
            convert(model, "bf16", fused=True).set_checkpointing(rung)
        else:
            recompute(model.layers, rung)
        tokens_BT = torch.zeros(ROWS, LENGTH, dtype=torch.int64)
        with FlopCounterMode(display=False) as counter:
            model.loss(tokens_BT, tokens_BT, AttentionContext(backend="sdpa"), chunk_tokens=64).backward()
    counts = {str(name): flops for name, flops in counter.get_flop_counts()["Global"].items()}
    # The head's d hidden is written with mm(out=...), which the counter does not see.
    unseen = 2.0 * TOKENS * shape.vocab_size * shape.hidden_size
    return unseen + sum(flops for name, flops in counts.items() if "mm" in name)


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"num_key_value_heads": 8},
        {"gated_mlp": False, "hidden_act": "gelu", "intermediate_size": 1024},
        {"tie_word_embeddings": True, "num_hidden_layers": 1},
    ],
)
def test_products_are_what_torch_counts(given: dict[str, Any]) -> None:
    shape = ModelConfig(**SMALL | given)
    assert amount(operators(shape), "matmul", "head") == counted(shape)


@pytest.mark.parametrize(
    ("rung", "last"), [("attention", 256), ("mlp", 704), ("block", 704)], ids=["attention", "mlp", "block"]
)
def test_recomputed_products_are_at_most_the_last_one_too_many(rung: Any, last: int) -> None:
    """Known: torch stops recomputing once the backward has what it needs, and nothing needs the last product's
    output. The model counts that product, and the cost of recomputed compiled steps was fitted with it.
    """
    shape = ModelConfig(**SMALL)
    modelled = amount(operators(shape, activation_checkpointing=rung), "matmul", "head")
    assert modelled - counted(shape, rung) == 2.0 * TOKENS * 3 * 256 * last


@pytest.mark.parametrize("rung", ["none", "attention", "mlp", "block"])
@pytest.mark.parametrize("given", [{}, {"gated_mlp": False, "hidden_act": "gelu"}], ids=["gated", "plain"])
def test_products_of_fused_sublayers_are_what_torch_counts(given: dict[str, Any], rung: Any) -> None:
    shape = ModelConfig(**SMALL | given)
    modelled = amount(operators(shape, copies="step", activation_checkpointing=rung), "matmul", "head")
    assert modelled == counted(shape, rung, fused=True)


def test_experts_work_on_chosen_tokens_only() -> None:
    """Two of eight experts are as much work as a dense MLP of both sizes, plus the router. Muon updates all eight."""
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 352}
    dense, sparse = ModelConfig(**SMALL), ModelConfig(**SMALL | experts)
    router = 6.0 * TOKENS * 3 * 256 * 8
    assert amount(operators(sparse), "matmul") == amount(operators(dense), "matmul") + router
    assert amount(operators(sparse), "optimizer_matmul") > amount(operators(dense), "optimizer_matmul")
    moved = (8 * 2 + 3) * TOKENS * 3 * 256 * 2  # rows gathered by expert and summed by token
    assert amount(operators(sparse), "traffic") == amount(operators(dense), "traffic") + moved


def test_rate_of_grouped_products() -> None:
    """It is the largest rate above the measured sizes and the smallest below them, and rises in between."""

    def rate(tokens: int, **changes: int) -> float:
        experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 352} | changes
        shape = ModelConfig(**SMALL | experts)
        (mlp,) = [o for o in step_operators(shape, StepSpec(LENGTH, tokens, tokens)) if o.name == "MLP"]
        return mlp.grouped_rate

    rates = [rate(2**n) for n in range(10, 22)]
    assert rates == sorted(rates) and rates[0] == 0.77 and rates[-1] == 0.95
    assert rate(2**17, num_experts=16) < rate(2**17)  # fewer rows for each
    dense = ModelConfig(**SMALL)
    assert {o.grouped_rate for o in operators(dense)} == {1.0}


def test_a_window_cuts_attention_and_nothing_else() -> None:
    wide = operators(ModelConfig(**SMALL))
    narrow = operators(ModelConfig(**SMALL, sliding_window=32, window_pattern="S"))
    assert amount(narrow, "attention") == pytest.approx(
        amount(wide, "attention") * (32 - 32**2 / (2 * LENGTH)) / (LENGTH / 2)
    )
    for group in ("matmul", "head", "traffic", "loss_traffic", "weights", "layers"):
        assert amount(narrow, group) == amount(wide, group)
