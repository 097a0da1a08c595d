"""Adapters on a GPU: frozen products against float64, compiled blocks, memory against the model, and a run."""

from pathlib import Path
from typing import Any

import pytest
import torch

from deskside.budget.memory import training_memory
from deskside.budget.scaling import Scaling
from deskside.budget.step_spec import AdapterSpec, StepSpec
from deskside.config.model import ModelConfig
from deskside.config.optim import AdamWConfig
from deskside.config.sections import PROJECTIONS, AdapterConfig
from deskside.kernels.attention import AttentionContext
from deskside.kernels.stored_weights import dequantize_rows
from deskside.model.init import initialize
from deskside.model.transformer import Transformer
from deskside.ops.linear import Linear
from deskside.ops.moe import Experts
from deskside.optim.build import build
from deskside.precision.convert import convert
from deskside.precision.frozen import FrozenExperts, FrozenLinear, freeze
from deskside.train.state.init_weights import InitialWeights
from deskside.weights import frozen_base
from deskside.weights.load import load_model
from tests.gpu.card import DEVICE, NEEDS_CARD, config
from tests.train.tiny_run import curve, plan, rows, train

pytestmark = NEEDS_CARD
FORMATS: list[Any] = ["bf16", "int8", "nf4"]
SHAPE = ModelConfig(
    vocab_size=32768, hidden_size=1024, num_hidden_layers=8, num_attention_heads=16, num_key_value_heads=4, head_dim=64,
    intermediate_size=2816,
)  # fmt: skip
EXPERTS = SHAPE.model_copy(update={"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 1024})


def off(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize("format", ["int8", "nf4"])
def test_frozen_products_are_those_of_the_stored_weight(format: Any) -> None:
    torch.manual_seed(0)
    source = Linear(512, [("q_proj", 384), ("k_proj", 128)])
    torch.nn.init.normal_(source.weight, std=0.02)
    layer = freeze(source.to(DEVICE), format)
    assert isinstance(layer, FrozenLinear)
    x = torch.randn(300, 512, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    grad = torch.randn(300, 512, device=DEVICE, dtype=torch.bfloat16)
    y = layer(x)
    (dx,) = torch.autograd.grad(y, x, grad)
    dense = layer.dense().double()
    for got, expected in ((y, x.detach().double() @ dense.T), (dx, grad.double() @ dense)):
        assert off(got.detach(), expected) < 0.006
    # A CPU sums the magnitudes in another order and divides with another last bit, so a few codes are neighbours.
    elsewhere = freeze(source.cpu(), format)
    assert float((layer.codes.cpu() != elsewhere.codes).double().mean()) < 1e-3  # type: ignore[attr-defined, operator, union-attr]
    assert off(layer.dense().cpu(), elsewhere.dense()) < 5e-3  # type: ignore[operator]


@pytest.mark.parametrize("format", ["int8", "nf4"])
def test_frozen_experts_are_those_of_the_stored_weights(format: Any) -> None:
    torch.manual_seed(0)
    source, counts = Experts(3, 256, 192, "silu", gated=True), torch.tensor([150, 0, 101], device=DEVICE)
    for weight in source.parameters():
        torch.nn.init.normal_(weight, std=0.05)
    layer = freeze(torch.nn.Sequential(source).to(DEVICE), format)[0]  # type: ignore[index]
    assert isinstance(layer, FrozenExperts)
    exact = Experts(3, 256, 192, "silu", gated=True).double()
    for name in source.shapes:
        getattr(exact, name).data = layer.dense(name).double().cpu()
    x = torch.randn(251, 256, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    grad = torch.randn(251, 256, device=DEVICE, dtype=torch.bfloat16)
    y = layer(x, counts)
    (dx,) = torch.autograd.grad(y, x, grad)
    wide = x.detach().cpu().double().requires_grad_()
    expected = exact(wide, counts.cpu())
    (truth,) = torch.autograd.grad(expected, wide, grad.cpu().double())
    assert off(y.detach().cpu(), expected.detach()) < 0.01 and off(dx.cpu(), truth) < 0.01


@pytest.mark.parametrize("shape", [(1536, 8960), (300, 257)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_int8_is_dequantised_as_the_reference_does(shape: tuple[int, int], dtype: torch.dtype) -> None:
    """The weights are bitwise equal: a product in float32, and one rounding to nearest."""
    torch.manual_seed(0)
    codes, scale = torch.randint(-127, 128, shape).to(torch.int8), torch.rand(shape[0]) / 127 + 1e-4
    got = dequantize_rows(codes.to(DEVICE), scale.to(DEVICE), dtype)
    assert torch.equal(got.cpu(), dequantize_rows(codes, scale, dtype))


def step_of(
    shape: ModelConfig, format: Any, compiled: bool, rows_: int = 4, length: int = 1024
) -> tuple[float, list[torch.Tensor], int]:
    """Return (loss, gradients, peak bytes) of one step from fixed weights."""
    plain = Transformer(shape)
    initialize(plain, 0)
    weights = {name: parameter.detach() for name, parameter in plain.named_parameters()}
    model = frozen_base.build(shape, AdapterConfig(rank=16, base=format), 0, weights, DEVICE)
    convert(model, "bf16")
    optimizer = build(model, AdamWConfig(), Scaling(1.0, 1.0, 1.0))
    optimizer.set_progress(1.0, 0.0, 1)
    optimizer.create_state()
    if compiled:
        for block in model.layers:
            block.compile(dynamic=False, fullgraph=True)
    tokens = torch.randint(
        0, shape.vocab_size, (rows_, length), generator=torch.Generator().manual_seed(0)
    ).to(DEVICE)

    def backward() -> float:
        loss = model.loss(tokens, tokens.roll(-1, 1), AttentionContext(backend="sdpa"))
        loss.backward()
        return float(loss.detach())

    first = backward()
    gradients = [p.grad.cpu() for p in model.parameters() if p.grad is not None]
    optimizer.zero_grad()
    torch.cuda.reset_peak_memory_stats()
    backward()
    optimizer.clip_and_norm(1.0)
    optimizer.step()
    return first, gradients, torch.cuda.max_memory_allocated()


@pytest.mark.parametrize("shape", [SHAPE, EXPERTS], ids=["dense", "experts"])
@pytest.mark.parametrize("format", FORMATS)
def test_compiled_blocks_compute_the_same_and_memory_is_as_modelled(format: Any, shape: ModelConfig) -> None:
    loss, gradients, _ = step_of(shape, format, False)
    other, others, peak = step_of(shape, format, True)
    assert other == pytest.approx(loss, rel=2e-3)
    for one, two in zip(gradients, others, strict=True):
        if float(one.norm()) > 0:
            # Rounding the router's input differently can send a token to another expert.
            assert float((one - two).norm() / one.norm()) < (0.3 if shape.num_experts else 0.1)
    work = StepSpec(1024, 4096, 4096, optimizer="adamw", adapter=AdapterSpec(16, PROJECTIONS, format))
    modelled = training_memory(shape, work).allocated
    assert 0.85 * peak <= modelled <= 1.3 * peak, (
        f"{peak / 2**20:.0f} MiB measured, {modelled / 2**20:.0f} modelled"
    )


@pytest.mark.parametrize("format", FORMATS)
def test_a_run_learns(format: Any, data: Path, tmp_path: Path) -> None:
    train(tmp_path, config(data, schedule={"length": "60 steps"}), "base")
    pretrained = tmp_path / "base"
    initial = InitialWeights.of(load_model(pretrained), str(pretrained))
    wanted = config(
        data,
        adapter={"rank": 8, "base": format},
        optim={"name": "adamw", "lr": 2e-3, "weight_decay": 0.0},
        schedule={"length": "40 steps"},
    )
    run = train(tmp_path, wanted, "tuned", initial=initial).run.path
    assert plan(run)["compile"] == "block" and plan(run)["adapter"]["base"] == format
    assert len(curve(run)) == 40
    assert rows(run)[-1]["loss"] < rows(run)[0]["loss"]
