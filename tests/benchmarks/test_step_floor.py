"""Time floors compared with the model itself: products with its FLOPs, bytes with the traffic that budget counts."""

import pytest
import torch

from benchmarks import step_floor
from benchmarks.step_config import configuration
from deskside.budget.operators.step import step_operators
from deskside.budget.shape import matmul_params
from deskside.budget.step_spec import StepSpec
from deskside.config.recipes import RECIPES, recipe_named
from deskside.config.run import RunConfig
from deskside.train.attention_backends import AttentionBackends


def _config(**config: object) -> RunConfig:
    return configuration({"preset": "124m", "precision": "bf16", "micro_tokens": 16384, "config": config})


@pytest.mark.parametrize(
    "model",
    [
        {},
        {"fused_qkv": False, "fused_gate_up": False},
        {"gated_mlp": False},
        {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 512},
    ],
)
def test_products_are_all_the_products(model: dict[str, object]) -> None:
    """The listed products have 2 x (weights that a token is multiplied with) x tokens forward FLOPs."""
    config = _config(model=model)
    flops = sum(2.0 * g.tokens * g.columns * g.rows * g.times for g in step_floor.gemms(config, 16384))
    assert flops == pytest.approx(2.0 * matmul_params(config.model) * config.batch.tokens)


def test_the_floor_is_below_what_is_moved() -> None:
    """The floor is below what budget counts for this project's compiled blocks,
    which contain passes that could be fused.
    """
    config = _config()
    found = step_floor.traffic_bytes(config, recipe_named("bf16"), 65536, torch.bfloat16)
    work = StepSpec(2048, 65536, 65536, optimizer="adamw")
    moved: dict[str, float] = {}
    for operator in step_operators(config.model, work):
        moved[operator.group] = moved.get(operator.group, 0.0) + operator.amount
    assert 0.7 < found["elementwise"] / moved["traffic"] < 1
    assert found["loss"] == 65536 * 32768 * 2 * 2 == moved["loss_traffic"] / 3
    head = step_floor.traffic_bytes(
        _config(precision={"name": "fp8", "head": "fp8"}), recipe_named("fp8-delayed"), 65536, torch.bfloat16
    )
    assert head["loss"] == 65536 * 32768 * 3
    assert found["memory"] < moved["weights"]
    assert "quantisation" not in found
    quantized = step_floor.traffic_bytes(config, recipe_named("fp8-delayed"), 65536, torch.bfloat16)
    assert quantized["quantisation"] == 4 * 65536 * 768 * 12
    more_passes = step_floor.traffic_bytes(config, recipe_named("bf16"), 16384, torch.bfloat16)
    assert more_passes["memory"] > found["memory"] and more_passes["elementwise"] == found["elementwise"]


def test_measured_on_this_device() -> None:
    torch.set_num_threads(1)
    config = configuration({"preset": "demo", "tokens": 1024, "precision": "fp32"})
    device = torch.device("cpu")
    found = step_floor.measure(config, "fp32", True, AttentionBackends("sdpa"), 1024, torch.float32, device)
    assert {"gemm", "attention", "elementwise", "loss", "memory", "embedding", "optimizer"} == set(
        found["kinds"]
    )
    assert found["kinds"]["memory"] == 0  # float32 weights are used without a cast
    assert all(ms > 0 for kind, ms in found["kinds"].items() if kind != "memory")
    flops = 6 * matmul_params(config.model) * config.batch.tokens
    assert found["kinds"]["gemm"] == pytest.approx(1e3 * flops / found["rates"]["plain"])
    assert all(min(row["plain_ms"]) > 0 for row in found["gemms"])


@pytest.mark.parametrize(
    "name", [n for n, r in RECIPES.items() if any(f in ("e4m3", "e5m2") for f in r.formats)]
)
def test_fp8_products_have_their_shapes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch._scaled_mm is called with the sizes, formats, layouts and scales that its documentation requires."""
    calls: list[tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]] = []
    monkeypatch.setattr(torch, "_scaled_mm", lambda a, b, **options: calls.append((a, b, options)))
    monkeypatch.setattr(step_floor, "median_seconds", lambda call, device: 0.0 if call() is None else 1.0)
    recipe = recipe_named(name)
    step_floor._three_matmuls(
        step_floor.Gemm("x", 32, 48, 64, 1), recipe, torch.bfloat16, torch.device("cpu")
    )
    low = [p for p in recipe.products if p.left.format in step_floor.FP8]
    assert len(calls) == len(low) > 0
    sizes = {"output": (32, 48, 64), "input_gradient": (32, 64, 48), "weight_gradient": (64, 32, 48)}
    wanted = [(p, sizes[key]) for key, p in zip(sizes, recipe.products, strict=True) if p in low]
    for (product, (rows, inner, columns)), (a, b, options) in zip(wanted, calls, strict=True):
        assert (tuple(a.shape), tuple(b.shape)) == ((rows, inner), (inner, columns))
        assert (a.dtype, b.dtype) == (
            step_floor.FP8[product.left.format],
            step_floor.FP8[product.right.format],
        )
        assert a.is_contiguous() and b.t().is_contiguous()
        by_row = product.left.scaling == "row"
        assert options["scale_a"].shape == ((rows, 1) if by_row else ())
        assert options["scale_b"].shape == ((1, columns) if by_row else ())
