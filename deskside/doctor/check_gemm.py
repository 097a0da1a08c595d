"""Check matmuls, the precision recipes and memory copies: first their results, then their speed.

A linear layer has three matmuls: the output x w^T, the input gradient g w, the weight gradient g^T x. Each is computed
as in training and compared with float64. For the scaled formats two errors are reported. The error against the product
of the dequantized operands is large only if a kernel is wrong. The error against the product of the unrounded operands
includes quantization, as in a training step. Recipes are checked with their own linear layers.
"""

import math
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from deskside.config.recipes import recipe_named
from deskside.doctor.check_tools import Result, add_error, compare, median_seconds, speed, warm_up
from deskside.doctor.scaled_operands import FORMATS, Format, ScaledOperand
from deskside.kernels import moe
from deskside.kernels.matmul_peak import SIZES, measure_matmul_peak
from deskside.precision import CheckResult, check
from deskside.precision.selfcheck import HEAD_TOLERANCE, check_experts, check_gemm, check_head
from deskside.train.environment_record import Sensors
from deskside.train.nvml import NvmlDevice

# dtype and tolerance. A float16 product rounds both operands and the result to 11 bits: an error of about 4e-4.
PLAIN = {
    "fp32": (torch.float32, recipe_named("fp32").tolerance),
    "bf16": (torch.bfloat16, recipe_named("bf16").tolerance),
    "fp16": (torch.float16, 2e-3),
}
# Rows, in and out features of the products in scaled formats: small on a CPU, where FP8 may run at 20 MFLOP/s.
CHECKED_SHAPE = {"cuda": (256, 512, 384), "cpu": (64, 128, 96)}
# Experts, rows of each, size of their square weights.
GROUPED_SHAPE = {"cuda": (8, 4096, 2048), "cpu": (2, 64, 64)}
SMALLEST_TIMED = 128  # the side with which timing on a CPU begins
SLOW_SECONDS = 0.1  # a matmul that takes longer is the last on a CPU
# The result's rounding to bfloat16 is 1.7e-3; a wrong scale or layout gives more than 1e-1.
KERNEL_TOLERANCE = 1e-2
COPY_BYTES = {"cuda": 2**30, "cpu": 2**28}
HOST_BYTES = 2**28
WORK_SECONDS = 1.0
UNSUPPORTED_PREFIX = "cannot run here: "


def as_result(selfcheck: CheckResult, tolerance: float) -> Result:
    """Return the result of a self-check in the doctor's form; errors that are not finite become None, for JSON."""
    verdict, reason = "wrong numbers", selfcheck.reason
    if selfcheck.ok:
        verdict, reason = "works", ""
    elif selfcheck.reason.startswith(UNSUPPORTED_PREFIX):
        verdict, reason = "unsupported", selfcheck.reason.removeprefix(UNSUPPORTED_PREFIX)
    errors = {
        name: float(f"{error:.3e}") if math.isfinite(error) else None
        for name, error in selfcheck.errors.items()
    }
    why = selfcheck.reason if selfcheck.ok and not selfcheck.native else ""
    details = {"native": selfcheck.native, "emulated_because": why.removeprefix("emulated: ")}
    return {
        "verdict": verdict,
        "reason": reason,
        "errors": errors,
        "tolerance": tolerance,
        "details": details,
    }


def recipe(name: str, device: str) -> Result:
    """Check a recipe's linear layer with the self-check that also precedes a training run.

    torch's own matmuls in the same formats are separate checks (`scaled`): a GPU may support them while a recipe's
    kernels fail, and a recipe may be emulated on a GPU that does not support them.
    """
    return as_result(check(name, torch.device(device)), recipe_named(name).tolerance)


def head(device: str) -> Result:
    """Check the output head in FP8 (`precision.head`): the loss and both gradients."""
    return as_result(check_head(torch.device(device)), HEAD_TOLERANCE)


def experts(device: str) -> Result:
    """Check the grouped products of experts in FP8: an output and both gradients."""
    return as_result(
        check_experts("fp8-rowwise", torch.device(device)), recipe_named("fp8-rowwise").tolerance
    )


def grouped(device: str) -> Result:
    """Check the grouped products of experts in BF16: errors, the backend that computes them, FLOP/s of a large one."""
    where = torch.device(device)
    result = as_result(check_experts("bf16", where), recipe_named("bf16").tolerance)
    if result["verdict"] == "unsupported":
        return result
    experts, rows, width = GROUPED_SHAPE[where.type]
    generator = torch.Generator(device).manual_seed(0)
    x, weight = (
        torch.randn(shape, generator=generator, device=device).to(torch.bfloat16)
        for shape in ((experts * rows, width), (experts, width, width))
    )
    ends_E = torch.arange(1, experts + 1, dtype=torch.int32, device=device) * rows
    seconds = median_seconds(lambda: moe.grouped_matmul(x, weight, ends_E, True), where)
    result["details"] = {"backend": moe.grouped_backend(where, x.dtype, weight.shape, len(x))}
    return result | {"speed": speed(2 * len(x) * width**2 / seconds, "FLOP/s")}


def plain(dtype: str, device: str) -> Result:
    """Check matmuls in FP32, BF16 or FP16: errors of the three matmuls of a layer, FLOP/s of a large one."""
    torch_dtype, tolerance = PLAIN[dtype]
    where = torch.device(device)
    result = as_result(
        check_gemm(lambda x, w: x.to(torch_dtype) @ w.to(torch_dtype).T, tolerance, device), tolerance
    )
    del result["details"]
    if result["verdict"] == "unsupported":
        return result

    def seconds(side: int) -> float:
        if where.type == "cuda":
            warm_up(lambda: measure_matmul_peak(where, torch_dtype, side), where)
        return 2 * side**3 / measure_matmul_peak(where, torch_dtype, side)

    rate = _square_rate(seconds, where)
    if where.type == "cuda" and dtype == "bf16":
        result["details"] = sensors_under_load(where, rate)
    return result | {"speed": speed(rate, "FLOP/s")}


def sensors_under_load(device: torch.device, rate: float) -> dict[str, Any]:
    """Return watts, degrees Celsius and throttling of a GPU during BF16 matmuls. rate: their FLOP/s."""
    side = SIZES["cuda"]
    x = torch.randn(side, side, device=device, dtype=torch.bfloat16)
    out = torch.empty_like(x)
    for _ in range(int(WORK_SECONDS * rate / (2 * side**3)) + 1):
        torch.mm(x, x, out=out)
    # The matmuls still run: the host is ahead of the GPU, whose sensors report averages.
    time.sleep(0.8 * WORK_SECONDS)
    state = Sensors(device).read()
    torch.cuda.synchronize(device)
    return state


def scaled(format_name: str, device: str) -> Result:
    """Check torch's matmul in a format of `FORMATS`: errors of the three matmuls of a layer, FLOP/s of a large one."""
    return check_format(FORMATS[format_name], torch.device(device))


def check_format(scaled_format: Format, device: torch.device) -> Result:
    x, w, g = _operands(device)
    products: dict[str, tuple[Tensor, Tensor, bool]] = {
        "output": (x, w, False),
        "input gradient": (g, w.t().contiguous(), True),
        "weight gradient": (g.t().contiguous(), x.t().contiguous(), True),
    }
    got, truth, dequantized = {}, {}, {}
    for name, (a, b, gradient) in products.items():
        qa, qb = scaled_format.quantize(a, gradient), scaled_format.quantize(b, False)
        got[name] = scaled_format.multiply(qa, qb, gradient)
        truth[name] = a.cpu().double() @ b.cpu().double().T
        dequantized[name] = qa.dequantize().cpu() @ qb.dequantize().cpu().T
    result = compare(got, truth, scaled_format.tolerance)
    kernel = compare(got, dequantized, KERNEL_TOLERANCE)
    if kernel["verdict"] != "works":
        result = add_error(result, f"against the rounded operands: {kernel['reason']}")
    result["details"] = {"errors_against_rounded_operands": kernel["errors"]}
    rate = _square_rate(
        lambda side: median_seconds(_square_product(scaled_format, device, side), device), device
    )
    return result | {"speed": speed(rate, "FLOP/s")}


def _operands(device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Return x, w and g. Their rows differ up to 16-fold in magnitude, so that a misplaced scale causes an error."""
    generator = torch.Generator().manual_seed(0)
    n, k, m = CHECKED_SHAPE[device.type]

    def rows(shape: tuple[int, int]) -> Tensor:
        factors = torch.exp2(4 * torch.rand(shape[0], 1, generator=generator) - 2)
        return (torch.randn(shape, generator=generator) * factors).to(device)

    return rows((n, k)), rows((m, k)), rows((n, m))


def _square_rate(seconds_of: Callable[[int], float], device: torch.device) -> float:
    """Return FLOP/s of a large square matmul. `seconds_of` returns the seconds of one with a given side.

    On a CPU the side doubles until a matmul takes long, since some formats, such as FP16, are slow there.
    """
    side = SIZES[device.type] if device.type == "cuda" else SMALLEST_TIMED
    while True:
        seconds = seconds_of(side)
        if side >= SIZES[device.type] or seconds > SLOW_SECONDS:
            return 2 * side**3 / seconds
        side *= 2


def _square_product(scaled_format: Format, device: torch.device, side: int) -> Callable[[], Tensor]:
    generator = torch.Generator(device).manual_seed(0)

    def operand() -> ScaledOperand:
        return scaled_format.quantize(torch.randn(side, side, generator=generator, device=device), False)

    a, b = operand(), operand()
    return lambda: scaled_format.multiply(a, b, False)


def copy(device: str) -> Result:
    """Check a copy in device memory: its result, bytes read and written per second; for a GPU also its PCIe link."""
    where = torch.device(device)
    size = COPY_BYTES[where.type]
    if where.type == "cuda":
        size = min(size, torch.cuda.mem_get_info(where)[0] // 8)
    source = torch.randint(0, 256, (size,), dtype=torch.uint8, device=where)
    target = torch.zeros_like(source)
    seconds = median_seconds(lambda: target.copy_(source), where)
    equal = bool(torch.equal(source, target))
    result: Result = {
        "verdict": "works" if equal else "wrong numbers",
        "reason": "" if equal else "the copy differs from its source",
        "speed": speed(2 * size / seconds, "B/s"),
    }
    if where.type == "cuda":
        result["details"] = {"link": link(where)}
    return result


def link(device: torch.device) -> dict[str, Any]:
    """Return bytes per second from pinned host memory, and the state of the PCIe link meanwhile: idle GPUs lower it."""
    source = torch.empty(HOST_BYTES, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(HOST_BYTES, dtype=torch.uint8, device=device)
    seconds = median_seconds(lambda: target.copy_(source, non_blocking=True), device, runs=5)
    card = NvmlDevice.from_torch(device)
    for _ in range(20):  # about 100 ms of copies, during which the state of the link is read
        target.copy_(source, non_blocking=True)
    state = card.pcie() if card else {}
    torch.cuda.synchronize(device)
    return {"host_to_device": speed(HOST_BYTES / seconds, "B/s"), **state}
