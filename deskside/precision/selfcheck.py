"""Self-check of a recipe on this device: compares one Linear, one FP8 head or the experts of a layer with float64.

The output (or loss) and both gradients are compared. We have seen a library that reported support for a format and
computed gradients that were all zero, so a result that is all zero or not finite always fails.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from deskside.config.recipes import Recipe, expert_recipe, recipe_named
from deskside.config.sections import PrecisionConfig
from deskside.kernels import moe
from deskside.kernels.compile_ahead import compile_ahead
from deskside.kernels.cross_entropy import LossOptions
from deskside.kernels.functional import create_cuda_context_for_autograd, gradients
from deskside.kernels.moe import reference
from deskside.ops.linear import Embedding, Linear
from deskside.ops.moe import Experts
from deskside.precision.convert import convert, unsupported_reason
from deskside.precision.expert_linear import ExpertLinear
from deskside.precision.hardware_caps import NONE, HardwareCaps, hardware_caps
from deskside.precision.head import QuantizedHead
from deskside.precision.quantized_linear import Shared
from deskside.precision.quantized_operand import Draws
from deskside.precision.scales import CURRENT_SCALING_STEPS, DelayedScales
from deskside.precision.sorted_operand import SortedRows
from deskside.utils.errors import UsageError, first_line

ROWS, IN_FEATURES, OUT_FEATURES, EXPERTS = 256, 256, 384, 4
STEPS = CURRENT_SCALING_STEPS + 1  # the last one is checked, because it is the first with delayed scales
HEAD_TOLERANCE = 0.12  # as in the recipe fp8-tensorwise, which has the same formats in the same products


@dataclass(frozen=True)
class CheckResult:
    """Result of a self-check.

    errors: relative Frobenius errors by result ("output", "input gradient" and "weight gradient" of a Linear).
    reason: why the check failed, or why the recipe is emulated; otherwise empty.
    native: the products ran on the tensor cores as far as these support the formats. Always True if not quantized. For
        experts: only the FP8 products count.
    """

    ok: bool
    errors: dict[str, float]
    reason: str
    native: bool = True


class _Gemm(nn.Module):
    """An embedding and a Linear. The embedding sets the dtype of the activations, as in a model."""

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
    """Check a Linear in this recipe on this device: its output and both gradients. Takes milliseconds once compiled.

    Raises UsageError if the recipe does not exist, or the backend is missing or cannot run it here.

    Args:
        recipe: The name of the recipe.
        native: Check native (True) or emulated (False) products. If None, check native products, and emulated ones if
            those fail or the GPU has none; the result contains which were used.
        backend: The library whose layer is checked, for a quantized recipe. `native` applies to "deskside" only.
        caps: Formats that the GPU supports besides plain FP8. If None, `hardware_caps` of the device.
    """
    checked, device = recipe_named(recipe), torch.device(device)
    if reason := unsupported_reason(checked, device):
        return CheckResult(False, {}, reason)
    if backend != "deskside" and checked.quantized:
        return _check(checked, device, device.type == "cuda", backend)
    if caps is None:
        caps = hardware_caps(device) if checked.quantized else NONE
    fp8 = any(f in ("e4m3", "e5m2") for f in checked.formats)
    native_exists = device.type == "cuda" and (fp8 or ("nvfp4" in checked.formats and caps.fp4))
    return _native_or_emulated(
        lambda native: _compiled(device, lambda: _check(checked, device, native, caps=caps)),
        native,
        native_exists,
    )


def check_head(device: torch.device | str, native: bool | None = None) -> CheckResult:
    """Check an output head in FP8 on this device: its loss and the gradients of the hidden states and of the weight.

    native: as in `check`.
    """
    device = torch.device(device)
    return _native_or_emulated(
        lambda native: _compiled(device, lambda: _check_head(device, native)), native, device.type == "cuda"
    )


def check_experts(
    recipe: str, device: torch.device | str, native: bool | None = None, caps: HardwareCaps | None = None
) -> CheckResult:
    """Check grouped products in the recipe that experts use for `recipe`: an output and both gradients.

    One expert has no tokens and another one has most of them. The arguments are those of `check`.
    """
    checked, device = expert_recipe(recipe_named(recipe)), torch.device(device)
    if caps is None:
        caps = hardware_caps(device) if checked.quantized else NONE
    exists = caps.grouped_fp8 and "e4m3" in checked.formats
    return _native_or_emulated(lambda native: _check_experts(checked, device, native), native, exists)


def _compiled(device: torch.device, run_check: Callable[[], CheckResult]) -> CheckResult:
    """Run a check. On a GPU, an extra run before it, whose result is ignored, compiles its kernels in threads."""
    if device.type == "cuda":
        with compile_ahead(device):
            run_check()
    return run_check()


def _native_or_emulated(
    run_check: Callable[[bool], CheckResult], native: bool | None, native_exists: bool
) -> CheckResult:
    """Call run_check(native). If `native` is None, try native products where they exist, then emulated ones."""
    result = run_check(native_exists if native is None else native)
    if result.ok or native is not None or not native_exists:
        return result
    emulated = run_check(False)
    return replace(emulated, reason=f"emulated: {result.reason}") if emulated.ok else result


def _check(
    recipe: Recipe,
    device: torch.device,
    native: bool,
    backend: str = "deskside",
    caps: HardwareCaps | None = None,
) -> CheckResult:
    model = _Gemm().to(device)
    options = PrecisionConfig(backend=backend)
    converted = convert(model, recipe, options, native=native, caps=caps)

    def gemm(x: Tensor, weight: Tensor) -> Tensor:
        with torch.no_grad():
            model.embed.weight.copy_(x)
            model.projection.weight.copy_(weight)
        return _ReplaceParameters.apply(model, x, weight)

    result = CheckResult(False, {}, "")
    for step in range(1, STEPS + 1):
        converted.begin_step(step)
        result = check_gemm(gemm, recipe.tolerance, device)
        converted.end_step()
    return replace(result, native=native or not recipe.quantized)


class _ReplaceParameters(torch.autograd.Function):
    """Calls the model, whose parameters have the values of x and weight, and gives their gradients to x and weight."""

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

    If the device cannot run a kernel, the check fails with the error message as the reason.
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

    create_cuda_context_for_autograd(device)

    def run() -> tuple[Tensor, ...]:
        output = gemm(x, weight)
        return output, *gradients([output], (x, weight), [grad.to(output.dtype)])

    return _compare(run, expected, tolerance)


def _check_head(device: torch.device, native: bool) -> CheckResult:
    generator = torch.Generator(device).manual_seed(0)
    hidden = torch.randn(ROWS, IN_FEATURES, generator=generator, device=device).to(torch.bfloat16)
    # The logits have a standard deviation of 3, because the gradients would hardly depend on smaller ones.
    weight = torch.randn(OUT_FEATURES, IN_FEATURES, generator=generator, device=device) * 3 / IN_FEATURES**0.5
    targets = torch.randint(OUT_FEATURES, (ROWS,), generator=generator, device=device)
    exact = [hidden.double().requires_grad_(), weight.double().requires_grad_()]
    loss = nn.functional.cross_entropy(exact[0] @ exact[1].T, targets, reduction="sum")
    hidden_grad, weight_grad = torch.autograd.grad(loss, exact)
    expected = {"loss": loss.detach(), "hidden gradient": hidden_grad, "weight gradient": weight_grad}
    hidden.requires_grad_()
    weight.requires_grad_()
    head = QuantizedHead(Shared(Draws(0), DelayedScales(1), native, cache=False), native)

    def run() -> tuple[Tensor, ...]:
        loss = head(hidden, weight, targets, LossOptions(chunk_tokens=ROWS // 2))
        return loss, *torch.autograd.grad(loss, (hidden, weight))

    return replace(_compare(run, expected, HEAD_TOLERANCE), native=native)


def _check_experts(recipe: Recipe, device: torch.device, native: bool) -> CheckResult:
    if reason := unsupported_reason(recipe, device):
        return CheckResult(False, {}, reason)
    generator = torch.Generator(device).manual_seed(0)
    experts = Experts(EXPERTS, IN_FEATURES, OUT_FEATURES // 2, "silu", gated=True).to(device)
    x, logits = (torch.randn(ROWS, n, generator=generator, device=device) for n in (IN_FEATURES, EXPERTS))
    logits[:, 0] += 3.0
    logits[:, 1] -= 100.0
    weight = experts.gate_up_weight.detach().normal_(generator=generator)
    shared = Shared(Draws(0), DelayedScales(1), native, cache=True, caps=HardwareCaps(grouped_fp8=native))
    plan = ExpertLinear(experts, "gate_up_weight", recipe, shared, 0)
    routing = moe.route(logits, 2, True, plan.align)
    grad = torch.randn(len(routing.tokens_S), OUT_FEATURES, generator=generator, device=device)
    grad.masked_fill_((routing.tokens_S < 0)[:, None], 0.0)
    rows, wide = moe.dispatch(x, routing.tokens_S).double(), weight.double()
    ends = routing.ends_E
    expected = {
        "output": reference.grouped_matmul(rows, wide, ends, transpose=True),
        "input gradient": reference.grouped_matmul(grad.double(), wide, ends, transpose=False),
        "weight gradient": reference.grouped_weight_gradient(grad.double(), rows, ends, torch.float64),
    }
    dtype = torch.float32 if recipe.name == "fp32" else torch.bfloat16

    def run() -> tuple[Tensor, ...]:
        forms = plan.weight(dtype)
        inputs = SortedRows(x.to(dtype), routing)
        grads = SortedRows(grad.to(dtype), routing, in_order=True)
        output = plan.output(inputs, forms, dtype)
        return output, plan.input_gradient(grads, forms, dtype), plan.weight_gradient(grads, inputs)

    return replace(_compare(run, expected, recipe.tolerance), native=native or not recipe.quantized)


def _compare(
    run: Callable[[], tuple[Tensor, ...]], expected: dict[str, Tensor], tolerance: float
) -> CheckResult:
    """Compare the results of `run` with `expected`, which has the same order."""
    try:
        results = run()
    except torch.OutOfMemoryError:
        raise  # not a fault of the recipe
    except (RuntimeError, ValueError, UsageError) as error:  # torch refuses some arguments with a ValueError
        return CheckResult(False, {}, f"cannot run here: {first_line(error)}")
    errors: dict[str, float] = {}
    problems: list[str] = []
    for (name, truth), result in zip(expected.items(), results, strict=True):
        result = result.detach().double()
        errors[name] = float((result - truth).norm() / truth.norm())
        if not bool(torch.isfinite(result).all()):
            problems.append(f"{name} is not finite")
        elif not bool(result.any()):
            problems.append(f"{name} is all zero")
        elif errors[name] > tolerance:
            problems.append(f"{name} is off by {errors[name]:.1e}, allowed {tolerance:.1e}")
    return CheckResult(not problems, errors, "; ".join(problems))
