"""The fp32 and bf16 recipes on a custom module, and the self-check with broken GEMMs."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from deskside.config.recipes import RECIPES
from deskside.kernels.cross_entropy import FutureTargets, LossOptions, multi_token_cross_entropy
from deskside.ops.composite import LayerNorm, RMSNorm
from deskside.ops.linear import Embedding, Linear
from deskside.precision import head
from deskside.precision.convert import convert, restore
from deskside.precision.quantized_linear import Shared
from deskside.precision.quantized_operand import Draws, cast_with_current_scale
from deskside.precision.scales import DelayedScales
from deskside.precision.selfcheck import HEAD_TOLERANCE, check, check_gemm, check_head
from deskside.utils.errors import UsageError

DOCUMENT = Path(__file__).parents[2] / "docs" / "precision.md"


def tiny() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(Embedding(20, 16), RMSNorm(16, 1e-6), Linear(16, [("a", 8), ("b", 8)]))
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    return model


def test_bf16_computes_in_bf16_and_keeps_float32_masters() -> None:
    model, tokens = tiny(), torch.arange(20)
    full = model(tokens)
    assert full.dtype == torch.float32
    convert(model, "bf16")
    low = model(tokens)
    assert low.dtype == torch.bfloat16
    error = (low.float() - full).norm() / full.norm()
    assert 1e-4 < error < 2e-2
    low.float().square().sum().backward()
    for parameter in model.parameters():
        assert parameter.dtype == torch.float32
        assert parameter.grad is not None and parameter.grad.dtype == torch.float32
    restore(model)
    assert torch.equal(model(tokens), full)


def test_fp32_changes_nothing() -> None:
    model, tokens = tiny(), torch.arange(20)
    full = model(tokens)
    convert(model, "bf16")
    convert(model, "fp32")
    assert torch.equal(model(tokens), full)


def test_unknown_recipe_is_named() -> None:
    with pytest.raises(UsageError, match="'fp3'"):
        convert(tiny(), "fp3")


@pytest.mark.parametrize("norm", [RMSNorm(64, 1e-6), LayerNorm(64, 1e-6, bias=True)])
def test_norms_compute_in_float32(norm: nn.Module) -> None:
    """With bf16 input, the result is the float64 result, rounded once."""
    torch.manual_seed(0)
    for parameter in norm.parameters():
        nn.init.normal_(parameter)
    # a large mean, with which a variance in bf16 would be noise
    x = (torch.randn(7, 64) * 3 + 100).bfloat16()
    d = x.double()
    if isinstance(norm, LayerNorm):
        assert norm.bias is not None
        exact = (d - d.mean(-1, keepdim=True)) / (d.var(-1, keepdim=True, unbiased=False) + 1e-6).sqrt()
        exact = exact * norm.weight.double() + norm.bias.double()
    else:
        exact = d / (d.square().mean(-1, keepdim=True) + 1e-6).sqrt() * norm.weight.double()  # type: ignore[operator]
    got = norm(x)
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got.double(), exact, rtol=2**-8, atol=1e-3)


@pytest.mark.parametrize("recipe", RECIPES)
def test_selfcheck_passes_on_cpu(recipe: str) -> None:
    result = check(recipe, "cpu")
    assert result.ok and result.reason == ""
    assert set(result.errors) == {"output", "input gradient", "weight gradient"}
    assert all(0 < error < RECIPES[recipe].tolerance for error in result.errors.values())
    if recipe != "fp32":  # the document's table begins with BF16
        table = DOCUMENT.read_text("utf-8").partition("## Error of a single product")[2].partition("\n## ")[0]
        (row,) = (line for line in table.splitlines() if line.startswith("|") and f"`{recipe}`" in line)
        written = [float(cell) for cell in row.split("|")[2:5]]
        assert written == pytest.approx(list(result.errors.values()), abs=6e-4)


def test_bf16_does_not_pass_as_fp32() -> None:
    result = check_gemm(
        lambda x, w: (x.bfloat16() @ w.bfloat16().T).float(), RECIPES["fp32"].tolerance, "cpu"
    )
    assert not result.ok and "output is off" in result.reason


class Broken(torch.autograd.Function):
    """Has a correct output, and one wrong gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, fault: str) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.fault = fault
        return x @ weight.T

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        (grad,) = grads
        d_x, d_weight = grad @ weight, grad.T @ x
        if ctx.fault == "input gradient is all zero":
            d_x = torch.zeros_like(d_x)
        elif ctx.fault == "weight gradient is all zero":
            d_weight = torch.zeros_like(d_weight)
        elif ctx.fault == "weight gradient is not finite":
            d_weight[3, 5] = torch.inf
        else:
            d_x = -d_x
        return d_x, d_weight, None


@pytest.mark.parametrize(
    "fault",
    [
        "input gradient is all zero",
        "weight gradient is all zero",
        "weight gradient is not finite",
        "input gradient is off",
    ],
)
def test_selfcheck_sees_a_broken_gradient(fault: str) -> None:
    result = check_gemm(lambda x, w: Broken.apply(x, w, fault), 1e-2, "cpu")
    assert not result.ok and fault in result.reason


def test_selfcheck_reports_a_kernel_that_cannot_run() -> None:
    def missing(x: Tensor, weight: Tensor) -> Tensor:
        raise RuntimeError("no kernel image\nlong story")

    result = check_gemm(missing, 1e-2, "cpu")
    assert not result.ok and result.reason == "cannot run here: no kernel image"


def test_out_of_memory_is_not_the_recipes_fault() -> None:
    def hungry(x: Tensor, weight: Tensor) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(torch.OutOfMemoryError):
        check_gemm(hungry, 1e-2, "cpu")


def test_the_heads_selfcheck_passes_on_cpu() -> None:
    result = check_head("cpu")
    assert result.ok and result.reason == "" and not result.native
    # E4M3 and E5M2 lose 4 to 6 % in each gradient, but the loss averages out the noise of its logits.
    for name in ("hidden gradient", "weight gradient"):
        assert 0.02 < result.errors[name] < HEAD_TOLERANCE / 2
    assert 0 < result.errors["loss"] < 2e-3


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("output", "loss is"),
        ("input_gradient", "hidden gradient is"),
        ("weight_gradient", "weight gradient is"),
    ],
)
@pytest.mark.parametrize(("factor", "how"), [(0.0, ""), (0.7, "off by"), (math.nan, "not finite")])
def test_the_heads_selfcheck_sees_each_product(
    kind: str, said: str, factor: float, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = head.product

    def spoiled(which: Any, *operands: Any) -> Tensor:
        return right(which, *operands) * (factor if which == kind else 1.0)

    monkeypatch.setattr(head, "product", spoiled)
    result = check_head("cpu")
    assert not result.ok and f"{said} {how}" in result.reason


@pytest.mark.parametrize(("chunk_tokens", "products"), [(16, 6), (48, 2), (32, 3)])
def test_the_heads_chunks_are_multiplied_in_groups(
    chunk_tokens: int, products: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """176 tokens are eleven chunks of 16, or other chunks with a shorter last one."""
    torch.manual_seed(0)
    hidden = torch.randn(176, 32).bfloat16().requires_grad_()
    weight = torch.randn(48, 32, requires_grad=True)
    targets = torch.randint(48, (176,))
    plan = head.QuantizedHead(Shared(Draws(0), DelayedScales(1), False, cache=False), False)

    def run(chunk_tokens: int) -> tuple[Tensor, ...]:
        loss = plan(hidden, weight, targets, LossOptions(chunk_tokens=chunk_tokens))
        return loss.detach(), *torch.autograd.grad(loss, (hidden, weight))

    truth = run(176)
    seen: list[str] = []
    right = head.product
    monkeypatch.setattr(head, "product", lambda kind, *rest: (seen.append(kind), right(kind, *rest))[1])
    loss, of_hidden, of_weight = run(chunk_tokens)
    assert seen.count("weight_gradient") == products
    assert seen.count("output") == -(-176 // chunk_tokens)
    torch.testing.assert_close(loss, truth[0], rtol=1e-6, atol=0)
    assert torch.equal(of_hidden, truth[1])
    torch.testing.assert_close(of_weight, truth[2], rtol=1e-5, atol=1e-5)


def test_the_head_predicts_several_tokens() -> None:
    """Losses and gradients are within FP8 rounding of those in float64, z-loss and soft cap included."""
    torch.manual_seed(0)
    hidden, weight = torch.randn(64, 32), torch.randn(48, 32) * 0.2
    targets = torch.randint(48, (64,))
    future = FutureTargets(torch.stack((targets.roll(-1), targets.roll(-2)), 1), torch.tensor([0.5, 0.25]))
    future.targets_NK[7] = -100
    plan = head.QuantizedHead(Shared(Draws(0), DelayedScales(1), False, cache=False), False)
    options = LossOptions(softcap=20.0, z_loss=1e-3, chunk_tokens=16)
    found = []
    for loss, dtype in ((plan.multi_token, torch.float32), (multi_token_cross_entropy, torch.float64)):
        leaves = [hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_()]
        total, next_token = loss(leaves[0], leaves[1], targets, future, options)
        assert total > next_token and not next_token.requires_grad
        found.append([total.detach(), next_token, *torch.autograd.grad(total, leaves)])
    for ours, truth in zip(*found, strict=True):
        assert (ours.double() - truth).norm() < 0.1 * truth.norm()


@pytest.mark.parametrize("largest", [0.0, 1e-36, 1e-3, float("inf"), float("nan")])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_own_scales_at_the_ends_of_float32(dtype: torch.dtype, largest: float) -> None:
    """Zeros beside the smallest values stay zeros, and non-finite values stay non-finite in the product."""
    x = torch.zeros(16, 16)
    x[3, 4] = largest
    noted = torch.zeros(())
    made, inverse = cast_with_current_scale(x, dtype, noted)
    back = made.rows.float() * inverse
    if math.isfinite(largest):
        assert torch.equal(back.isfinite(), torch.ones_like(back, dtype=torch.bool))
        assert not back[0].any() and float(back[3, 4]) == pytest.approx(largest, rel=0.07)
        assert float(noted) == pytest.approx(largest)
    else:
        assert not back[3, 4].isfinite() and not noted.isfinite()
