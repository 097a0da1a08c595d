"""Speed of the NVFP4 quantizer and the scaled matrix product on this GPU, compared with a copy and torch.mm.

    python -m benchmarks.quantize [--tokens 65536] [--models 124m,1.3b] [--json FILE]

Quantizer: each operand of a recipe, on the tensors of a block. GB/s counts 6 bytes per value (read for the maximum,
read again, written in BF16) and is compared with a measured copy. `pass` is the second pass alone, with a given
maximum: 4 bytes per value. Product: the three products of each linear layer in TFLOP/s, compared with torch.mm in BF16
on the same operands. All times are medians of many runs with a cold L2 cache. Before timing, each product is checked
against torch.mm.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from deskside.config import merge, presets
from deskside.config.recipes import Operand
from deskside.kernels.nvfp4.matmul import Layout, scaled_matmul
from deskside.kernels.nvfp4.quantize import quantize, transformed_amax

OPERANDS: dict[str, tuple[Operand, tuple[str, ...]]] = {
    "1x16": (Operand("nvfp4", "1x16"), ("columns",)),
    "1x16 4/6": (Operand("nvfp4", "1x16", four_over_six=True), ("columns",)),
    "1x16 stochastic": (Operand("nvfp4", "1x16", rounding="stochastic"), ("columns",)),
    "Hadamard 16 nearest": (Operand("nvfp4", "1x16", hadamard=16), ("rows",)),
    "Hadamard 16 stochastic": (Operand("nvfp4", "1x16", hadamard=16, rounding="stochastic"), ("rows",)),
    "eden": (Operand("nvfp4", "1x16", hadamard=128, fresh_signs=True, rounding="eden"), ("columns", "rows")),
    "16x16": (Operand("nvfp4", "16x16"), ("columns", "rows")),
}


def milliseconds(call: Callable[[], object], runs: int = 20) -> float:
    """Return the median milliseconds of a call, with the L2 cache overwritten before each run."""
    flush = torch.empty(64 * 2**20, dtype=torch.float32, device="cuda")
    for _ in range(3):
        call()
    events = [
        (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(runs)
    ]
    for begin, end in events:
        flush.zero_()
        begin.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(begin.elapsed_time(end) for begin, end in events)


def linear_layers(preset: str) -> dict[str, tuple[int, int]]:
    """Return the input and output sizes of the linear layers of a block."""
    model = merge.build(presets.layers(preset)).model
    q, kv = model.num_attention_heads * model.head_dim, model.num_key_value_heads * model.head_dim
    hidden, inner = model.hidden_size, model.intermediate_size
    return {
        "qkv": (hidden, q + 2 * kv),
        "out": (q, hidden),
        "gate-up": (hidden, 2 * inner),
        "down": (inner, hidden),
    }


def time_quantizer(N: int, K: int) -> list[dict[str, object]]:
    """Return the times and rates of a copy and of all `OPERANDS` for a tensor (N, K)."""
    x = torch.randn(N, K, device="cuda").bfloat16()
    copy = milliseconds(lambda: torch.clone(x))
    rows: list[dict[str, object]] = []
    rows.append({"operand": "copy", "along": "", "ms": copy, "GB/s": 4 * x.numel() / copy / 1e6})
    for name, (operand, directions) in OPERANDS.items():
        signs = torch.randint(0, 2, (128,), device="cuda").float() * 2 - 1 if operand.fresh_signs else None
        for along in directions:
            both_passes = milliseconds(lambda o=operand, a=along, s=signs: quantize(x, o, a, signs=s, seed=1))  # type: ignore[misc]
            amax = transformed_amax(x, operand, along, signs)  # type: ignore[arg-type]
            second_pass = milliseconds(
                lambda o=operand, a=along, s=signs, m=amax: quantize(x, o, a, signs=s, seed=1, amax=m)  # type: ignore[misc]
            )
            rows.append(
                {
                    "operand": name,
                    "along": along,
                    "ms": both_passes,
                    "GB/s": 6 * x.numel() / both_passes / 1e6,
                    "pass ms": second_pass,
                    "pass GB/s": 4 * x.numel() / second_pass / 1e6,
                }
            )
    return rows


def time_matmuls(name: str, N: int, K: int, M: int) -> list[dict[str, object]]:
    """Check and time the three matmuls of a linear layer with N rows, K inputs and M outputs."""
    x, w, dy = (torch.randn(shape, device="cuda").bfloat16() for shape in ((N, K), (M, K), (N, M)))
    alpha = torch.ones((), device="cuda")
    cases: list[tuple[str, Layout, Tensor, Tensor, torch.dtype, Callable[[], Tensor]]] = [
        ("output", "nt", x, w, torch.bfloat16, lambda: torch.mm(x, w.T)),
        ("input gradient", "nn", dy, w, torch.bfloat16, lambda: torch.mm(dy, w)),
        ("weight gradient", "tn", dy, x, torch.float32, lambda: torch.mm(dy.T, x, out_dtype=torch.float32)),
    ]
    rows: list[dict[str, object]] = []
    for product, layout, left, right, dtype, reference in cases:

        def ours(
            layout: Layout = layout, left: Tensor = left, right: Tensor = right, dtype: torch.dtype = dtype
        ) -> Tensor:
            return scaled_matmul(left, right, alpha, layout, dtype=dtype)

        expected = reference().float()
        error = float((ours().float() - expected).norm() / expected.norm())
        if not error < 4e-3:
            sys.exit(f"{name} {product}: differs from torch.mm by {error:.1e}; not timed")
        ours_ms, torch_ms = milliseconds(ours), milliseconds(reference)
        flops = 2 * N * K * M / 1e9
        rows.append(
            {
                "layer": name,
                "product": product,
                "ms": ours_ms,
                "TFLOP/s": flops / ours_ms,
                "torch.mm ms": torch_ms,
            }
            | {"torch TFLOP/s": flops / torch_ms, "of torch.mm": torch_ms / ours_ms}
        )
    return rows


def show(title: str, rows: list[dict[str, object]]) -> None:
    columns = list(dict.fromkeys(key for row in rows for key in row))
    table = Table(*columns, title=title)
    for row in rows:
        cells = [row.get(column, "") for column in columns]
        table.add_row(*(f"{cell:.3g}" if isinstance(cell, float) else str(cell) for cell in cells))
    Console(width=110).print(table)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=65536)
    parser.add_argument("--models", default="124m,1.3b")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("benchmarks.quantize needs a CUDA device")
    N = arguments.tokens
    result: dict[str, object] = {
        "card": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "tokens": N,
    }
    for model in arguments.models.split(","):
        layers = linear_layers(model)
        quantised = {K: time_quantizer(N, K) for K in sorted({K for pair in layers.values() for K in pair})}
        multiplied = [row for name, (K, M) in layers.items() for row in time_matmuls(name, N, K, M)]
        for K, rows in quantised.items():
            show(f"{model}: quantize {N} x {K}", rows)
        show(f"{model}: scaled product", multiplied)
        result[model] = {"quantise": quantised, "product": multiplied}
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
