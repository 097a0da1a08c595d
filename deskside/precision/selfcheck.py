"""Does a recipe compute right numbers on this device? One GEMM, its output and both gradients, against float64.

Gradients are checked because a library has been seen to report support for a format while every gradient it gave was
zero. So a result that is all zero or not finite fails whatever its error.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from deskside.config.recipes import Recipe, recipe_named
from deskside.errors import UsageError
from deskside.ops.linear import Embedding, Linear
from deskside.precision.apply import apply, refused
from deskside.precision.scales import OWN_STEPS
from deskside.precision.units import units

ROWS, IN_FEATURES, OUT_FEATURES = 256, 256, 384
PRODUCTS = OWN_STEPS + 1  # of them the last one is checked: a delayed scale comes from the steps before


@dataclass(frozen=True)
class CheckResult:
    """errors: relative Frobenius error of "output", "input gradient" and "weight gradient".

    reason: why it is not ok, or why it is emulated; else empty. native: in the formats of the hardware, not emulated.
    """

    ok: bool
    errors: dict[str, float]
    reason: str
    native: bool = True


class _Gemm(nn.Module):
    """An embedding and a projection: the stream of activations as a model has it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = Embedding(ROWS, IN_FEATURES)
        self.projection = Linear(IN_FEATURES, [("out", OUT_FEATURES)])

    def forward(self) -> Tensor:
        return self.projection(self.embed(torch.arange(ROWS, device=self.embed.weight.device)))


def check(
    recipe: str, device: torch.device | str, native: bool | None = None, backend: str = "deskside"
) -> CheckResult:
    """Run the recipe's own linear layer on this device: forward and both gradients. Milliseconds, once compiled.

    native: True or False checks that way alone; None takes tensor cores where they pass and emulation where not, and
    the result says which. backend: whose layer it is, for a quantised recipe; another library's has one way only.
    Raises UsageError for an unknown recipe, or a backend that is not there.
    """
    found = recipe_named(recipe)
    if backend != "deskside" and found.quantized:
        return _check(found, device, torch.device(device).type == "cuda", backend)
    ways = [native] if native is not None else _ways(found, torch.device(device))
    results = [_check(found, device, way) for way in ways]
    best = next((result for result in results if result.ok), results[0])
    if len(results) > 1 and not results[0].ok and best.ok:
        return replace(best, reason=f"emulated: {results[0].reason}")
    return best


def _ways(recipe: Recipe, device: torch.device) -> list[bool]:
    """Native first, where the recipe has products for tensor cores and the device may have some."""
    if device.type != "cuda":
        return [False]
    fp8 = any(f in ("e4m3", "e5m2") for f in recipe.formats)
    return [True, False] if fp8 or ("nvfp4" in recipe.formats and units(device).fp4) else [False]


def _check(
    recipe: Recipe, device: torch.device | str, native: bool, backend: str = "deskside"
) -> CheckResult:
    if reason := refused(recipe, torch.device(device)):
        return CheckResult(False, {}, reason)
    model = _Gemm().to(device)
    applied = apply(model, recipe, native=native, backend=backend)

    def gemm(x: Tensor, weight: Tensor) -> Tensor:
        with torch.no_grad():
            model.embed.weight.copy_(x)
            model.projection.weight.copy_(weight)
        return _Through.apply(model, x, weight)

    result = CheckResult(False, {}, "")
    for step in range(1, PRODUCTS + 1):
        applied.begin_step(step)
        result = check_gemm(gemm, recipe.tolerance, device)
        applied.end_step()
    return replace(result, native=native or not recipe.quantized)


class _Through(torch.autograd.Function):
    """The layer's own parameters get the gradients; here they are handed to the tensors that stand for them."""

    @staticmethod
    def forward(ctx: Any, model: _Gemm, x: Tensor, weight: Tensor) -> Tensor:
        ctx.model = model
        with torch.enable_grad():
            ctx.output = model()
        return ctx.output.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        parameters = (ctx.model.embed.weight, ctx.model.projection.weight)
        return None, *torch.autograd.grad(ctx.output, parameters, grads[0])


def check_gemm(
    gemm: Callable[[Tensor, Tensor], Tensor], tolerance: float, device: torch.device | str
) -> CheckResult:
    """Compare gemm(x, weight) = x weight^T and its two gradients with float64, on random float32 inputs.

    A kernel that this device cannot run counts as a failed check, with its message as the reason.
    """
    generator = torch.Generator(device).manual_seed(0)
    shapes = ((ROWS, IN_FEATURES), (OUT_FEATURES, IN_FEATURES), (ROWS, OUT_FEATURES))
    x, weight, grad = (torch.randn(shape, generator=generator, device=device) for shape in shapes)
    expected = {
        "output": x.double() @ weight.double().T,
        "input gradient": grad.double() @ weight.double(),
        "weight gradient": grad.double().T @ x.double(),
    }
    x.requires_grad_()
    weight.requires_grad_()
    try:
        output = gemm(x, weight)
        gradients = torch.autograd.grad(output, (x, weight), grad.to(output.dtype))
    except (RuntimeError, NotImplementedError, UsageError) as error:
        first_line = next(iter(str(error).strip().splitlines()), type(error).__name__)
        return CheckResult(False, {}, f"cannot run here: {first_line}")
    errors: dict[str, float] = {}
    problems: list[str] = []
    for (name, truth), got in zip(expected.items(), (output, *gradients), strict=True):
        got = got.detach().double()
        errors[name] = float((got - truth).norm() / truth.norm())
        if not bool(torch.isfinite(got).all()):
            problems.append(f"{name} is not finite")
        elif not bool(got.any()):
            problems.append(f"{name} is all zero")
        elif errors[name] > tolerance:
            problems.append(f"{name} is off by {errors[name]:.1e}, allowed {tolerance:.0e}")
    return CheckResult(not problems, errors, "; ".join(problems))
