"""Time of the kernels that cast the operands of FP8 experts on this GPU, with several tiles each, checked.

    python -m benchmarks.expert_casts [--tokens 16384] [--shape 8x2x2048x2176] [--json FILE]

The shape is that of `indicmoe-3b`: experts x experts per token x hidden size x intermediate size; experts get uneven
numbers of rows. Every step is timed with the tiles of `kernels.moe.fp8_launch` first, and then with each tile in TILES
(rows, columns, warps) in place of one of them. Its results are compared with those of `fp8_rows`, in plain torch:
"differ" is the share of E4M3 values that are not equal, "error" the relative error of scales and other results. GB/s
are of the bytes that must be read and written at least, maxima included.

Then come the gradient of the weights of gate and up in three kinds of products, compared with the one in FP8, and three
ways to get from the inputs of the experts of one layer and one pass to the gradients of their weights, as the sum of
their steps: with separate casts of BF16 tensors, with casts in the kernels that produce them, and with weight gradients
in BF16. Products for outputs and input gradients, the same in all, are left out.
"""

import argparse
import json
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from triton.errors import TritonError

from deskside.kernels import moe
from deskside.kernels.moe import fp8_launch, fp8_rows

DEVICE, RUNS, ACTIVATION = "cuda", 20, "silu"
SLEEP = 2_000_000  # clock cycles: long enough for the host to launch what is timed
Run = Callable[[], Any]
TILES: dict[str, tuple[fp8_launch.Tile, ...]] = {
    "AMAX_TILE": ((128, 64, 4), (64, 128, 4), (256, 64, 8), (128, 128, 8), (64, 64, 4), (32, 128, 2)),
    "CAST_TILE": ((128, 64, 4), (64, 128, 4), (128, 128, 8), (256, 64, 8), (64, 64, 4), (128, 64, 8)),
    "BOTH_TILE": ((128, 64, 4), (64, 128, 4), (128, 128, 8), (64, 64, 4), (128, 64, 8)),
    "GATED_AMAX_TILE": ((16, 128, 4), (32, 64, 4), (32, 128, 8), (16, 256, 8), (16, 64, 2), (64, 64, 8)),
    "GATED_CAST_TILE": ((64, 64, 8), (64, 64, 4), (128, 64, 8), (64, 128, 8), (32, 128, 4), (128, 32, 4)),
}


@dataclass(frozen=True)
class Step:
    """A function of `kernels.moe` and its arguments. size: bytes to read and write. tiles: the constants it uses."""

    function: str
    arguments: tuple[Any, ...]
    size: int
    tiles: tuple[str, ...] = ()

    def run(self) -> Any:
        return getattr(moe, self.function)(*self.arguments)


def seconds(run: Run) -> float:
    """Return the median time of a call on the device, without the time of its launch."""
    times = []
    for number in range(RUNS + 3):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(SLEEP)
        begin.record()
        run()
        end.record()
        end.synchronize()
        if number >= 3:
            times.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(times)


@contextmanager
def tile_set(name: str, tile: fp8_launch.Tile) -> Iterator[None]:
    """Use another tile for the kernels that read this constant of `fp8_launch`."""
    before = getattr(fp8_launch, name)
    setattr(fp8_launch, name, tile)
    try:
        yield
    finally:
        setattr(fp8_launch, name, before)


def difference(ours: Tensor, truth: Tensor) -> float:
    """Return the share of E4M3 values that differ, or the relative error of other formats; infinite if not finite."""
    if truth.dtype == torch.float8_e4m3fn:
        return float((ours.view(torch.uint8) != truth.view(torch.uint8)).float().mean())
    value = float((ours.double() - truth.double()).norm() / truth.double().norm())
    return value if value == value else float("inf")


def checked(step: Step) -> dict[str, float]:
    """Return the largest difference of the E4M3 results of a step, and of its other results."""
    module = fp8_rows if hasattr(fp8_rows, step.function) else moe.reference
    results = step.run(), getattr(module, step.function)(*step.arguments)
    pairs = [(r,) if isinstance(r, Tensor) else r for r in results]
    found = {"differ": 0.0, "error": 0.0}
    for ours, truth in zip(*pairs, strict=True):
        key = "differ" if truth.dtype == torch.float8_e4m3fn else "error"
        found[key] = max(found[key], difference(ours, truth))
    return found


def steps_of(tokens: int, experts: int, k: int, hidden: int, width: int) -> dict[str, Step]:
    """Return the steps by name, for random tensors of these sizes."""

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, device=DEVICE).bfloat16()

    uneven = torch.linspace(0, 1.5, experts, device=DEVICE)
    routing = moe.route((random(tokens, experts) + uneven).bfloat16(), k, True, fp8_launch.ALIGN)
    S, to, ends, weights = len(routing.tokens_S), routing.tokens_S, routing.ends_E, routing.weights_S
    x, grad_y, y = random(tokens, hidden), random(tokens, hidden), random(S, 2 * width)
    grad, narrow, gate = random(S, width), random(S, width), (weights, ACTIVATION, True)
    weight = random(experts, 2 * width, hidden)
    columns, tiles = S * hidden, ("AMAX_TILE", "CAST_TILE")
    gated = S * width
    return {
        "rows, gathered": Step("cast_rows", (x, to), 3 * columns),
        "columns, gathered": Step("cast_columns", (x, to, ends), 5 * columns, tiles),
        "both, gathered": Step("cast_both", (grad_y, to, ends), 6 * columns, ("AMAX_TILE", "BOTH_TILE")),
        "rows and BF16, gathered": Step("gather_and_cast", (grad_y, to), 5 * columns),
        "BF16, gathered": Step("dispatch", (x, to), 4 * columns),
        "rows of hidden": Step("cast_rows", (narrow,), 3 * gated),
        "rows of gradient": Step("cast_rows", (y,), 6 * gated),
        "columns of hidden": Step("cast_columns", (narrow, None, ends), 5 * gated),
        "columns of gradient": Step("cast_columns", (y, None, ends), 10 * gated, tiles),
        "gate": Step("weighted_gated", (y, *gate), 6 * gated),
        "gate to FP8": Step("weighted_gated_fp8", (y, *gate), 5 * gated),
        "gate backward": Step("weighted_gated_backward", (grad, y, *gate), 12 * gated),
        "gate backward, rows": Step("weighted_gated_backward_rows", (grad, y, *gate), 14 * gated),
        "gate backward to FP8": Step(
            "weighted_gated_backward_fp8",
            (grad, y, weights, ends, *gate[1:]),
            17 * gated,
            ("GATED_AMAX_TILE", "GATED_CAST_TILE"),
        ),
        "weight columns": Step("cast_weight_columns", (weight,), 5 * weight.numel()),
    }


def products_of(steps: dict[str, Step]) -> dict[str, Run]:
    """Return the gradient of gate and up: in BF16, in E4M3, and in E4M3 with sums in fewer bits."""
    x, to, ends = steps["columns, gathered"].arguments
    (y, *_), rows = steps["columns of gradient"].arguments, moe.dispatch(x, to)
    left, left_scale = moe.cast_columns(y, None, ends)
    right, right_scale = moe.cast_columns(x, to, ends)

    def fp8(fast: bool) -> Tensor:
        return torch._scaled_grouped_mm(
            left,
            right.T,
            left_scale.flatten(),
            right_scale.flatten(),
            offs=ends,
            out_dtype=torch.bfloat16,
            use_fast_accum=fast,
        )

    return {
        "product BF16": lambda: moe.grouped_weight_gradient(y, rows, ends, torch.bfloat16),
        "product FP8": lambda: fp8(False),
        "product FP8, fast accumulation": lambda: fp8(True),
    }


# The products are of gate and up; that of the down projection is half as large.
WAYS: dict[str, dict[str, float]] = {
    "separate casts": dict.fromkeys(
        ("gate", "rows of hidden", "rows, gathered", "columns, gathered", "gate backward", "columns of hidden",
         "columns of gradient", "rows of gradient"), 1.0,
    ) | {"rows, gathered": 2.0, "columns, gathered": 2.0, "product FP8": 1.5},
    "casts where values are produced": dict.fromkeys(
        ("rows, gathered", "gate to FP8", "both, gathered", "gate backward to FP8", "columns, gathered"), 1.0
    ) | {"product FP8": 1.5},
    "weight gradients in BF16": dict.fromkeys(
        ("rows, gathered", "gate to FP8", "rows and BF16, gathered", "gate backward, rows", "BF16, gathered"), 1.0
    ) | {"product BF16": 1.5},
}  # fmt: skip


def measure(steps: dict[str, Step]) -> dict[str, dict[str, Any]]:
    """Return seconds, GB/s and differences by step and tile, and print them as they come."""
    result: dict[str, dict[str, Any]] = {}

    def record(name: str, step: Step) -> None:
        try:
            time, found = seconds(step.run), checked(step)
        except TritonError as error:  # a tile that does not fit on this GPU
            result[name] = {"failed": str(error).splitlines()[0]}
            print(f"{name:50} {result[name]['failed']}", flush=True)
            return
        result[name] = {"seconds": time, "gb_per_s": step.size / time / 1e9, **found}
        values = "  ".join(f"{key} {value:.3g}" for key, value in list(result[name].items())[1:])
        print(f"{name:50} {time * 1e6:8.1f} us  {values}", flush=True)

    for name, step in steps.items():
        record(name, step)
        for constant in step.tiles:
            for tile in TILES[constant]:
                if tile != getattr(fp8_launch, constant):
                    with tile_set(constant, tile):
                        record(f"{name}, {constant} {tile}", step)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.expert_casts",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--shape", default="8x2x2048x2176")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.manual_seed(0)
    steps = steps_of(options.tokens, *map(int, options.shape.split("x")))
    result = measure(steps)
    products = products_of(steps)
    for name, run in products.items():
        found = difference(run(), products["product FP8"]())
        result[name] = {"seconds": seconds(run), "error": found}
        print(f"{name:50} {result[name]['seconds'] * 1e6:8.1f} us  error {found:.3g}", flush=True)
    ways = {
        way: sum(times * result[name]["seconds"] for name, times in parts.items())
        for way, parts in WAYS.items()
    }
    for way, time in ways.items():
        print(f"in all, {way:42} {time * 1e6:8.1f} us")
    if options.json is not None:
        report = {"device": torch.cuda.get_device_name(), **vars(options), "steps": result, "ways": ways}
        options.json.write_text(json.dumps(report, indent=1, default=str) + "\n")


if __name__ == "__main__":
    main()
