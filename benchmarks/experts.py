"""Time of each kernel of a mixture of experts on this GPU, and the efficiency of its grouped products.

    python -m benchmarks.experts [--tokens 16384] [--shapes 8x2x2048x2176,64x8x768x256] [--fp8] [--json FILE]

A shape is experts x experts per token x hidden size x intermediate size. Logits are random, so experts get different
numbers of rows. Each grouped product is measured with every backend that works here (`kernels.moe.grouped`); a star
marks the one that a run would use. Its efficiency is its rate relative to that of one dense product with the same
FLOPs, (S, K) x (K, M), measured in turn with it. GB/s are of the bytes that a kernel must read and write; a product
reads the weights of the experts that were chosen. A decoding step is `--tokens 1` or `--tokens 16`.
"""

import argparse
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deskside.config.recipes import expert_recipe, recipe_named
from deskside.kernels import moe
from deskside.kernels.device_time import device_seconds
from deskside.kernels.moe import grouped
from deskside.ops.moe import Experts
from deskside.precision.expert_linear import ExpertLinear
from deskside.precision.grouped_products import grouped_product
from deskside.precision.hardware_caps import hardware_caps
from deskside.precision.products import Kind
from deskside.precision.quantized_linear import Shared
from deskside.precision.quantized_operand import Draws, QuantizedOperand
from deskside.precision.scales import DelayedScales

# Left operand, right operand, transpose (None for the gradient of the weights), and the dense product.
Product = tuple[Tensor, Tensor, bool | None, Callable[[], object]]
DEVICE = torch.device("cuda")
SHAPES = "8x2x2048x2176,8x2x768x1024,16x2x768x1024,32x4x768x512,64x8x768x256,64x8x2048x1024"
RUNS = 20
ACTIVATION = "silu"


def seconds(run: Callable[[], object]) -> float:
    """Return the median time of a call on the device."""
    return device_seconds(run, DEVICE, RUNS, warm_up=3)


def measure(tokens: int, experts: int, k: int, hidden: int, width: int) -> dict[str, Any]:
    """Return seconds, GB/s, TFLOP/s and efficiency by kernel."""

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, device=DEVICE).bfloat16()

    rows = tokens * k
    logits, x, x_sorted = random(tokens, experts), random(tokens, hidden), random(rows, hidden)
    inner, out = random(rows, 2 * width), random(rows, width)
    gate_up, down = random(experts, 2 * width, hidden), random(experts, hidden, width)
    routing = moe.route(logits, k, True)
    ends = routing.ends_E
    grad_weights = torch.randn(rows, device=DEVICE)
    elementwise: dict[str, tuple[int, Callable[[], object]]] = {
        "route": (4 * tokens * experts, lambda: moe.route(logits, k, True)),
        "route backward": (
            6 * tokens * experts,
            lambda: moe.route_backward(grad_weights, routing.statistics_R, logits, routing, True),
        ),
        "dispatch": (4 * rows * hidden, lambda: moe.dispatch(x, routing.tokens_S)),
        "combine": (
            2 * (rows + tokens) * hidden,
            lambda: moe.combine(x_sorted, routing.slots_Nk),
        ),
        "gate": (6 * rows * width, lambda: moe.weighted_gated(inner, routing.weights_S, ACTIVATION, True)),
        "gate backward": (
            12 * rows * width,
            lambda: moe.weighted_gated_backward(out, inner, routing.weights_S, ACTIVATION, True),
        ),
    }
    dense_in, dense_out = random(2 * width, hidden), random(hidden, width)
    products: dict[str, Product] = {
        "gate and up": (x_sorted, gate_up, True, lambda: x_sorted @ dense_in.T),
        "down": (out, down, True, lambda: out @ dense_out.T),
        "gradient of the input": (inner, gate_up, False, lambda: inner @ dense_in),
        "gradient of gate and up": (inner, x_sorted, None, lambda: inner.T @ x_sorted),
    }
    result: dict[str, Any] = {
        name: {"seconds": (time := seconds(run)), "gb_per_s": size / time / 1e9}
        for name, (size, run) in elementwise.items()
    }
    for name, product in products.items():
        for backend, row in measure_backends(product, ends).items():
            result[f"{name}, {backend}"] = row
    return result


def measure_backends(product: Product, ends: Tensor) -> dict[str, dict[str, float]]:
    """Return seconds, GB/s, TFLOP/s and efficiency of a grouped product by backend; a star marks the one in use."""
    left, right, transpose, dense = product
    rows, columns, output = *left.shape, right.shape[1 if transpose else -1]
    chosen = int((ends.diff(prepend=ends.new_zeros(1)) > 0).sum())
    flops = 2 * left.numel() * output
    size = 2 * (left.numel() + rows * output + chosen * columns * output)
    used = grouped.grouped_backend(left.device, left.dtype, (len(ends), columns, output), rows)
    result = {}
    for backend, (matmul, weight_gradient) in grouped.PRODUCTS.items():
        supported = grouped.supports(backend, left.device, left.dtype, (columns, output))
        if backend == "loop" or not (supported and grouped.agrees(backend, left.device, left.dtype)):
            continue
        if transpose is None:
            run = partial(weight_gradient, left, right, ends, torch.bfloat16)
        else:
            run = partial(matmul, left, right, ends, transpose)
        time, dense_time = seconds(run), seconds(dense)
        result[f"{backend}{'*' if backend == used else ''}"] = {
            "seconds": time,
            "gb_per_s": size / time / 1e9,
            "tflops": flops / time / 1e12,
            "dense_tflops": flops / dense_time / 1e12,
            "efficiency": dense_time / time,
        }
    return result


def measure_fp8(tokens: int, experts: int, k: int, hidden: int, width: int) -> dict[str, Any]:
    """Return seconds, GB/s and TFLOP/s of the casts to FP8 and of the FP8 products of gate and up, where native."""
    caps = hardware_caps(DEVICE, mxfp8=False)
    layer = Experts(experts, hidden, width, ACTIVATION, gated=True).to(DEVICE)
    torch.nn.init.normal_(layer.gate_up_weight)
    plan = ExpertLinear(
        layer,
        "gate_up_weight",
        expert_recipe(recipe_named("fp8")),
        Shared(Draws(0), DelayedScales(1), native=True, cache=True, caps=caps),
        0,
    )
    x = torch.randn(tokens, hidden, device=DEVICE).bfloat16()
    routing = moe.route(torch.randn(tokens, experts, device=DEVICE).bfloat16(), k, True, plan.align)
    ends, rows = routing.ends_E, len(routing.tokens_S)
    g, out = (torch.randn(rows, n * width, device=DEVICE).bfloat16() for n in (2, 1))
    weight, forms = layer.gate_up_weight.detach(), plan.weight(torch.bfloat16)
    choices = routing.slots_Nk, routing.tokens_S
    x_cast, g_cast = moe.dispatch_fp8(x, *choices), moe.cast_rows(g)
    x_rows, g_rows = (QuantizedOperand(*cast) for cast in (x_cast, g_cast))
    x_columns, g_columns = (
        QuantizedOperand(*moe.transpose_rows(*cast, ends), transposed=True) for cast in (x_cast, g_cast)
    )
    gate, dispatched = (routing.weights_S, ACTIVATION, True), (2 * tokens + rows) * hidden
    casts: dict[str, tuple[int, Callable[[], object]]] = {
        "dispatch": (dispatched, lambda: moe.dispatch_fp8(x, *choices)),
        "dispatch columns": (dispatched, lambda: moe.dispatch_columns(x, routing.tokens_S, x_cast[1], ends)),
        "transpose gradients": (4 * rows * width, lambda: moe.transpose_rows(*g_cast, ends)),
        "gate": (5 * rows * width, lambda: moe.weighted_gated_fp8(g, *gate)),
        "gate backward": (9 * rows * width, lambda: moe.weighted_gated_backward_fp8(out, g, *gate)),
        "cast weight rows": (5 * weight.numel(), lambda: moe.cast_rows(weight.flatten(0, 1))),
        "cast weight columns": (9 * weight.numel(), lambda: moe.cast_weight_columns(weight)),
    }
    operands: dict[str, tuple[Kind, QuantizedOperand, QuantizedOperand]] = {
        "gate and up": ("output", x_rows, forms[0]),
        "gradient of the input": ("input_gradient", g_rows, forms[1]),
        "gradient of the weights": ("weight_gradient", g_columns, x_columns),
    }
    result: dict[str, Any] = {
        f"FP8 {name}": {"seconds": (time := seconds(run)), "gb_per_s": size / time / 1e9}
        for name, (size, run) in casts.items()
    }
    for name, (kind, left, right) in operands.items():
        run = partial(grouped_product, kind, left, right, ends, torch.bfloat16, plan.native)
        time = seconds(run)
        flops = 4 * tokens * k * hidden * width  # padding does no work that counts
        result[f"FP8 {name}"] = {"seconds": time, "tflops": flops / time / 1e12}
    return result


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.experts",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--shapes", default=SHAPES)
    parser.add_argument("--fp8", action="store_true", help="measure casts to FP8 and FP8 products too")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    results = {}
    for shape in options.shapes.split(","):
        sizes = [int(size) for size in shape.split("x")]
        results[shape] = measure(options.tokens, *sizes)
        if options.fp8:
            results[shape] |= measure_fp8(options.tokens, *sizes)
        print(shape)
        for name, row in results[shape].items():
            values = "  ".join(f"{key} {value:.4g}" for key, value in row.items() if key != "seconds")
            print(f"  {name:33} {row['seconds'] * 1e6:9.1f} us  {values}", flush=True)
    if options.json is not None:
        report = {"device": torch.cuda.get_device_name(), "tokens": options.tokens, "shapes": results}
        options.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
