"""Does a recipe compute right numbers on this device? One GEMM, its output and both gradients, against float64; and
for a head in FP8 one small cross-entropy, its loss and both gradients.

Gradients are checked because a library has been seen to report support for a format while every gradient it gave was
zero. So a result that is all zero or not finite fails whatever its error.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from deskside.config.recipes import Recipe, recipe_named
from deskside.config.sections import PrecisionConfig
from deskside.kernels.functional import create_autograd_context, gradients
from deskside.ops.linear import Embedding, Linear
from deskside.precision.convert import convert, refused
from deskside.precision.hardware_caps import NONE, HardwareCaps, hardware_caps
from deskside.precision.head import QuantizedHead
from deskside.precision.quantized_linear import Shared
from deskside.precision.quantized_operand import Draws
from deskside.precision.scales import OWN_STEPS, DelayedScales
from deskside.utils.errors import UsageError

ROWS, IN_FEATURES, OUT_FEATURES = 256, 256, 384
PRODUCTS = OWN_STEPS + 1  # of them the last one is checked: a delayed scale comes from the steps before
HEAD_TOLERANCE = 0.12  # as of the FP8 recipes: the same formats in the same products


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
    recipe: str,
    device: torch.device | str,
    native: bool | None = None,
    backend: str = "deskside",
    caps: HardwareCaps | None = None,
) -> CheckResult:
    """Run the recipe's own linear layer on this device: forward and both gradients. Milliseconds, once compiled.

    native: True or False checks that way alone; None takes tensor cores where they pass and emulation where not, and
    the result says which. backend: whose layer it is, for a quantised recipe; another library's has one way only.
    caps: formats that the GPU supports besides plain FP8; None: `hardware_caps` of the device.
    Raises UsageError for an unknown recipe, or a backend that is not there.
    """
    asked, device = recipe_named(recipe), torch.device(device)
    if backend != "deskside" and asked.quantized:
        return _check(asked, device, device.type == "cuda", backend)
    if caps is None:
        caps = hardware_caps(device) if asked.quantized else NONE
    fp8 = any(f in ("e4m3", "e5m2") for f in asked.formats)
    may_be = device.type == "cuda" and (fp8 or ("nvfp4" in asked.formats and caps.fp4))
    return _first_right(lambda way: _check(asked, device, way, caps=caps), native, may_be)


def check_head(device: torch.device | str, native: bool | None = None) -> CheckResult:
    """Run an output head in FP8 on this device: the loss, and the gradients of what it reads and of its weight, which
    takes all three of its products. native: as in `check`."""
    device = torch.device(device)
    return _first_right(lambda way: _check_head(device, way), native, device.type == "cuda")


def _first_right(run: Callable[[bool], CheckResult], native: bool | None, may_be: bool) -> CheckResult:
    """Tensor cores where they pass, else emulation, and why. may_be: whether there may be any."""
    first = run(may_be if native is None else native)
    if first.ok or native is not None or not may_be:
        return first
    second = run(False)
    return replace(second, reason=f"emulated: {first.reason}") if second.ok else first


def _check(
    recipe: Recipe,
    device: torch.device,
    native: bool,
    backend: str = "deskside",
    caps: HardwareCaps | None = None,
) -> CheckResult:
    if reason := refused(recipe, device):
        return CheckResult(False, {}, reason)
    model = _Gemm().to(device)
    options = PrecisionConfig(backend=backend)
    applied = convert(model, recipe, options, native=native, caps=caps)

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
    """Passes the gradients of the layer's own parameters on to the tensors that replace them."""

    @staticmethod
    def forward(ctx: Any, model: _Gemm, x: Tensor, weight: Tensor) -> Tensor:
        ctx.model = model
        with torch.enable_grad():
            ctx.output = model()
        return ctx.output.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        parameters = (ctx.model.embed.weight, ctx.model.projection.weight)
        return None, *gradients([ctx.output], parameters, grads)


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

    create_autograd_context(device)

    def run() -> tuple[Tensor, ...]:
        output = gemm(x, weight)
        return output, *gradients([output], (x, weight), [grad.to(output.dtype)])

    return _compared(run, expected, tolerance)


def _check_head(device: torch.device, native: bool) -> CheckResult:
    generator = torch.Generator(device).manual_seed(0)
    hidden = torch.randn(ROWS, IN_FEATURES, generator=generator, device=device).to(torch.bfloat16)
    # Logits of a standard deviation of 3: were they smaller, the gradients would hardly depend on them.
    weight = torch.randn(OUT_FEATURES, IN_FEATURES, generator=generator, device=device) * 3 / IN_FEATURES**0.5
    targets = torch.randint(OUT_FEATURES, (ROWS,), generator=generator, device=device)
    exact = [hidden.double().requires_grad_(), weight.double().requires_grad_()]
    loss = nn.functional.cross_entropy(exact[0] @ exact[1].T, targets, reduction="sum")
    of_hidden, of_weight = torch.autograd.grad(loss, exact)
    expected = {"loss": loss.detach(), "hidden gradient": of_hidden, "weight gradient": of_weight}
    hidden.requires_grad_()
    weight.requires_grad_()
    plan = QuantizedHead(Shared(Draws(0), DelayedScales(1), native, cache=False), native)

    def run() -> tuple[Tensor, ...]:
        loss = plan(hidden, weight, targets, chunk_tokens=ROWS // 2)
        return loss, *torch.autograd.grad(loss, (hidden, weight))

    return replace(_compared(run, expected, HEAD_TOLERANCE), native=native)


def _compared(
    run: Callable[[], tuple[Tensor, ...]], expected: dict[str, Tensor], tolerance: float
) -> CheckResult:
    """Compare the results of `run` with `expected`, in order."""
    try:
        found = run()
    except torch.OutOfMemoryError:
        raise  # it says nothing about the recipe
    except (RuntimeError, UsageError) as error:
        first_line = next(iter(str(error).strip().splitlines()), type(error).__name__)
        return CheckResult(False, {}, f"cannot run here: {first_line}")
    errors: dict[str, float] = {}
    problems: list[str] = []
    for (name, truth), got in zip(expected.items(), found, strict=True):
        got = got.detach().double()
        errors[name] = float((got - truth).norm() / truth.norm())
        if not bool(torch.isfinite(got).all()):
            problems.append(f"{name} is not finite")
        elif not bool(got.any()):
            problems.append(f"{name} is all zero")
        elif errors[name] > tolerance:
            problems.append(f"{name} is off by {errors[name]:.1e}, allowed {tolerance:.0e}")
    return CheckResult(not problems, errors, "; ".join(problems))
