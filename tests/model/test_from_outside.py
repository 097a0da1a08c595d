"""Precision, checkpointing and compilation are applied to the model from outside."""

import functools
import re
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from deskside.kernels.attention import AttentionContext
from deskside.precision.convert import convert
from tests.model.tiny import LEARNED, MOE, WINDOWS, make, tokens
from tests.sources import PACKAGE, files

# Features that are attached to a model from outside, which its source must not know.
OUTSIDE = r"precision|recipe|quanti[sz]|fp8|nvfp4|int8|lora\b|adapter|shard|distribut|\btrain"


@pytest.mark.parametrize("package", ["ops", "model"])
def test_the_source_of_the_model_names_nothing_that_is_attached(package: str) -> None:
    for path in files(PACKAGE / package, "*.py"):
        found = [
            line for line in path.read_text("utf-8").splitlines() if re.search(OUTSIDE, line, re.IGNORECASE)
        ]
        assert not found, f"{path.name}: {found}"


@pytest.mark.parametrize(
    "changes", [{}, {**LEARNED, "norm": "layernorm"}, {"tie_word_embeddings": True}, MOE]
)
def test_bf16_recipe_reaches_everything(changes: dict[str, Any]) -> None:
    model = make(**changes)
    full = model(tokens())
    convert(model, "bf16")
    dtypes = set()
    hooks = [
        m.register_forward_hook(lambda _m, _i, o: dtypes.add(o.dtype))
        for m in model.modules()
        if hasattr(m, "slices")
    ]
    low = model(tokens())
    for hook in hooks:
        hook.remove()
    assert dtypes == {torch.bfloat16} and low.dtype == torch.bfloat16
    assert model.new_cache(1, 8).k.dtype == torch.bfloat16
    if not changes.get("num_experts"):  # rounding may change which expert is chosen
        assert float((low.float() - full).detach().norm() / full.detach().norm()) < 0.05
    loss = model.loss(tokens(), tokens(seed=1))
    assert loss.dtype == torch.float32
    loss.backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in model.parameters())


@pytest.mark.parametrize("where", ["attn", "mlp", "block"])
def test_activation_checkpointing_wraps_any_part(where: str) -> None:
    plain, wrapped = make(), make()
    for layer in wrapped.layers:
        part = layer if where == "block" else getattr(layer, where)
        part.forward = functools.partial(checkpoint, part.forward, use_reentrant=False)
    for model in (plain, wrapped):
        model.loss(tokens(), tokens(seed=1)).backward()
    for a, b in zip(plain.parameters(), wrapped.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)


@pytest.mark.parametrize(
    ("changes", "graphs"),
    [({"num_hidden_layers": 4}, 1), ({**WINDOWS, "num_hidden_layers": 6}, 2), (LEARNED, 1)],
)
def test_blocks_compile_whole_and_once_per_window(changes: dict[str, Any], graphs: int) -> None:
    """fullgraph, and no recompilation from layer to layer. A second batch compiles nothing new."""
    torch._dynamo.reset()
    compiled = 0

    def count(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        nonlocal compiled
        compiled += 1
        return graph.forward

    model, plain = make(**changes), make(**changes)
    for layer in model.layers:
        layer.compile(fullgraph=True, backend=count, dynamic=False)
    cu_seqlens = torch.tensor([0, 6, 17, 34, 34], dtype=torch.int32)
    for seed in (0, 1):
        x, y = tokens(seed=seed), tokens(seed=seed + 10)
        context = AttentionContext(cu_seqlens=cu_seqlens, backend="chunked")
        loss = model.loss(x, y, context)
        torch.testing.assert_close(loss, plain.loss(x, y, context))
        loss.backward()
    torch._dynamo.reset()
    assert compiled == graphs


@pytest.mark.full
def test_inductor_compiles_a_block_and_agrees() -> None:
    torch._dynamo.reset()
    model, plain = make(), make()
    for layer in model.layers:
        layer.compile(fullgraph=True)
    for m in (model, plain):
        m.loss(tokens(), tokens(seed=1), AttentionContext(backend="sdpa")).backward()
    for a, b in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, atol=1e-4, rtol=1e-4)
    torch._dynamo.reset()
