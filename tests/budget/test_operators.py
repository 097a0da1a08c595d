"""The operators of a step against torch's own FLOP counter on our model and our Muon, and against counting by hand."""

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from deskside.budget.operators import Operator, newton_schulz_flops, step_operators
from deskside.budget.shape import block_matrix_params, num_params, root_params
from deskside.budget.step_spec import StepSpec
from deskside.config.model import ModelConfig
from deskside.kernels.attention import AttentionContext
from deskside.kernels.newton_schulz import coefficients, orthogonalize
from deskside.model.transformer import Transformer
from deskside.train.prepare.setup import recompute

SMALL = {
    "vocab_size": 1024, "hidden_size": 256, "num_hidden_layers": 3, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 32, "intermediate_size": 704,
}  # fmt: skip
ROWS, LENGTH = 2, 128
TOKENS = ROWS * LENGTH


def operators(shape: ModelConfig, **options: Any) -> list[Operator]:
    return step_operators(shape, StepSpec(LENGTH, TOKENS, TOKENS, **options))


def amount(found: list[Operator], *groups: str) -> float:
    return sum(operator.amount for operator in found if operator.group in groups)


def counted(shape: ModelConfig, rung: str = "none") -> float:
    """FLOPs of the matrix products of one forward and backward pass, attention aside, as torch counts them."""
    with FakeTensorMode():
        model = Transformer(shape)
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
    """Known: torch stops recomputing when the backward has what it needs, and nothing needs the last product's output.
    The model counts it; what a recomputed step costs was fitted with it in."""
    shape = ModelConfig(**SMALL)
    modelled = amount(operators(shape, activation_checkpointing=rung), "matmul", "head")
    assert modelled - counted(shape, rung) == 2.0 * TOKENS * 3 * 256 * last


def test_newton_schulz_is_what_torch_counts() -> None:
    """All logical matrices of one layer, through Muon's own iteration."""
    shape = ModelConfig(**SMALL | {"num_hidden_layers": 1})
    matrices = [(256, 256), (128, 256), (128, 256), (256, 256), (704, 256), (704, 256), (704, 256)]
    with FlopCounterMode(display=False) as counter:
        for rows, columns in matrices:
            orthogonalize(torch.empty(1, max(rows, columns), min(rows, columns)), coefficients("quintic", 5))
    assert newton_schulz_flops(shape) == counter.get_total_flops()


def test_experts_work_on_chosen_tokens_only() -> None:
    """Two of eight experts are as much work as a dense MLP of both, and the router; Muon updates all eight."""
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 352}
    dense, sparse = ModelConfig(**SMALL), ModelConfig(**SMALL | experts)
    router = 6.0 * TOKENS * 3 * 256 * 8
    assert amount(operators(sparse), "matmul") == amount(operators(dense), "matmul") + router
    assert amount(operators(sparse), "optimizer_matmul") > amount(operators(dense), "optimizer_matmul")
    moved = (8 * 2 + 3) * TOKENS * 3 * 256 * 2  # rows gathered by expert and summed by token
    assert amount(operators(sparse), "traffic") == amount(operators(dense), "traffic") + moved


def test_rate_of_grouped_products() -> None:
    """Above the measured sizes the largest rate holds, below them the smallest; in between it rises."""

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


def test_accumulation_repeats_what_belongs_to_a_pass() -> None:
    """The same tokens in four passes: weights are cast and launches made four times, the rest is the same spec."""
    shape = ModelConfig(**SMALL)
    one = step_operators(shape, StepSpec(LENGTH, 4 * LENGTH, 4 * LENGTH))
    four = step_operators(shape, StepSpec(LENGTH, 4 * LENGTH, LENGTH))
    for group in ("weights", "layers"):
        assert amount(four, group) == 4 * amount(one, group)
    for group in ("matmul", "head", "attention", "traffic", "loss_traffic", "optimizer_matmul"):
        assert amount(four, group) == amount(one, group)


@pytest.mark.parametrize("gpus", [2, 4, 8])
def test_between_gpus(gpus: int) -> None:
    """FSDP gathers the blocks twice a pass and the
    rest once, and scatters once a step; Muon's matrices are gathered in bfloat16. test_sharded_oracle.py counts them.
    """
    shape = ModelConfig(**SMALL)
    gradients = 4.0 * num_params(shape)
    spec = {"sequence_length": LENGTH, "tokens": 2 * gpus * LENGTH, "micro_tokens": LENGTH, "gpus": gpus}
    share = (gpus - 1) / gpus
    sharded = step_operators(shape, StepSpec(**spec, sharded=True))
    tables = 4.0 * 2 * shape.vocab_size * shape.hidden_size
    muon = 2.0 * block_matrix_params(shape)
    assert amount(sharded, "communication") == ((2 * 2 + 1) * gradients - 2 * tables + muon) * share
    adamw = step_operators(shape, StepSpec(**spec, sharded=True, optimizer="adamw"))
    assert amount(sharded, "communication") - amount(adamw, "communication") == muon * share
    assert amount(step_operators(shape, StepSpec(LENGTH, LENGTH, LENGTH)), "communication") == 0


def test_states_on_the_host_travel_up_and_down() -> None:
    """Muon's 4 bytes per block weight and AdamW's 8 per entry of the tables, each way; vectors stay."""
    shape = ModelConfig(**SMALL)
    expected = 4.0 * block_matrix_params(shape) + 8 * root_params(shape)
    assert amount(operators(shape, offload_optimizer=True), "offload") == expected
    assert amount(operators(shape), "offload") == 0


def test_dropout_reads_and_writes_its_tensors_twice() -> None:
    """In the forward and in the backward; and blocks that are not fused once more if they are recomputed."""
    shape, tensor = ModelConfig(**SMALL), 2 * TOKENS * SMALL["hidden_size"]
    places = 2 * SMALL["num_hidden_layers"] + 1
    for options, more in (({}, 0), ({"activation_checkpointing": "block"}, places - 1)):
        with_dropout, without = (operators(shape, dropout=d, **options) for d in (True, False))
        assert (
            amount(with_dropout, "traffic") - amount(without, "traffic") == (4 * places + 2 * more) * tensor
        )
    fused = {"copies": "step", "activation_checkpointing": "block"}
    added = [o for o in operators(shape, dropout=True, **fused) if o.name == "dropout"]
    assert sum(o.amount for o in added) == 4 * places * tensor
