"""Checks of matrix products, of the precision recipes and of memory: first the results, then the speed.

A linear layer has three products: the output x w^T, the input gradient g w, the weight gradient g^T x. Each is computed
as in training and compared with float64. For the scaled formats two errors are reported. The error relative to the
product of the dequantized operands is large only if a kernel is wrong. The error relative to the product of the
unrounded operands includes quantization; a training step has this error. Recipes are checked by their own layers.
"""

import math
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from deskside.config.recipes import recipe_named
from deskside.doctor.check_tools import Result, compare, median_seconds, speed, warm_up, wrong
from deskside.doctor.nvml import NvmlDevice
from deskside.doctor.scaled_operands import FORMATS, Format, ScaledOperand
from deskside.kernels.matmul_peak import SIZES, measure_matmul_peak
from deskside.precision import CheckResult, check
from deskside.precision.selfcheck import HEAD_TOLERANCE, check_gemm, check_head
from deskside.train.environment_record import Sensors

# A float16 product rounds both operands and the result to 11 bits: about 4e-4.
PLAIN = {
    "fp32": (torch.float32, recipe_named("fp32").tolerance),
    "bf16": (torch.bfloat16, recipe_named("bf16").tolerance),
    "fp16": (torch.float16, 2e-3),
}
# Rows, in and out features of the products that are judged. A CPU may compute FP8 at 20 MFLOP/s.
CHECKED = {"cuda": (256, 512, 384), "cpu": (64, 128, 96)}
SMALLEST_TIMED, SLOW_SECONDS = 128, 0.1
# The result's rounding to bfloat16 is 1.7e-3; a wrong scale or layout gives more than 1e-1.
KERNEL_TOLERANCE = 1e-2
COPY_BYTES = {"cuda": 2**30, "cpu": 2**28}
HOST_BYTES = 2**28
WORK_SECONDS = 1.0
CANNOT = "cannot run here: "


def judged(found: CheckResult, tolerance: float) -> Result:
    """Return a self-check as the doctor reports it. An error that is not finite becomes None for JSON."""
    verdict, reason = "wrong numbers", found.reason
    if found.ok:
        verdict, reason = "works", ""
    elif found.reason.startswith(CANNOT):
        verdict, reason = "unsupported", found.reason.removeprefix(CANNOT)
    errors = {
        name: float(f"{error:.3e}") if math.isfinite(error) else None for name, error in found.errors.items()
    }
    why = found.reason if found.ok and not found.native else ""
    details = {"native": found.native, "emulated_because": why.removeprefix("emulated: ")}
    return {
        "verdict": verdict,
        "reason": reason,
        "errors": errors,
        "tolerance": tolerance,
        "details": details,
    }


def recipe(name: str, device: str) -> Result:
    """Check a recipe's linear layer with the check that a run makes before it starts.

    torch's own products are checked apart: a GPU may support them while a recipe's kernels fail, and a recipe may be
    emulated on a GPU without them.
    """
    return judged(check(name, torch.device(device)), recipe_named(name).tolerance)


def head(device: str) -> Result:
    """Check the output head in FP8 (`precision.head`): the loss and both gradients."""
    return judged(check_head(torch.device(device)), HEAD_TOLERANCE)


def plain(dtype: str, device: str) -> Result:
    """Check FP32, BF16 or FP16: errors of the three products, FLOP/s of a large one."""
    kind, tolerance = PLAIN[dtype]
    where = torch.device(device)
    result = judged(check_gemm(lambda x, w: x.to(kind) @ w.to(kind).T, tolerance, device), tolerance)
    del result["details"]
    if result["verdict"] == "unsupported":
        return result

    def seconds(side: int) -> float:
        if where.type == "cuda":
            warm_up(lambda: measure_matmul_peak(where, kind, side), where)
        return 2 * side**3 / measure_matmul_peak(where, kind, side)

    rate = _square_rate(seconds, where)
    if where.type == "cuda" and dtype == "bf16":
        result["details"] = at_work(where, rate)
    return result | {"speed": speed(rate, "FLOP/s")}


def at_work(device: torch.device, rate: float) -> dict[str, Any]:
    """Return watts, temperature and throttling of a GPU during BF16 matmuls, which run at `rate`."""
    side = SIZES["cuda"]
    x = torch.randn(side, side, device=device, dtype=torch.bfloat16)
    out = torch.empty_like(x)
    for _ in range(int(WORK_SECONDS * rate / (2 * side**3)) + 1):
        torch.mm(x, x, out=out)
    time.sleep(0.8 * WORK_SECONDS)  # the host is far ahead of the card, which averages what it reports
    state = Sensors(device).read()
    torch.cuda.synchronize(device)
    return state


def scaled(format_name: str, device: str) -> Result:
    """Check a format of `FORMATS`: errors of the three products, and FLOP/s of a large one."""
    return check_format(FORMATS[format_name], torch.device(device))


def check_format(form: Format, device: torch.device) -> Result:
    x, w, g = _operands(device)
    products: dict[str, tuple[Tensor, Tensor, bool]] = {
        "output": (x, w, False),
        "input gradient": (g, w.t().contiguous(), True),
        "weight gradient": (g.t().contiguous(), x.t().contiguous(), True),
    }
    got, truth, decoded = {}, {}, {}
    for name, (a, b, gradient) in products.items():
        qa, qb = form.quantize(a, gradient), form.quantize(b, False)
        got[name] = form.multiply(qa, qb, gradient)
        truth[name] = a.cpu().double() @ b.cpu().double().T
        decoded[name] = qa.decoded().cpu() @ qb.decoded().cpu().T
    result = compare(got, truth, form.tolerance)
    kernel = compare(got, decoded, KERNEL_TOLERANCE)
    if kernel["verdict"] != "works":
        result = wrong(result, f"against the rounded operands: {kernel['reason']}")
    result["details"] = {"errors_against_rounded_operands": kernel["errors"]}
    rate = _square_rate(lambda side: median_seconds(_square_product(form, device, side), device), device)
    return result | {"speed": speed(rate, "FLOP/s")}


def _operands(device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Return x, w and g. Rows differ 16-fold in size, so that a misplaced scale shows."""
    generator = torch.Generator().manual_seed(0)
    n, k, m = CHECKED[device.type]

    def rows(shape: tuple[int, int]) -> Tensor:
        factors = torch.exp2(4 * torch.rand(shape[0], 1, generator=generator) - 2)
        return (torch.randn(shape, generator=generator) * factors).to(device)

    return rows((n, k)), rows((m, k)), rows((n, m))


def _square_rate(seconds_of: Callable[[int], float], device: torch.device) -> float:
    """Return FLOP/s of a large square product. `seconds_of` takes its side.

    On a CPU the matrices grow until one takes long: some formats, FP16 among them, are not optimised there.
    """
    side = SIZES[device.type] if device.type == "cuda" else SMALLEST_TIMED
    while True:
        seconds = seconds_of(side)
        if side >= SIZES[device.type] or seconds > SLOW_SECONDS:
            return 2 * side**3 / seconds
        side *= 2


def _square_product(form: Format, device: torch.device, side: int) -> Callable[[], Tensor]:
    generator = torch.Generator(device).manual_seed(0)

    def operand() -> ScaledOperand:
        return form.quantize(torch.randn(side, side, generator=generator, device=device), False)

    a, b = operand(), operand()
    return lambda: form.multiply(a, b, False)


def copy(device: str) -> Result:
    """Bytes read and written per second by a copy in the device's memory; for a GPU also what its link does."""
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
    """Bytes per second from page-locked host memory, and the PCIe link as it is meanwhile: an idle card lowers it."""
    source = torch.empty(HOST_BYTES, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(HOST_BYTES, dtype=torch.uint8, device=device)
    seconds = median_seconds(lambda: target.copy_(source, non_blocking=True), device, runs=5)
    card = NvmlDevice.of(device)
    for _ in range(20):  # some 100 ms of copying, in which the link is asked about
        target.copy_(source, non_blocking=True)
    state = card.pcie() if card else {}
    torch.cuda.synchronize(device)
    return {"host_to_device": speed(HOST_BYTES / seconds, "B/s"), **state}
