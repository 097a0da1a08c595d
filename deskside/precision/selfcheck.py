"""Does a recipe compute right numbers on this device? One GEMM, its output and both gradients, against float64.

Gradients are checked because a library has been seen to report support for a format while every gradient it gave was
zero. So a result that is all zero or not finite fails whatever its error.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from deskside.ops.linear import Embedding, Linear
from deskside.precision.recipes import apply, recipe_named

ROWS, IN_FEATURES, OUT_FEATURES = 256, 256, 384


@dataclass(frozen=True)
class CheckResult:
    """errors: relative Frobenius error of "output", "input gradient" and "weight gradient". reason: empty when ok."""

    ok: bool
    errors: dict[str, float]
    reason: str


class _Gemm(nn.Module):
    """An embedding and a projection: the stream of activations as a model has it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = Embedding(ROWS, IN_FEATURES)
        self.projection = Linear(IN_FEATURES, [("out", OUT_FEATURES)])

    def forward(self) -> Tensor:
        return self.projection(self.embed(torch.arange(ROWS, device=self.embed.weight.device)))


def check(recipe: str, device: torch.device | str) -> CheckResult:
    """Run the recipe's GEMM on this device. Milliseconds. Raises UsageError for an unknown recipe."""
    model = _Gemm().to(device)
    apply(model, recipe)

    def gemm(x: Tensor, weight: Tensor) -> Tensor:
        parameters = {"embed.weight": x, "projection.weight": weight}
        output = torch.func.functional_call(model, parameters)
        assert isinstance(output, Tensor)
        return output

    return check_gemm(gemm, recipe_named(recipe).tolerance, device)


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
    except (RuntimeError, NotImplementedError) as error:
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
